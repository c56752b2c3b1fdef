"""Downloads that end with their session, or are dropped by their client."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from heliograph_proto.errors import CancelledError, SessionClosedError
from heliograph_server.session.bulk import Downloads
from heliograph_server.session.protocol.transfer_state import TransferState
from heliograph_server.session.staging import Staging


def made(*, is_kept: bool = False) -> Downloads:
    transfers = TransferState(8, [], deque())
    return Downloads(transfers, threading.RLock(), Staging(100, "downloads"), is_kept=is_kept)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_reader_that_waits_ends_when_its_client_drops_the_download(is_read: bool) -> None:
    downloads = made(is_kept=True)
    reader = downloads.open(1)
    downloads.acknowledge(1)
    assert isinstance(reader.future.exception(0), CancelledError)
    if is_read:
        # The command that was to read for it fails later.
        downloads.settle(1, 1, SessionClosedError("too late"))()
        assert isinstance(reader.future.exception(0), CancelledError)


def test_a_reader_that_comes_after_the_end_of_the_session_is_refused() -> None:
    downloads = made()
    downloads.close(SessionClosedError("the session was closed"))
    with pytest.raises(SessionClosedError, match="was closed"):
        downloads.open(1)


def test_a_command_that_ends_with_its_session_leaves_the_reader_the_error_of_the_session() -> None:
    downloads = made()
    reader = downloads.open(1)
    resume = downloads.settle(1, 1, CancelledError("interrupted"))
    downloads.close(SessionClosedError("the session was closed"))
    resume()
    assert isinstance(reader.future.exception(0), SessionClosedError)


def test_readers_that_wait_get_an_error_each_since_a_shared_one_refers_to_all_of_them() -> None:
    downloads = made()
    readers = [downloads.open(transfer) for transfer in (1, 2)]
    downloads.close(ended := SessionClosedError("the session was closed"))
    errors = [one.future.exception(0) for one in readers]
    assert [str(one) for one in errors] == [str(ended)] * 2
    assert len({id(one) for one in (ended, *errors)}) == 3
