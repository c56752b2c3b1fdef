"""Bytes that a session holds between a bulk call and a command, as they travel.

What comes in stays in the messages that brought it until its command has its turn, and from then on goes to
the tensor as it comes; what goes out is copied from the tensor into messages at once. Each byte is copied
once here, whichever of call and command came first.

Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from heliograph_backends.contract import Abort, Tensor, access, host_bytes
from heliograph_proto.codec.bulk import encode_download
from heliograph_proto.errors import CancelledError, HeliographError, LimitExceededError
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.resources.quotas import Holding, QuotaKind
from heliograph_server.session.protocol.instructions import ReadTask, WriteTask


class Staging:
    """Counts bytes and refuses what passes the limit before it is taken. `what` they are, for errors."""

    def __init__(self, limit_bytes: int, what: str = "transfers", holding: Holding | None = None) -> None:
        """`holding`: of the session, whose tenant has a limit of its own."""
        self._limit_bytes = limit_bytes
        self._holding = holding
        self._what = what
        self._lock = threading.Lock()
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<Staging {self.used_bytes:,} of {self._limit_bytes:,} bytes>"

    def reserve(self, size_bytes: int) -> None:
        """Counts what the caller holds already. Raises LimitExceededError."""
        with self._lock:
            if self.used_bytes + size_bytes > self._limit_bytes:
                raise LimitExceededError(
                    f"{self.used_bytes:,} bytes of {self._what} are held, {size_bytes:,} more would pass "
                    f"the limit of {self._limit_bytes:,}",
                    advice=f"wait for earlier {self._what}",
                )
            if self._holding is not None:
                self._holding.take(QuotaKind.STAGING, size_bytes)
            self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Gives memory back: the caller no longer looks at it."""
        with self._lock:
            self.used_bytes -= size_bytes
        if self._holding is not None:
            self._holding.give(QuotaKind.STAGING, size_bytes)


#: Pieces below this are put together: an object for each would take more than its bytes.
SMALL_BYTES = 64 * 1024
#: What a message that is kept may have beside its piece.
HEADER_BYTES = 4096


