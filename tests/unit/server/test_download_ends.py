"""Downloads that end with their session."""

from __future__ import annotations

import threading
from collections import deque

from heliograph_proto.errors import SessionClosedError
from heliograph_server.session.bulk import Downloads
from heliograph_server.session.protocol.transfer_state import TransferState
from heliograph_server.session.staging import Staging


def test_readers_that_wait_get_an_error_each_since_a_shared_one_refers_to_all_of_them() -> None:
    lock = threading.RLock()
    downloads = Downloads(TransferState(8, [], deque()), lock, Staging(100, "downloads"))
    readers = [downloads.open(transfer) for transfer in (1, 2)]
    downloads.close(ended := SessionClosedError("the session was closed"))
    errors = [one.future.exception(0) for one in readers]
    assert [str(one) for one in errors] == [str(ended)] * 2
    assert len({id(one) for one in (ended, *errors)}) == 3
