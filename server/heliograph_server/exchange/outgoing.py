"""Values on their way out: pieces that one thread puts in and one reader takes, within a budget."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from heliograph_backends.contract import Abort, Tensor, access, host_bytes
from heliograph_proto.codec.bulk import encode_download
from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_proto.sessions import PeerTraffic
from heliograph_proto.types import DTYPES, TensorType

#: The largest value that travels in one message with others. Larger ones have a call of their own.
SMALL_BYTES = 64 * 1024


class OutgoingBudget:
    """A bound on the bytes held for other daemons. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._changed = threading.Condition(threading.Lock())

    def __repr__(self) -> str:
        return f"<OutgoingBudget {self.held_bytes:,} of {self.limit_bytes:,} bytes>"

    def reserve(self, size_bytes: int, abort: Abort, may_pass: Callable[[], bool]) -> None:
        """Wait until so many bytes may be held, and reserve them.

        A value larger than the limit is held alone. `may_pass` lets a value exceed the limit; it is
        evaluated again after `poke`. Raises CancelledError.
        """
        with self._changed:
            if self._fits(size_bytes):
                self.held_bytes += size_bytes
                return
        with abort.watch(self.poke), self._changed:
            self._changed.wait_for(lambda: abort.is_set or self._fits(size_bytes) or may_pass())
            if abort.is_set:
                raise CancelledError("cancelled while waiting for earlier values to be taken")
            self.held_bytes += size_bytes

    def is_full_for(self, size_bytes: int) -> bool:
        """True if so many more bytes would have to wait. Only a hint: other threads may change
        it."""
        return not self._fits(size_bytes)

    def reserve_now(self, size_bytes: int) -> bool:
        """Reserve so many bytes if that need not wait. Return True if they were reserved."""
        with self._changed:
            fits = self._fits(size_bytes)
            self.held_bytes += size_bytes if fits else 0
            return fits

    def _fits(self, size_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + size_bytes <= self.limit_bytes

    def give(self, size_bytes: int) -> None:
        """Give back so many bytes."""
        with self._changed:
            self.held_bytes -= size_bytes
            self._changed.notify_all()

    def wait_until(self, is_over: Callable[[], bool], abort: Abort) -> None:
        """Wait until a condition holds that changes before bytes are given back. Raises
        CancelledError."""
        with abort.watch(self.poke), self._changed:
            self._changed.wait_for(lambda: abort.is_set or is_over())
            if not is_over():
                raise CancelledError("cancelled while waiting for a value to be taken")

    def poke(self) -> None:
        """Make waiting threads evaluate their conditions again."""
        with self._changed:
            self._changed.notify_all()


def unneeded() -> CancelledError:
    """The error of a value that is no longer needed."""
    return CancelledError("the value is no longer needed")


@dataclass(frozen=True, slots=True)
class ValuePiece:
    """Some bytes of a value, as the message that carries them (`heliograph_proto.codec.bulk`)."""

    message: bytes
    size_bytes: int


class OutgoingValue:
    """A value on its way out. One thread puts its pieces in, in order, and one reader takes
    them."""

    def __init__(self, size_bytes: int, taken: Callable[[int], None] = lambda size_bytes: None) -> None:
        self.size_bytes = size_bytes
        #: All bytes of a small value.
        self.whole: bytes | None = None
        self._taken = taken
        self._lock = threading.Lock()
        self._pieces: deque[ValuePiece] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._is_taken = False
        self._is_dropped = False
        self._error: HeliographError | None = None
        self._wake: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<OutgoingValue of {self.size_bytes} B: {self._put_bytes} there, {self._taken_bytes} taken>"

    @classmethod
    def of(cls, data: bytes, taken: Callable[[int], None] = lambda size_bytes: None) -> OutgoingValue:
        """A small value, complete."""
        made = cls(len(data), taken)
        made.whole = data
        return made

    @property
    def is_taken(self) -> bool:
        """True if the reader has all of it."""
        return self._is_taken

    @property
    def is_dropped(self) -> bool:
        """True if it is no longer needed."""
        return self._is_dropped

    # Called by the producer

    def put(self, message: bytes, size_bytes: int) -> None:
        """Add the next piece. Ignored if the value was dropped."""
        with self._lock:
            was_dropped = self._is_dropped
            if not was_dropped:
                self._pieces.append(ValuePiece(message, size_bytes))
            self._put_bytes += size_bytes
            wake, self._wake = self._wake, None
        if was_dropped:
            self._taken(size_bytes)
        if wake is not None:
            wake()

    def fail(self, error: HeliographError) -> None:
        """Fail the value. The bytes reserved for the rest are given back."""
        with self._lock:
            self._error = error
            left = self.size_bytes - self._put_bytes
            wake, self._wake = self._wake, None
        self._taken(left)
        if wake is not None:
            wake()

    # Called by the reader

    def take_whole(self) -> bytes | None:
        """Take all bytes of a small value, once."""
        if self.whole is None:
            return None
        with self._lock:
            data, self.whole = self.whole, None
            self._is_taken = data is not None
        if data is not None:
            self._taken(len(data))
        return data

    def take(self, wake: Callable[[], None]) -> bytes | None:
        """Take the next message. If there is none yet, return None; `wake` is then called once,
        from any thread. Raises the error of a failed value."""
        if (data := self.take_whole()) is not None:
            return encode_download(0, len(data), memoryview(data))
        with self._lock:
            if not self._pieces:
                if self._error is not None:
                    raise self._error.at(self._error.origin)
                if self._is_dropped:
                    raise unneeded()
                self._wake = wake
                return None
            piece = self._pieces.popleft()
            self._taken_bytes += piece.size_bytes
            self._is_taken = self._taken_bytes >= self.size_bytes
        self._taken(piece.size_bytes)
        return piece.message

    def drop(self) -> None:
        """Drop the value: it is no longer needed. Idempotent."""
        with self._lock:
            if self._is_dropped or self._is_taken:
                return
            self._is_dropped = True
            held = sum(piece.size_bytes for piece in self._pieces)
            held += len(self.whole) if self.whole is not None else 0
            self._pieces.clear()
            self.whole = None
            wake, self._wake = self._wake, None
        self._taken(held)
        if wake is not None:
            wake()


def copy_out(tensor: Tensor, value: OutgoingValue, chunk_bytes: int) -> None:
    """Copy a tensor's bytes into a value, until it is dropped. Raises the errors of the device."""
    for offset, data in parts_of(tensor, chunk_bytes):
        if value.is_dropped:
            value.put(b"", data.nbytes)
        else:
            value.put(encode_download(offset, value.size_bytes, data), data.nbytes)


def parts_of(tensor: Tensor, chunk_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a tensor in parts with their offsets; at least one part."""
    size = tensor.type.nbytes
    whole = _host_view(tensor)
    for offset in range(0, max(1, size), chunk_bytes):
        many = min(chunk_bytes, size - offset)
        if whole is not None:
            yield offset, whole[offset : offset + many]
        else:
            part = host_bytes(np.empty(many, np.uint8))
            access.read(tensor, offset, part)
            yield offset, part


def _host_view(tensor: Tensor) -> memoryview | None:
    """All bytes: in place, or copied if they have gaps. None if they are not in this process's
    memory and must be read in parts."""
    if not tensor.is_contiguous:
        whole = host_bytes(np.empty(tensor.type.nbytes, np.uint8))
        access.read(tensor, 0, whole)
        return whole
    if not (tensor.buffer.buffer_type.is_host and tensor.buffer.is_plain):
        return None
    row = TensorType(DTYPES["u8"], (tensor.type.nbytes,))
    return host_bytes(tensor.buffer.array(row, tensor.offset_bytes, (1,)))


class PeerCounter:
    """Counts the traffic between this daemon and others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((one.name for one in fields(PeerTraffic)), 0)

    def __repr__(self) -> str:
        return f"<PeerCounter {self.now}>"

    @property
    def now(self) -> PeerTraffic:
        """The totals so far."""
        with self._lock:
            return PeerTraffic(**self._counts)

    def sent(self, size_bytes: int) -> None:
        """Count a value sent to another daemon."""
        self._add("sent_bytes", size_bytes, "sent_values")

    def received(self, size_bytes: int) -> None:
        """Count a value received from another daemon."""
        self._add("received_bytes", size_bytes, "received_values")

    def relayed(self, size_bytes: int) -> None:
        """Count a value relayed between two daemons that cannot reach each other."""
        self._add("relayed_bytes", size_bytes, "relayed_values")

    def refused(self) -> None:
        """Count a refused capability."""
        self._add("refused", 1, "refused", 0)

    def _add(self, name: str, amount: int, number: str, more: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount
            self._counts[number] += more
