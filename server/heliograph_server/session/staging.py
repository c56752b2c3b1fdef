"""The bytes that a session holds between a bulk call and a command.

Incoming bytes stay in their messages until their command has its turn; from then on they go
straight to the tensor. Outgoing bytes are copied from the tensor into messages at once. So each
byte is copied once, whichever of call and command comes first.

Any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from heliograph_backends.contract import Abort, Tensor, access, host_bytes
from heliograph_proto.codec.bulk import decode_download, encode_download
from heliograph_proto.errors import CancelledError, HeliographError, LimitExceededError
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.resources.quotas import Holding, QuotaKind
from heliograph_server.session.protocol.instructions import ReadTask, WriteTask


class Staging:
    """Counts bytes, and refuses those above the limit. `what` names them in errors."""

    def __init__(self, limit_bytes: int, what: str = "transfers", holding: Holding | None = None) -> None:
        """`holding` is the session's share of its tenant's quota, if that counts too."""
        self._limit_bytes = limit_bytes
        self._holding = holding
        self._what = what
        self._lock = threading.Lock()
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<Staging {self.used_bytes:,} of {self._limit_bytes:,} bytes>"

    def reserve(self, size_bytes: int) -> None:
        """Count bytes that the caller holds. Raises LimitExceededError."""
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
        """Release bytes that the caller no longer uses."""
        with self._lock:
            self.used_bytes -= size_bytes
        if self._holding is not None:
            self._holding.give(QuotaKind.STAGING, size_bytes)


#: Pieces below this are joined, since an object for each would take more memory than its bytes.
SMALL_BYTES = 64 * 1024
#: The most that a kept message may have beside its piece.
HEADER_BYTES = 4096


class StagedUpload:
    """The bytes of an upload, from its first piece until its command is done. Thread-safe.

    Pieces that come before the command's turn stay in their messages. Later pieces go straight to
    the tensor, on the thread that received them, so that gRPC can reuse their memory at once: fresh
    memory for a large upload costs about as much as copying it.
    """

    def __init__(self, size_bytes: int, staging: Staging) -> None:
        """Count the bytes before the first one comes. Raises LimitExceededError."""
        staging.reserve(size_bytes)
        self._staging = staging
        self.size_bytes = size_bytes
        #: Bytes that were copied into other memory on their way to a tensor, and those that came
        #: straight into the tensor.
        self.copied_bytes = self.placed_bytes = 0
        self._parts: list[memoryview | bytearray] = []
        #: Memory for the next bytes before the command's turn, and those that it has.
        self._filling, self._filled_bytes = memoryview(b""), 0
        #: The tensor's bytes in the command's turn, if they are memory of this process.
        self._place: memoryview | None = None
        self._poured_bytes = 0
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
        """Add the next piece. It is copied unless it is an immutable message, or nearly all of one.

        Raises the error that ended the upload.
        """
        with self._changed:
            if self._error is not None:
                raise self._error.anew()
            if self._sink is not None:
                self._pass_on(self._sink, data)
                return
            is_message = isinstance(data.obj, bytes) and len(data.obj) - data.nbytes <= HEADER_BYTES
            if is_message and data.nbytes >= SMALL_BYTES:
                self._parts.append(data)
                return
            last = self._parts[-1] if self._parts else None
            if isinstance(last, bytearray) and len(last) < SMALL_BYTES:
                last += data
            else:
                self._parts.append(bytearray(data))
            self.copied_bytes += data.nbytes

    def receive(self, into: Callable[[memoryview], int], most_bytes: int) -> int:
        """Have a function fill memory with the next bytes; return their number.

        In the command's turn the memory is the tensor's. Raises as `add` does.
        """
        with self._changed:
            if self._error is not None:
                raise self._error.anew()
            if self._place is not None:
                count = into(self._place[self._poured_bytes : self._poured_bytes + most_bytes])
                self._poured_bytes += count
                self.placed_bytes += count
                return count
            if not self._filling:
                self._filling = memoryview(bytearray(max(most_bytes, min(SMALL_BYTES, self.size_bytes))))
            count = into(self._filling[self._filled_bytes : self._filled_bytes + most_bytes])
            self._filled_bytes += count
            if self._sink is not None or self._filled_bytes == self._filling.nbytes:
                self._keep_filled()
            if self._sink is not None:
                self._pass_on(self._sink, self._parts.pop())
            return count

    def _keep_filled(self) -> None:
        if self._filled_bytes:
            self._parts.append(self._filling[: self._filled_bytes])
        self._filling, self._filled_bytes = memoryview(b""), 0

    def _pass_on(self, sink: Callable[[memoryview], None], part: memoryview | bytearray) -> None:
        try:
            sink(memoryview(part))
        except HeliographError as error:
            self._fail(error)
            raise

    def end(self) -> None:
        """Record that all bytes are here."""
        with self._changed:
            self._keep_filled()
            self._is_whole = True
            self._changed.notify_all()

    def fail(self, error: HeliographError) -> None:
        """End the upload early. Threads that wait for its bytes, or add more, receive the error."""
        with self._changed:
            if not self._is_whole:
                self._fail(error)

    def _fail(self, error: HeliographError) -> None:
        self._error = self._error or error
        self._sink = self._place = None
        self._parts.clear()
        self._filling, self._filled_bytes = memoryview(b""), 0
        self._changed.notify_all()

    # The command's side

    def pour(self, sink: Callable[[memoryview], None], abort: Abort, place: memoryview | None = None) -> None:
        """Pass all pieces to `sink`, in order. Later ones may come straight into `place`.

        Pieces that are here are passed at once, later ones by the threads that add them. Returns
        after the last piece; `sink` is not called any more then. Raises the error of the upload,
        the errors of `sink`, and CancelledError.
        """
        with abort.watch(self._wake):
            while True:
                with self._changed:
                    if self._error is not None:
                        raise self._error.anew()
                    self._keep_filled()
                    parts, self._parts = self._parts, []
                    if not parts:
                        self._sink, self._place = sink, place
                        break
                for part in parts:
                    sink(memoryview(part))
                    self._poured_bytes += len(part)
            self._await_end(abort)

    def joined(self, abort: Abort) -> memoryview:
        """Return all bytes in one block, once they are here. Raises the errors of `pour`."""
        with abort.watch(self._wake):
            self._await_end(abort)
        if len(self._parts) == 1:
            return memoryview(self._parts[0])
        self.copied_bytes += self.size_bytes
        return memoryview(b"".join(self._parts))

    def _await_end(self, abort: Abort) -> None:
        """Wait until all bytes are here, or the upload, the session or the command ends."""
        with self._changed:
            while not (self._is_whole or self._error is not None or abort.is_set):
                self._changed.wait()
            self._sink = self._place = None
            if self._error is None and not self._is_whole:
                self._fail(CancelledError("the command was cancelled"))
            if self._error is not None:
                raise self._error.anew()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self, error: HeliographError | None) -> None:
        """Drop the bytes. A thread that adds more receives the error. Idempotent."""
        with self._changed:
            if not self._is_whole:
                self._fail(error or CancelledError("the command that the bytes are for has ended"))
            self._parts.clear()
            self._filling = memoryview(b"")
            is_first, self._is_over = not self._is_over, True
        if is_first:
            self._staging.give(self.size_bytes)


class StagedMessages:
    """The bytes of a read, encoded as the messages that carry them."""

    def __init__(self, nbytes: int) -> None:
        #: Bytes of the tensor, without message headers.
        self.nbytes = nbytes
        self.copied_bytes = 0
        #: The messages that were not sent yet.
        self.encoded: deque[bytes] = deque()
        #: True if messages were dropped, since the session has ended.
        self.is_dropped = False

    def __repr__(self) -> str:
        return f"<Messages {self.nbytes:,} bytes in {len(self.encoded)}>"

    def drop(self) -> None:
        """Drop the messages that were not sent yet, even if this object stays."""
        self.is_dropped = self.is_dropped or bool(self.encoded)
        self.encoded.clear()

    def since(self, offset_bytes: int) -> Iterator[bytes]:
        """Yield the messages from a byte on, and keep them. Ends early if they are dropped."""
        whole = list(self.encoded)
        piece_bytes = decode_download(whole[0]).data.nbytes if whole else 1
        number, within = divmod(offset_bytes, max(1, piece_bytes))
        if within and number < len(whole):
            data = decode_download(whole[number]).data[within:]
            yield encode_download(offset_bytes, self.nbytes, data)
            number += 1
        for one in whole[number:]:
            if self.is_dropped:
                return
            yield one

    def add(self, offset_bytes: int, data: memoryview) -> None:
        """Encode the next message."""
        self.encoded.append(encode_download(offset_bytes, self.nbytes, data))
        self.copied_bytes += data.nbytes


class PlacedBytes:
    """The bytes of a read, sent straight from the tensor while the command waits. Thread-safe."""

    def __init__(self, data: memoryview) -> None:
        self.nbytes = data.nbytes
        self._unsent = data
        self._changed = threading.Condition()
        self._is_over = False
        self._error: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<PlacedBytes, {self._unsent.nbytes:,} of {self.nbytes:,} unsent>"

    # The reader's side

    def send(self, send: Callable[[memoryview], int], most_bytes: int) -> bool:
        """Have a function send the next bytes, of which it returns the number.

        Returns False once all are sent. Raises the error of a command that has ended early.
        """
        with self._changed:
            if self._error is not None:
                raise self._error.anew()
            if self._unsent:
                self._unsent = self._unsent[send(self._unsent[:most_bytes]) :]
            return bool(self._unsent)

    def send_from(self, offset_bytes: int, send: Callable[[memoryview], int], most_bytes: int) -> int:
        """Have a function send bytes from an offset on, again if need be; return its number.

        Raises as `send`.
        """
        with self._changed:
            if self._error is not None:
                raise self._error.anew()
            if self._is_over:
                raise CancelledError("the client has had the bytes")
            return send(self._unsent[offset_bytes : offset_bytes + most_bytes])

    def close(self) -> None:
        """Let the command end, since its reader has all bytes or has left."""
        self._end(None)

    # The command's side

    def wait(self, abort: Abort) -> None:
        """Wait until the reader is done. Raises CancelledError."""
        with abort.watch(self._wake), self._changed:
            self._changed.wait_for(lambda: self._is_over or abort.is_set)
        if not self._is_over:
            error = CancelledError("the command was cancelled")
            self._end(error)
            raise error

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _end(self, error: HeliographError | None) -> None:
        with self._changed:
            self._unsent = memoryview(b"")
            self._is_over, self._error = True, error
            self._changed.notify_all()


def write(task: WriteTask, data: memoryview) -> None:
    """Perform a write of contiguous bytes."""
    if task.command.chunks is None:
        access.write(task.tensor.placed, task.command.offset_bytes, data)
    else:
        access.write_2d(task.tensor.placed, task.command.offset_bytes, data, task.command.chunks)


def write_incoming(task: WriteTask, data: StagedUpload, abort: Abort) -> None:
    """Perform a write. Each piece goes straight to a tensor that is contiguous on the host."""
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

    data.pour(sink, abort, _in_place(tensor, offset, data.size_bytes))


def read(task: ReadTask, out: memoryview) -> None:
    """Perform a read into contiguous memory."""
    if task.command.chunks is None:
        access.read(task.tensor.placed, task.command.offset_bytes, out)
    else:
        access.read_2d(task.tensor.placed, task.command.offset_bytes, out, task.command.chunks)


def read_messages(task: ReadTask, chunk_bytes: int) -> StagedMessages:
    """Perform a read into messages of `chunk_bytes` each; at least one."""
    made = StagedMessages(task.command.size_bytes)
    whole = _contiguous(task, made)
    for offset in range(0, max(1, task.command.size_bytes), chunk_bytes):
        size = min(chunk_bytes, task.command.size_bytes - offset)
        if whole is not None:
            made.add(offset, whole[offset : offset + size])
        else:
            part = host_bytes(np.empty(size, np.uint8))
            access.read(task.tensor.placed, task.command.offset_bytes + offset, part)
            made.add(offset, part)
    return made


def in_place(task: ReadTask) -> memoryview | None:
    """All bytes of a read, if they are memory of this process as they are."""
    tensor = task.tensor.placed
    if task.command.chunks is not None or not tensor.is_contiguous:
        return None
    tensor.check_range(task.command.offset_bytes, task.command.size_bytes)
    return _in_place(tensor, task.command.offset_bytes, task.command.size_bytes)


def _contiguous(task: ReadTask, made: StagedMessages) -> memoryview | None:
    """All bytes of a read, in place, or copied together if they have gaps.

    None for contiguous bytes outside this process's memory, which are fetched in parts.
    """
    tensor = task.tensor.placed
    if task.command.chunks is not None or not tensor.is_contiguous:
        whole = host_bytes(np.empty(task.command.size_bytes, np.uint8))
        read(task, whole)
        made.copied_bytes += task.command.size_bytes
        return whole
    return in_place(task)


def _in_place(tensor: Tensor, offset_bytes: int, size_bytes: int) -> memoryview | None:
    """Bytes of a contiguous tensor, if they are memory of this process as they are."""
    if not (tensor.buffer.buffer_type.is_host and tensor.buffer.is_plain):
        return None
    type = TensorType(DTYPES["u8"], (size_bytes,))
    return host_bytes(tensor.buffer.array(type, tensor.offset_bytes + offset_bytes, (1,)))
