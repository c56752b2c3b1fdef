"""Uploads and downloads of a session.

An upload goes into staging, for a command, or into a content, for plans. It is written piece by
piece, in order, and ends with `finish` or `abort`. A session that closes aborts its open uploads
from another thread. Locks are taken in the order upload, session.

A download takes staged bytes from a command to a reader, which may come before or after the
command. Staged bytes are released when the reader is done or leaves, or when the session ends. In a
session with a lease they are kept until the client says that it has them, and another reader may go
on.

Any thread: the workers of the bulk service, or the thread that closes the session.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial

from heliograph_backends.contract import Abort
from heliograph_proto.digests import DIGEST_BYTES
from heliograph_proto.errors import (
    CancelledError,
    ContentMismatchError,
    DeadlineExceededError,
    HeliographError,
    InternalError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_server.session.protocol.instructions import DropRead
from heliograph_server.session.protocol.transfer_state import TransferState
from heliograph_server.session.staging import PlacedBytes, StagedMessages, StagedUpload, Staging
from heliograph_server.weights.session_weights import SessionWeights
from heliograph_server.weights.store import STALLED_SECONDS, PartialContent
from heliograph_server.weights.uploads import BREAKS, IncomingUpload


class TransferUpload(IncomingUpload):
    """Bytes for a SetTensor, which takes them in its turn.

    `arrived` is called when all bytes are here, and `broke` when the upload fails. If it `is_kept`,
    another upload may go on with the bytes after its connection broke.
    """

    def __init__(
        self,
        incoming: StagedUpload,
        arrived: Callable[[], None],
        broke: Callable[[HeliographError], None],
        over: Callable[[IncomingUpload], None],
        *,
        is_kept: bool = False,
        start_bytes: int = 0,
    ) -> None:
        super().__init__(incoming.size_bytes, over)
        self._arrived = arrived
        self._broke = broke
        self._incoming = incoming
        self._is_kept = is_kept
        self.start_bytes = self.received_bytes = start_bytes
        #: True while no connection carries it.
        self.is_paused = False

        #: True once all bytes are here.
        self.is_whole = False

    def break_off(self, error: HeliographError) -> None:
        if not self._is_kept:
            super().break_off(error)
            return
        with self._lock:
            if self._ended is None:
                self.is_paused, self._ended = True, error

    def abort(self, error: HeliographError) -> None:
        with self._lock:
            if self.is_paused:
                # It has no connection, and ends for its command.
                self.is_paused, self._ended = False, None
            super().abort(error)

    def forget(self) -> None:
        """Let go of one that has a successor."""
        self._over(self)

    def successor(self) -> TransferUpload:
        """Return the upload that goes on with the bytes. A connection that has this one fails."""
        with self._lock:
            if self._ended is None or self.is_paused:
                self._ended = CancelledError("another upload goes on with the bytes")
            self.is_paused = False
            made = TransferUpload(
                self._incoming,
                self._arrived,
                self._broke,
                self._over,
                is_kept=True,
                start_bytes=self.received_bytes,
            )
            made.is_paused = True
            return made

    def _write(self, data: memoryview) -> None:
        self._incoming.add(data.cast("B"))

    def _receive(self, into: Callable[[memoryview], int], most_bytes: int) -> int:
        return self._incoming.receive(into, most_bytes)

    def _finish(self) -> None:
        self._arrived()
        self._incoming.end()
        self.is_whole = True

    def _abort(self, error: HeliographError) -> None:
        self._incoming.fail(error)
        self._broke(error)


#: The most uploads that are remembered after their end, for a client that missed the answer.
MOST_FINISHED = 4096


class ResumableUploads:
    """The uploads for commands of a session with a lease, which go on after their connection broke.

    By transfer: those that have begun and not ended, and those that ended lately. The lock of an
    upload is taken before the one here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, TransferUpload] = {}
        #: The sizes of those that ended well.
        self._finished: OrderedDict[int, int] = OrderedDict()
        #: The attempts that are under way or follow, of transfers that broke off.
        self._attempts: OrderedDict[int, int] = OrderedDict()
        #: Those that had no connection at the last `drop`.
        self._alone: set[TransferUpload] = set()

    def __repr__(self) -> str:
        return f"<ResumableUploads {len(self._under_way)}>"

    def add(self, transfer: int, upload: TransferUpload) -> None:
        """Add one that begins, or goes on."""
        with self._lock:
            self._under_way[transfer] = upload

    def over(self, upload: TransferUpload) -> None:
        """Forget one that has ended, but for its size if it ended well."""
        with self._lock:
            for transfer, one in self._under_way.items():
                if one is upload:
                    del self._under_way[transfer]
                    if upload.is_whole:
                        self._finished[transfer] = upload.size_bytes
                    break
            while len(self._finished) > MOST_FINISHED:
                self._finished.popitem(last=False)

    def received(self, transfer: int, attempt: int) -> int:
        """Return the bytes of a transfer that are here, before an attempt to send the rest.

        A connection that carries an earlier attempt, or brings one late, cannot any more.
        """
        with self._lock:
            self._attempts[transfer] = max(attempt, self._attempts.pop(transfer, 0))
            if len(self._attempts) > MOST_FINISHED:
                self._attempts.popitem(last=False)
            found = self._under_way.get(transfer)
            if found is None:
                return self._finished.get(transfer, 0)
        made = found.successor()
        if not self._replace(transfer, found, made):
            # Another connection was faster, or the upload has ended.
            return self.received(transfer, attempt)
        return made.received_bytes

    def _replace(self, transfer: int, found: TransferUpload, made: TransferUpload) -> bool:
        """Put a successor in the place of an upload; False if that is not there any more.

        Two successors would both add the same bytes."""
        with self._lock:
            if self._under_way.get(transfer) is not found:
                return False
            self._under_way[transfer] = made
        found.forget()
        return True

    def go_on(self, transfer: int, size_bytes: int, offset_bytes: int, attempt: int) -> TransferUpload | None:
        """Return the upload with which a connection goes on; None: the transfer has not begun.

        Raises ProtocolError for another size or offset, and CancelledError for an attempt that
        comes too late.
        """
        with self._lock:
            if attempt < self._attempts.get(transfer, 0):
                raise CancelledError("another upload goes on with the bytes")
            found = self._under_way.get(transfer)
            if found is None or not found.is_paused:
                if offset_bytes:
                    raise ProtocolError(f"transfer {transfer} does not go on at byte {offset_bytes:,}")
                return None
        if (size_bytes, offset_bytes) != (found.size_bytes, found.received_bytes):
            raise ProtocolError(
                f"transfer {transfer} has {found.received_bytes:,} of {found.size_bytes:,} bytes; "
                f"byte {offset_bytes:,} of {size_bytes:,} does not follow"
            )
        made = found.successor()
        made.is_paused = False
        if not self._replace(transfer, found, made):
            raise CancelledError("another upload goes on with the bytes")
        return made

    def drop(self, error: HeliographError) -> None:
        """Abort those without a connection since the last call."""
        with self._lock:
            paused = {one for one in self._under_way.values() if one.is_paused}
            over, self._alone = paused & self._alone, paused
        for one in over:
            one.abort(error)

    def close(self, error: HeliographError) -> None:
        """Abort all, at the end of the session."""
        with self._lock:
            left = list(self._under_way.values())
        for one in left:
            one.abort(error)


