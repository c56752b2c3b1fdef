"""Uploads whose client leaves while they begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_server.rpc.receiving import begun
from heliograph_server.weights.uploads import IncomingUpload


class Uploaded(IncomingUpload):
    """An upload that keeps the error of its end."""

    def __init__(self) -> None:
        super().__init__(4, lambda _upload: None)
        self.error: HeliographError | None = None

    def _abort(self, error: HeliographError) -> None:
        self.error = error

    def _write(self, data: memoryview) -> None: ...

    def _finish(self) -> None: ...


async def left(beginning: Future[Uploaded], meanwhile: Callable[[], object]) -> None:
    """Waits for the beginning, is cancelled, and `meanwhile` happens before it notices."""
    waiting = asyncio.ensure_future(begun(beginning))
    await asyncio.sleep(0)
    waiting.cancel()
    meanwhile()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upload_that_begins_as_its_client_leaves_is_aborted(when: str) -> None:
    beginning, upload = Future[Uploaded](), Uploaded()
    # Its beginning is under way, so it cannot be cancelled any more.
    assert beginning.set_running_or_notify_cancel()
    begin = lambda: beginning.set_result(upload)  # noqa: E731
    asyncio.run(left(beginning, begin if when == "before" else lambda: None))
    if when == "after":
        begin()
    assert isinstance(upload.error, CancelledError)


def test_an_upload_that_has_not_begun_never_begins() -> None:
    beginning = Future[Uploaded]()
    asyncio.run(left(beginning, lambda: None))
    assert beginning.cancelled()