class StagedUpload:
    """The bytes of an upload, from its first piece until its command is done. Thread-safe.

    Pieces that come before the command has its turn stay in the messages that brought them. From then on each
    goes straight to where it belongs, in the thread that has it, so that gRPC can use its memory again at
    once: memory that a large upload takes anew costs about as much as copying it.
    """

    def __init__(self, size_bytes: int, staging: Staging) -> None:
        """Counts the bytes before the first one comes. Raises LimitExceededError."""
        staging.reserve(size_bytes)
        self._staging = staging
        self.size_bytes = size_bytes
        #: Bytes of all pieces that were copied into other memory on their way to a tensor.
        self.copied_bytes = 0
        self._parts: list[memoryview | bytearray] = []
        self._changed = threading.Condition()
        self._is_whole = False
        self._is_over = False
        self._error: HeliographError | None = None
        self._sink: Callable[[memoryview], None] | None = None

    def __repr__(self) -> str:
        state = "over" if self._is_over else "whole" if self._is_whole else "coming"
        return f"<Incoming {self.size_bytes:,} bytes, {state}>"

    # The upload's side

    def add(self, data: memoryview) -> None:
        """The next piece. One that lies in memory which somebody may overwrite is copied. Raises why nobody
        wants it."""
        with self._changed:
            if self._error is not None:
                raise self._error.anew()
            if self._sink is None:
                self._keep(data)
                return
            try:
                self._sink(data)
            except HeliographError as error:
                self._fail(error)
                raise

    def _keep(self, data: memoryview) -> None:
        last = self._parts[-1] if self._parts else None
        if data.nbytes >= SMALL_BYTES and _keeps_little(data):
            self._parts.append(data)
        elif isinstance(last, bytearray) and len(last) < SMALL_BYTES:
            last += data
            self.copied_bytes += data.nbytes
        else:
            self._parts.append(bytearray(data))
            self.copied_bytes += data.nbytes

    def end(self) -> None:
        """All bytes came."""
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def fail(self, error: HeliographError) -> None:
        """No more bytes come, or nobody wants them: whoever waits for them, or brings them, is told so."""
        with self._changed:
            if not self._is_whole:
                self._fail(error)

    def _fail(self, error: HeliographError) -> None:
        self._error = self._error or error
        self._sink = None
        self._parts.clear()
        self._changed.notify_all()

    # The command's side

    def pour(self, sink: Callable[[memoryview], None], abort: Abort) -> None:
        """Gives all pieces to `sink`, in order: those that are here at once, the others as they come, in the
        thread that brings them. Returns when it has had the last one; it is not called any more then.

        Raises what the upload failed with, what `sink` raises, and CancelledError.
        """
        with abort.watch(self._wake):
            while parts := self._next_parts(sink):
                for part in parts:
                    sink(memoryview(part))
            self._await_end(abort)

    def _next_parts(self, sink: Callable[[memoryview], None]) -> list[memoryview | bytearray]:
        """Those that came so far; when there are none, further ones go straight to the sink."""
        with self._changed:
            if self._error is not None:
                raise self._error.anew()
            parts, self._parts = self._parts, []
            if not parts:
                self._sink = sink
            return parts

    def joined(self, abort: Abort) -> memoryview:
        """All bytes in a row, once they are here. Raises as `pour` does."""
        with abort.watch(self._wake):
            self._await_end(abort)
        if len(self._parts) == 1:
            return memoryview(self._parts[0])
        self.copied_bytes += self.size_bytes
        return memoryview(b"".join(self._parts))

    def _await_end(self, abort: Abort) -> None:
        """Until all bytes are here; an upload that is stuck ends with its call, its session or an abort."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_whole or self._error is not None or abort.is_set)
            self._sink = None
            if self._error is None and not self._is_whole:
                self._fail(CancelledError("the command was cancelled"))
            if self._error is not None:
                raise self._error.anew()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self, error: HeliographError | None) -> None:
        """The command is done, or nobody wants the bytes; whoever brings more is told this. Idempotent."""
        with self._changed:
            if not self._is_whole:
                self._fail(error or CancelledError("the command that wanted the bytes is over"))
            self._parts.clear()
            is_first, self._is_over = not self._is_over, True
        if is_first:
            self._staging.give(self.size_bytes)


class StagedMessages:
    """The bytes of a read, encoded as the messages that carry them."""

    def __init__(self, nbytes: int) -> None:
        #: Of the tensor, without what is around them.
        self.nbytes = nbytes
        self.copied_bytes = 0
        self.encoded: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Messages {self.nbytes:,} bytes in {len(self.encoded)}>"

    def add(self, offset_bytes: int, data: memoryview) -> None:
        """The next message."""
        self.encoded.append(encode_download(offset_bytes, self.nbytes, data))
        self.copied_bytes += data.nbytes


def _keeps_little(data: memoryview) -> bool:
    """Whether it is nearly all of a message, which lives as long as it, and nobody can overwrite."""
    return isinstance(data.obj, bytes) and len(data.obj) - data.nbytes <= HEADER_BYTES


def write(task: WriteTask, data: memoryview) -> None:
    """Carries a write out whose bytes lie in a row."""
    if task.command.chunks is None:
        access.write(task.tensor.placed, task.command.offset_bytes, data)
    else:
        access.write_2d(task.tensor.placed, task.command.offset_bytes, data, task.command.chunks)


def write_incoming(task: WriteTask, data: StagedUpload, abort: Abort) -> None:
    """Carries a write out, each piece straight to where it belongs if that is one place."""
    tensor = task.tensor.placed
    is_host = tensor.buffer.buffer_type.is_host
    if task.command.chunks is not None or not tensor.is_contiguous or not is_host:
        write(task, data.joined(abort))
        return
    tensor.check_range(task.command.offset_bytes, data.size_bytes)
    offset = task.command.offset_bytes

    def sink(part: memoryview) -> None:
        nonlocal offset
        access.write(tensor, offset, part)
        offset += part.nbytes

    data.pour(sink, abort)


def read(task: ReadTask, out: memoryview) -> None:
    """Carries a read out, into memory in a row."""
    if task.command.chunks is None:
        access.read(task.tensor.placed, task.command.offset_bytes, out)
    else:
        access.read_2d(task.tensor.placed, task.command.offset_bytes, out, task.command.chunks)


def read_messages(task: ReadTask, chunk_bytes: int) -> StagedMessages:
    """Carries a read out, into messages of so many bytes each; at least one."""
    made = StagedMessages(task.command.size_bytes)
    whole = _in_a_row(task, made)
    for offset in range(0, max(1, task.command.size_bytes), chunk_bytes):
        size = min(chunk_bytes, task.command.size_bytes - offset)
        if whole is not None:
            made.add(offset, whole[offset : offset + size])
        else:
            part = host_bytes(np.empty(size, np.uint8))
            access.read(task.tensor.placed, task.command.offset_bytes + offset, part)
            made.add(offset, part)
    return made


def _in_a_row(task: ReadTask, made: StagedMessages) -> memoryview | None:
    """All bytes of a read: in place, or copied together if they lie with gaps; None for a row of them that is
    not in this process's memory, which is fetched in parts."""
    tensor = task.tensor.placed
    if task.command.chunks is not None or not tensor.is_contiguous:
        whole = host_bytes(np.empty(task.command.size_bytes, np.uint8))
        read(task, whole)
        made.copied_bytes += task.command.size_bytes
        return whole
    tensor.check_range(task.command.offset_bytes, task.command.size_bytes)
    if not tensor.buffer.buffer_type.is_host:
        return None
    return _bytes_of(tensor, task.command.offset_bytes, task.command.size_bytes)


def _bytes_of(tensor: Tensor, offset_bytes: int, size_bytes: int) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    start = tensor.offset_bytes + offset_bytes
    return host_bytes(tensor.buffer.array(TensorType(DTYPES["u8"], (size_bytes,)), start, (1,)))