class ContentUpload(IncomingUpload):
    """A content, received straight into device memory and hashed on the way."""

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
        #: When its last bytes came.
        self._seen = contents.now()
        contents.join(self)

    def _write(self, data: memoryview) -> None:
        assert self._part is not None, "an upload that is over gets no more"
        self._part.buffer.set(self.received_bytes, data)
        self._part.hash.update(data)
        self._part.received_bytes += data.nbytes

    def came(self) -> None:
        self._seen = self._contents.now()

    @property
    def _is_stalled(self) -> bool:
        is_whole = self.received_bytes == self.size_bytes
        return not is_whole and self._contents.now() - self._seen >= STALLED_SECONDS

    def make_room(self) -> bool:
        """As `Reclaimable.make_room`: end the upload if it is stalled."""
        if not self._lock.acquire(blocking=False):
            # Bytes are being written.
            return False
        try:
            if not self._is_stalled or (part := self._take()) is None:
                return False
            self._ended = DeadlineExceededError(
                f"no bytes of the upload came for {STALLED_SECONDS:g} s, and its memory was needed",
                advice="upload it again, without such a pause",
            )
        finally:
            self._lock.release()
        part.free()
        return True

    def idle_on(self, device: str) -> int:
        """As `Reclaimable.idle_on`."""
        part = self._part
        return part.bytes_on(device) if part is not None and self._is_stalled else 0

    def _take(self) -> PartialContent | None:
        """Take the content out of the upload."""
        part, self._part = self._part, None
        self._contents.leave(self)
        return part

    def _finish(self) -> None:
        assert self._part is not None, "an upload that is over gets no more"
        if self._part.hash.digest() != self._digest:
            raise ContentMismatchError("the bytes do not have the digest announced", advice="send them again")
        part = self._part
        self._take()
        try:
            self._contents.add(self._digest, part.buffer)
        finally:
            # The tenant's contents count it from here on.
            part.charge.give()

    def _abort(self, error: HeliographError) -> None:
        if (part := self._take()) is None:
            return
        if isinstance(error, BREAKS):
            self._contents.keep(self._digest, part)
        else:
            part.free()


