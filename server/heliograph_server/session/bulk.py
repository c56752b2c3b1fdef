"""The runtime's side of uploads: bytes into staging, for a command, or into contents, for plans.

An upload is written piece by piece, in order. It ends with `finish` or `abort`; the session aborts
those that are open when it closes, from another thread. Locks are taken in the order upload, session.

The runtime's side of downloads: staged bytes on their way from a command to a reader.

The reader may come before or after the command. Staged bytes are given back when the reader is done
with them, when it left, or when the session ends.

Any thread: the workers of the bulk service, or the thread that closes the session.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from heliograph_proto.digests import DIGEST_BYTES
from heliograph_proto.errors import (
    ContentMismatchError,
    DeadlineExceededError,
    HeliographError,
    InternalError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_server.session.protocol.transfer_state import TransferState
from heliograph_server.session.staging import StagedMessages, StagedUpload, Staging
from heliograph_server.weights.session_weights import SessionWeights
from heliograph_server.weights.store import PartialContent
from heliograph_server.weights.uploads import BREAKS, IncomingUpload


class TransferUpload(IncomingUpload):
    """Bytes for a SetTensor, which takes them when it has its turn. `arrived` is told of their end, `broke`
    that there will be none."""

    def __init__(
        self,
        incoming: StagedUpload,
        arrived: Callable[[], None],
        broke: Callable[[HeliographError], None],
        over: Callable[[IncomingUpload], None],
    ) -> None:
        super().__init__(incoming.size_bytes, over)
        self._arrived = arrived
        self._broke = broke
        #: None once it is over.
        self._incoming: StagedUpload | None = incoming

    def _write(self, data: memoryview) -> None:
        self._open().add(data.cast("B"))

    def _finish(self) -> None:
        incoming = self._open()
        self._arrived()
        incoming.end()
        self._incoming = None

    def _open(self) -> StagedUpload:
        if self._incoming is None:
            raise ProtocolError("the upload is over")
        return self._incoming

    def _abort(self, error: HeliographError) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.fail(error)
            self._broke(error)


class ContentUpload(IncomingUpload):
    """A content, received straight into the memory of a device, and hashed on the way."""

    is_content = True

    def __init__(
        self,
        digest: bytes,
        size_bytes: int,
        contents: SessionWeights,
        over: Callable[[IncomingUpload], None],
        offset_bytes: int = 0,
    ) -> None:
        super().__init__(size_bytes, over)
        if len(digest) != DIGEST_BYTES:
            raise ProtocolError(f"a digest of {len(digest)} bytes; BLAKE3 has {DIGEST_BYTES}")
        self._digest = digest
        self._contents = contents
        self._part: PartialContent | None = contents.begin(digest, size_bytes, offset_bytes)
        self.start_bytes = self.received_bytes = offset_bytes

    def _write(self, data: memoryview) -> None:
        if self._part is None:
            raise ProtocolError("the upload is over")
        self._part.buffer.set(self.received_bytes, data)
        self._part.hash.update(data)
        self._part.received_bytes += data.nbytes

    def _finish(self) -> None:
        if self._part is None:
            raise ProtocolError("the upload is over")
        if self._part.hash.digest() != self._digest:
            raise ContentMismatchError("the bytes do not have the digest announced", advice="send them again")
        part, self._part = self._part, None
        try:
            self._contents.add(self._digest, part.buffer)
        finally:
            # It counts with the tenant's contents now.
            part.charge.give()

    def _abort(self, error: HeliographError) -> None:
        part, self._part = self._part, None
        if part is None:
            return
        if isinstance(error, BREAKS):
            self._contents.keep(self._digest, part)
        else:
            part.free()


#: The most readers that wait for a command which has not come.
MAX_WAITING = 10_000


class OutgoingDownload:
    """Bytes on their way out, for one reader. Closing it gives the staged bytes back."""

    def __init__(self, transfer: int, closed: Callable[[OutgoingDownload], None]) -> None:
        self.transfer = transfer
        #: The staged bytes, or the error of the command that was to read them.
        self.future: Future[StagedMessages] = Future()
        # Nobody but the session may end it: a reader that leaves must not.
        self.future.set_running_or_notify_cancel()
        self.staged: StagedMessages | None = None
        self.is_claimed = False
        self._closed = closed

    def __repr__(self) -> str:
        return f"<Download {self.transfer}: {'ready' if self.future.done() else 'awaited'}>"

    def wait(self, timeout: float) -> StagedMessages:
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

    def __init__(self, transfers: TransferState, lock: threading.RLock, staging: Staging) -> None:
        self._transfers = transfers
        self._lock = lock
        self._staging = staging
        self._downloads: dict[int, OutgoingDownload] = {}
        #: What commands have staged and not delivered, by sequence number.
        self._staged: dict[int, StagedMessages] = {}

    def __repr__(self) -> str:
        return f"<Downloads {len(self._downloads)}>"

    def open(self, transfer: int) -> OutgoingDownload:
        """A reader came. Raises ProtocolError if it is the second one, LimitExceededError."""
        with self._lock:
            if len(self._downloads) >= MAX_WAITING:
                raise LimitExceededError("too many downloads are waiting", advice="wait for some")
            found = self._get(transfer)
            if found.is_claimed:
                raise ProtocolError(f"transfer {transfer} is being downloaded already")
            found.is_claimed = True
            return found

    def stage(self, sequence: int, data: StagedMessages) -> None:
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

    def _get(self, transfer: int) -> OutgoingDownload:
        if transfer not in self._downloads:
            self._downloads[transfer] = OutgoingDownload(transfer, self._close)
        return self._downloads[transfer]

    def _close(self, download: OutgoingDownload) -> None:
        with self._lock:
            if self._downloads.get(download.transfer) is not download:
                return
            pending = not download.future.done() and self._transfers.is_reading(download.transfer)
            download.is_claimed = False
            if not pending:
                del self._downloads[download.transfer]
                self._transfers.read_ended(download.transfer)
                self._give(download.staged)

    def _give(self, staged: StagedMessages | None) -> None:
        if staged is not None:
            self._staging.give(staged.nbytes)
