"""Values on their way out: pieces that one thread puts in and one reader takes, and how many may be held."""

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

#: Up to here a value travels in one message beside others; what is larger has a call of its own.
SMALL_BYTES = 64 * 1024


class OutgoingBudget:
    """Bounds the bytes that are held for others. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._changed = threading.Condition(threading.Lock())

    def __repr__(self) -> str:
        return f"<Budget {self.held_bytes:,} of {self.limit_bytes:,} bytes>"

    def reserve(self, size_bytes: int, abort: Abort, may_pass: Callable[[], bool]) -> None:
        """Waits until so much may be held beside the rest. What is larger than the limit is held alone, and
        what `may_pass` (asked again after `poke`) in any case. Raises CancelledError."""
        with self._changed:
            if self._fits(size_bytes):
                self.held_bytes += size_bytes
                return
        with abort.watch(self.poke), self._changed:
            self._changed.wait_for(lambda: abort.is_set or self._fits(size_bytes) or may_pass())
            if abort.is_set:
                raise CancelledError("cancelled while it waited for earlier values to be taken")
            self.held_bytes += size_bytes

    def is_full_for(self, size_bytes: int) -> bool:
        """Whether so much more would have to wait, as it looks now."""
        return not self._fits(size_bytes)

    def reserve_now(self, size_bytes: int) -> bool:
        """As `reserve`, where that need not wait. Whether it did."""
        with self._changed:
            fits = self._fits(size_bytes)
            self.held_bytes += size_bytes if fits else 0
            return fits

    def _fits(self, size_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + size_bytes <= self.limit_bytes

    def give(self, size_bytes: int) -> None:
        """So much is held no more."""
        with self._changed:
            self.held_bytes -= size_bytes
            self._changed.notify_all()

    def wait_until(self, is_over: Callable[[], bool], abort: Abort) -> None:
        """Waits until something is so that is changed before bytes are given back. Raises CancelledError."""
        with abort.watch(self.poke), self._changed:
            self._changed.wait_for(lambda: abort.is_set or is_over())
            if not is_over():
                raise CancelledError("cancelled while it waited for a value to be taken")

    def poke(self) -> None:
        """Whoever waits asks again whether he may pass."""
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class ValuePiece:
    """Some bytes of a value, as the message that carries them (`heliograph_proto.codec.bulk`)."""

    message: bytes
    size_bytes: int


class OutgoingValue:
    """A value on its way out. One thread puts its pieces in, in order, and one reader takes them."""

    def __init__(self, size_bytes: int, taken: Callable[[int], None] = lambda size_bytes: None) -> None:
        self.size_bytes = size_bytes
        #: All bytes of a small one that is there as a whole.
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
        return f"<Value of {self.size_bytes:,} bytes: {self._put_bytes:,} there, {self._taken_bytes:,} taken>"

    @classmethod
    def of(cls, data: bytes, taken: Callable[[int], None] = lambda size_bytes: None) -> OutgoingValue:
        """A small one."""
        made = cls(len(data), taken)
        made.whole = data
        return made

    @property
    def is_taken(self) -> bool:
        """Whether the reader has all of it."""
        return self._is_taken

    @property
    def is_dropped(self) -> bool:
        """Whether nobody reads it any more."""
        return self._is_dropped

    # The thread that makes it

    def put(self, message: bytes, size_bytes: int) -> None:
        """The next piece. Nothing happens where nobody reads any more."""
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
        """No more comes. What was reserved for the rest is given back."""
        with self._lock:
            self._error = error
            left = self.size_bytes - self._put_bytes
            wake, self._wake = self._wake, None
        self._taken(left)
        if wake is not None:
            wake()

    # The reader

    def take_whole(self) -> bytes | None:
        """All bytes of a small one, once."""
        if self.whole is None:
            return None
        with self._lock:
            data, self.whole = self.whole, None
            self._is_taken = data is not None
        if data is not None:
            self._taken(len(data))
        return data

    def take(self, wake: Callable[[], None]) -> bytes | None:
        """The next message; None where it is not there yet, and then `wake` is called, once, from any thread.
        Raises why no more comes."""
        if (data := self.take_whole()) is not None:
            return encode_download(0, len(data), memoryview(data))
        with self._lock:
            if not self._pieces:
                if self._error is not None:
                    raise self._error.at(self._error.origin)
                if self._is_dropped:
                    raise CancelledError("nobody waits for this value any more")
                self._wake = wake
                return None
            piece = self._pieces.popleft()
            self._taken_bytes += piece.size_bytes
            self._is_taken = self._taken_bytes >= self.size_bytes
        self._taken(piece.size_bytes)
        return piece.message

    def drop(self) -> None:
        """Nobody reads it any more. Idempotent."""
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
    """Puts a tensor's bytes into a value, until nobody reads it any more. Raises what the device does."""
    for offset, data in parts_of(tensor, chunk_bytes):
        if value.is_dropped:
            value.put(b"", data.nbytes)
        else:
            value.put(encode_download(offset, value.size_bytes, data), data.nbytes)


def parts_of(tensor: Tensor, chunk_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a tensor, in parts with their offsets; at least one."""
    size = tensor.type.nbytes
    whole = _in_a_row(tensor)
    for offset in range(0, max(1, size), chunk_bytes):
        many = min(chunk_bytes, size - offset)
        if whole is not None:
            yield offset, whole[offset : offset + many]
        else:
            part = host_bytes(np.empty(many, np.uint8))
            access.read(tensor, offset, part)
            yield offset, part


def _in_a_row(tensor: Tensor) -> memoryview | None:
    """All bytes: in place, or copied together if they lie with gaps; None for a row of them that is not in
    this process's memory, which is fetched in parts."""
    if not tensor.is_contiguous:
        whole = host_bytes(np.empty(tensor.type.nbytes, np.uint8))
        access.read(tensor, 0, whole)
        return whole
    if not tensor.buffer.buffer_type.is_host:
        return None
    row = TensorType(DTYPES["u8"], (tensor.type.nbytes,))
    return host_bytes(tensor.buffer.array(row, tensor.offset_bytes, (1,)))


class PeerCounter:
    """Counts what goes between this daemon and others, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((one.name for one in fields(PeerTraffic)), 0)

    def __repr__(self) -> str:
        return f"<PeerCounter {self.now}>"

    @property
    def now(self) -> PeerTraffic:
        """All so far."""
        with self._lock:
            return PeerTraffic(**self._counts)

    def sent(self, size_bytes: int) -> None:
        """A value has gone to another daemon."""
        self._add("sent_bytes", size_bytes, "sent_values")

    def received(self, size_bytes: int) -> None:
        """A value has come from another daemon."""
        self._add("received_bytes", size_bytes, "received_values")

    def relayed(self, size_bytes: int) -> None:
        """A value has been taken from one daemon to another, which cannot reach each other."""
        self._add("relayed_bytes", size_bytes, "relayed_values")

    def refused(self) -> None:
        """A capability was not accepted."""
        self._add("refused", 1, "refused", 0)

    def _add(self, name: str, amount: int, number: str, more: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount
            self._counts[number] += more