#: The most downloads of a session at once, including those that wait for their command.
MAX_WAITING = 10_000
#: The time that a command waits for a reader that takes its bytes in place.
READER_SECONDS = 0.02


class OutgoingDownload:
    """Outgoing bytes for one reader. Closing it releases the staged bytes."""

    def __init__(self, transfer: int, closed: Callable[[OutgoingDownload], None]) -> None:
        self.transfer = transfer
        #: The staged bytes, those in place, or the error of the command that reads them.
        self.future: Future[StagedMessages | PlacedBytes] = Future()
        # A reader that leaves cannot cancel it; only the session ends it.
        self.future.set_running_or_notify_cancel()
        self.staged: StagedMessages | None = None
        self.placed: PlacedBytes | None = None
        self.is_claimed = False
        #: Counts its readers. One that is not the last no longer matters.
        self.readers = 0
        #: True if its client has the bytes, or needs none.
        self.is_dropped = False
        #: True if the reader takes bytes in place.
        self.takes_placed = False
        self.claimed = threading.Event()
        self._closed = closed

    def __repr__(self) -> str:
        return f"<Download {self.transfer}: {'ready' if self.future.done() else 'awaited'}>"

    def wait(self, timeout: float) -> StagedMessages:
        """Return the bytes, as messages. Raises DeadlineExceededError, or the command's error."""
        try:
            found = self.future.result(timeout)
            assert isinstance(found, StagedMessages), "this reader takes no bytes in place"
            return found
        except FutureTimeoutError:
            if self.future.done():
                raise
        raise DeadlineExceededError(f"transfer {self.transfer} was not read within {timeout} s")

    def close(self) -> None:
        """End the download. Idempotent."""
        self._closed(self)


class DownloadReader:
    """A reader of outgoing bytes, from one of them on."""

    def __init__(self, download: OutgoingDownload, offset_bytes: int, is_kept: bool) -> None:
        self.download, self.offset_bytes = download, offset_bytes
        #: True if the bytes stay until the client acknowledges them.
        self.is_kept = is_kept
        self.future = download.future
        self._number = download.readers

    def __repr__(self) -> str:
        return f"<Reader of {self.download}>"

    def wait(self, timeout: float) -> StagedMessages:
        """As `OutgoingDownload.wait`."""
        return self.download.wait(timeout)

    def close(self) -> None:
        """Leave. The last reader ends a download that is not kept. Idempotent."""
        if self._number == self.download.readers:
            self.download.close()


