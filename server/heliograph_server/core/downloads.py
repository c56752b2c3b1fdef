"""The runtime's side of downloads: staged bytes on their way from a command to a reader.

The reader may come before or after the command. Staged bytes are given back when the reader is done
with them, when it left, or when the session ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from heliograph_proto.errors import (
    DeadlineExceededError,
    HeliographError,
    InternalError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_server.core.protocol import SessionCore
from heliograph_server.core.staged import Messages
from heliograph_server.core.staging import Staging

#: The most readers that wait for a command which has not come.
MAX_WAITING = 10_000


class Download:
    """Bytes on their way out, for one reader. Closing it gives the staged bytes back."""

    def __init__(self, transfer: int, closed: Callable[[Download], None]) -> None:
        self.transfer = transfer
        #: The staged bytes, or the error of the command that was to read them.
        self.future: Future[Messages] = Future()
        # Nobody but the session may end it: a reader that leaves must not.
        self.future.set_running_or_notify_cancel()
        self.staged: Messages | None = None
        self.is_claimed = False
        self._closed = closed

    def __repr__(self) -> str:
        return f"<Download {self.transfer}: {'ready' if self.future.done() else 'awaited'}>"

    def wait(self, timeout: float) -> Messages:
        """The bytes, as messages. Raises DeadlineExceededError, or the error of the command."""
        try:
            return self.future.result(timeout)
        except FutureTimeoutError:
            if self.future.done():
                raise
        raise DeadlineExceededError(f"transfer {self.transfer} was not read within {timeout} s")

    def close(self) -> None:
        """The reader is done, or left. Idempotent."""
        self._closed(self)


class Downloads:
    """The downloads of a session. `lock` guards the core."""

    def __init__(self, core: SessionCore, lock: threading.RLock, staging: Staging) -> None:
        self._core = core
        self._lock = lock
        self._staging = staging
        self._downloads: dict[int, Download] = {}
        #: What commands have staged and not delivered, by sequence number.
        self._staged: dict[int, Messages] = {}

    def __repr__(self) -> str:
        return f"<Downloads {len(self._downloads)}>"

    def open(self, transfer: int) -> Download:
        """A reader came. Raises ProtocolError if it is the second one, LimitExceededError."""
        with self._lock:
            if len(self._downloads) >= MAX_WAITING:
                raise LimitExceededError("too many downloads are waiting", advice="wait for some")
            found = self._get(transfer)
            if found.is_claimed:
                raise ProtocolError(f"transfer {transfer} is being downloaded already")
            found.is_claimed = True
            return found

    def stage(self, sequence: int, data: Messages) -> None:
        """A command read its bytes; it is not done yet."""
        with self._lock:
            self._staged[sequence] = data

    def settle(self, transfer: int, sequence: int, error: HeliographError | None) -> Callable[[], None]:
        """The command is done: what to call, without the lock, to tell the reader. Lock held."""
        download = self._get(transfer)
        staged = self._staged.pop(sequence, None) if error is None else None
        if staged is None:
            return partial(download.future.set_exception, error or InternalError("no bytes were staged"))
        download.staged = staged
        return partial(download.future.set_result, staged)

    def drop(self, sequence: int) -> None:
        """The command has retired: what it staged too late goes. Lock held."""
        self._give(self._staged.pop(sequence, None))

    def close(self, error: HeliographError) -> None:
        """The session ends: readers that wait fail with this error."""
        with self._lock:
            downloads, self._downloads = self._downloads, {}
            for download in downloads.values():
                self._give(download.staged)
        for download in downloads.values():
            if not download.future.done():
                download.future.set_exception(error)

    def _get(self, transfer: int) -> Download:
        if transfer not in self._downloads:
            self._downloads[transfer] = Download(transfer, self._close)
        return self._downloads[transfer]

    def _close(self, download: Download) -> None:
        with self._lock:
            if self._downloads.get(download.transfer) is not download:
                return
            pending = not download.future.done() and self._core.is_reading(download.transfer)
            download.is_claimed = False
            if not pending:
                del self._downloads[download.transfer]
                self._core.read_ended(download.transfer)
                self._give(download.staged)

    def _give(self, staged: Messages | None) -> None:
        if staged is not None:
            self._staging.give(staged.nbytes)