class Downloads:
    """The downloads of a session. `lock` is the session's, which guards the core.

    If they are `kept`, they end with `acknowledge`.
    """

    def __init__(
        self, transfers: TransferState, lock: threading.RLock, staging: Staging, *, is_kept: bool = False
    ) -> None:
        self._is_kept = is_kept
        #: Those without a reader at the last `drop_unread`.
        self._unread: set[OutgoingDownload] = set()
        self._transfers = transfers
        self._lock = lock
        self._staging = staging
        self._downloads: dict[int, OutgoingDownload] = {}
        #: Bytes that commands staged and did not deliver yet, by sequence number.
        self._staged: dict[int, StagedMessages] = {}
        #: The commands that gave their bytes to a reader in place.
        self._placed: set[int] = set()
        #: True once a reader took bytes in place: others will.
        self._has_placed = False
        #: The error with which the session has ended.
        self._ended: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<Downloads {len(self._downloads)}>"

    @property
    def are_open(self) -> bool:
        """True if bytes wait for a reader, or are being read. Lock held."""
        held = (one.staged is not None or one.placed is not None for one in self._downloads.values())
        return bool(self._staged) or any(held)

    def open(
        self, transfer: int, *, takes_placed: bool = False, offset_bytes: int = 0, resume: bool = False
    ) -> DownloadReader:
        """Register a reader. Raises ProtocolError for a second one, LimitExceededError, and the
        error with which the session has ended.

        One that `takes_placed` may get bytes in place, and closes the download soon. One that
        `resume`s takes the place of an earlier one, and begins at an offset.
        """
        if (offset_bytes or resume) and not self._is_kept:
            raise ProtocolError("a download goes on only in a session with a lease")
        with self._lock:
            if self._ended is not None:
                raise self._ended.anew()
            if len(self._downloads) >= MAX_WAITING:
                raise LimitExceededError("too many downloads are waiting", advice="wait for earlier ones")
            found = self._get(transfer)
            if found.is_claimed and not resume:
                raise ProtocolError(f"transfer {transfer} is being downloaded already")
            found.is_claimed, found.takes_placed = True, takes_placed
            found.readers += 1
            self._has_placed = self._has_placed or takes_placed
            found.claimed.set()
            return DownloadReader(found, offset_bytes, self._is_kept)

    def acknowledge(self, transfer: int) -> None:
        """Drop a kept download, since its client has all bytes, or needs none."""
        with self._lock:
            if self._is_kept and (found := self._downloads.get(transfer)) is not None:
                found.is_dropped = True
                self._close(found)
                # Of a reader that waits for its command. Later there may be no such download.
                if found.staged is None and found.placed is None:
                    _finish(found.future, CancelledError("the download was dropped"))

    def drop_unread(self) -> None:
        """Drop what has had no reader since the last call, though its command is done."""
        with self._lock:
            idle = {
                one
                for transfer, one in self._downloads.items()
                if not one.is_claimed and (one.future.done() or not self._transfers.is_reading(transfer))
            }
            over, self._unread = idle & self._unread, idle
            for one in over:
                self.acknowledge(one.transfer)

    def place(self, sequence: int, transfer: int, data: memoryview, abort: Abort) -> bool:
        """Have the reader of a command take its bytes in place, and wait until it has.

        Returns False if there is no such reader soon, so that the bytes must be staged. Raises
        CancelledError.
        """
        with self._lock:
            if not self._has_placed:
                return False
            download = self._get(transfer)
        download.claimed.wait(READER_SECONDS)
        placed = PlacedBytes(data)
        with self._lock:
            is_there = self._downloads.get(transfer) is download and download.is_claimed
            if not (is_there and download.takes_placed) or download.future.done():
                return False
            download.placed = placed
            self._placed.add(sequence)
            download.future.set_result(placed)
        placed.wait(abort)
        return True

    def stage(self, sequence: int, data: StagedMessages) -> None:
        """Keep the bytes that an unfinished command has read."""
        with self._lock:
            self._staged[sequence] = data

    def settle(self, transfer: int, sequence: int, error: HeliographError | None) -> Callable[[], None]:
        """Finish a command. Return the call, to make without the lock, that resumes the reader.

        Lock held.
        """
        if sequence in self._placed:
            self._placed.discard(sequence)
            return lambda: None
        download = self._get(transfer)
        if download.is_dropped:
            del self._downloads[transfer]
            self.drop(DropRead(sequence))
            self._transfers.read_ended(transfer)
            return lambda: None
        staged = self._staged.pop(sequence, None) if error is None else None
        if staged is None:
            failure = error.anew() if error is not None else InternalError("no bytes were staged")
            return partial(_finish, download.future, failure)
        download.staged = staged
        return partial(_finish, download.future, staged)

    def drop(self, instruction: DropRead) -> None:
        """Drop the bytes that a retired command staged too late. Lock held."""
        if (staged := self._staged.pop(instruction.sequence, None)) is not None:
            staged.drop()
            self._staging.give(staged.nbytes)

    def close(self, error: HeliographError) -> None:
        """End all downloads. Waiting readers fail with this error."""
        with self._lock:
            self._ended = error
            downloads, self._downloads = self._downloads, {}
            undelivered = list(self._staged.values())
            undelivered += [one.staged for one in downloads.values() if one.staged is not None]
            self._staged.clear()
            for staged in undelivered:
                staged.drop()
                self._staging.give(staged.nbytes)
        for download in downloads.values():
            if download.placed is not None:
                download.placed.close()
            _finish(download.future, error.anew())

    def _get(self, transfer: int) -> OutgoingDownload:
        if transfer not in self._downloads:
            self._downloads[transfer] = OutgoingDownload(transfer, self._close)
        return self._downloads[transfer]

    def _close(self, download: OutgoingDownload) -> None:
        with self._lock:
            if self._downloads.get(download.transfer) is not download:
                return
            if self._is_kept and not download.is_dropped:
                download.is_claimed = False
                download.claimed.clear()
                return
            pending = not download.future.done() and self._transfers.is_reading(download.transfer)
            download.is_claimed = False
            download.claimed.clear()
            if download.placed is not None:
                download.placed.close()
            if not pending:
                del self._downloads[download.transfer]
                self._transfers.read_ended(download.transfer)
                if download.staged is not None:
                    download.staged.drop()
                    self._staging.give(download.staged.nbytes)


def _finish(
    future: Future[StagedMessages | PlacedBytes], found: StagedMessages | PlacedBytes | HeliographError
) -> None:
    """Resume a reader, unless the end of its session or of its client's interest has."""
    with suppress(InvalidStateError):
        if isinstance(found, HeliographError):
            future.set_exception(found)
        else:
            future.set_result(found)
