"""Values on their way out: pieces that one thread puts in and readers read, within a budget.

A piece stays until the other daemon has acknowledged it, so that another connection can carry it
again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from heliograph_backends.contract import Abort, Tensor, access, host_bytes
from heliograph_proto.codec.bulk import encode_download
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError
from heliograph_proto.sessions import PeerTraffic
from heliograph_proto.types import DTYPES, TensorType

#: The largest value that travels in one message with others. Larger ones have a call of their own.
SMALL_BYTES = 64 * 1024

#: The most answers of a stream that wait for their receipt.
MOST_GIVEN = 10_000


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
    """A value on its way out. One thread puts its pieces in, in order. Any number of readers read
    them, and what the other daemon has acknowledged goes. Thread-safe."""

    def __init__(self, size_bytes: int, freed: Callable[[int], None] = lambda size_bytes: None) -> None:
        """`freed` is told of bytes that are held no longer."""
        self.size_bytes = size_bytes
        self._freed = freed
        self._lock = threading.Lock()
        #: The pieces that are held, by offset.
        self._pieces: dict[int, ValuePiece] = {}
        #: All bytes of a small value, until they are acknowledged.
        self._whole: bytes | None = None
        self._put_bytes = 0
        self._acknowledged_bytes = 0
        self._is_taken = False
        self._is_dropped = False
        self._error: HeliographError | None = None
        self._wakes: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return (
            f"<OutgoingValue of {self.size_bytes} B: {self._put_bytes} there, "
            f"{self._acknowledged_bytes} acknowledged>"
        )

    @classmethod
    def of(cls, data: bytes, freed: Callable[[int], None] = lambda size_bytes: None) -> OutgoingValue:
        """A small value, complete."""
        made = cls(len(data), freed)
        made._whole, made._put_bytes = data, len(data)
        return made

    @property
    def is_taken(self) -> bool:
        """True if the other daemon has all of it."""
        return self._is_taken

    @property
    def is_dropped(self) -> bool:
        """True if it is no longer needed."""
        return self._is_dropped

    @property
    def whole(self) -> bytes | None:
        """All bytes of a small value. None for other values, and once it was acknowledged or
        dropped."""
        return self._whole

    # Called by the producer

    def put(self, message: bytes, size_bytes: int) -> None:
        """Add the next piece. Ignored if the value was dropped."""
        with self._lock:
            was_dropped = self._is_dropped
            if not was_dropped:
                self._pieces[self._put_bytes] = ValuePiece(message, size_bytes)
            self._put_bytes += size_bytes
            wakes, self._wakes = self._wakes, []
        if was_dropped:
            self._freed(size_bytes)
        for wake in wakes:
            wake()

    def fail(self, error: HeliographError) -> None:
        """Fail the value. All bytes reserved for it are given back."""
        with self._lock:
            self._error = error
            left = self.size_bytes - self._put_bytes
            if not self._is_dropped:
                left += self._clear()
            self._is_dropped = True
            wakes, self._wakes = self._wakes, []
        self._freed(left)
        for wake in wakes:
            wake()

    # Called by readers

    def piece(self, offset_bytes: int, wake: Callable[[], None]) -> ValuePiece | None:
        """The piece at an offset. If there is none yet, return None; `wake` is then called once,
        from any thread.

        Raises the error of a failed value, CancelledError for one that is not needed, and
        ProtocolError where no piece begins.
        """
        with self._lock:
            if self._whole is not None and not offset_bytes:
                data = self._whole
                return ValuePiece(encode_download(0, len(data), memoryview(data)), len(data))
            if (found := self._pieces.get(offset_bytes)) is not None:
                return found
            if self._error is not None:
                raise self._error.at(self._error.origin)
            if self._is_dropped or self._is_taken:
                raise unneeded()
            if offset_bytes != self._put_bytes:
                raise ProtocolError(f"no piece of the value begins at byte {offset_bytes:,}, or not any more")
            self._wakes.append(wake)
            return None

    def acknowledge(self, received_bytes: int) -> None:
        """Free the bytes that the other daemon has, so many from the first one on."""
        with self._lock:
            if self._is_dropped or self._is_taken:
                return
            had = [at for at, one in self._pieces.items() if at + one.size_bytes <= received_bytes]
            freed = sum(self._pieces.pop(at).size_bytes for at in had)
            self._acknowledged_bytes = max(self._acknowledged_bytes, received_bytes)
            if received_bytes >= self.size_bytes and self._put_bytes >= self.size_bytes:
                self._is_taken = True
                freed += self._clear()
        self._freed(freed)

    def drop(self) -> None:
        """Drop the value: it is no longer needed. Idempotent."""
        with self._lock:
            if self._is_dropped or self._is_taken:
                return
            self._is_dropped = True
            held = self._clear()
            wakes, self._wakes = self._wakes, []
        self._freed(held)
        for wake in wakes:
            wake()

    def _clear(self) -> int:
        """Forget all bytes. Return how many there were."""
        held = sum(one.size_bytes for one in self._pieces.values())
        held += len(self._whole) if self._whole is not None else 0
        self._pieces.clear()
        self._whole = None
        return held


class GivenAnswers:
    """The answers of one stream of small values, of which the other daemon may not have all."""

    def __init__(self) -> None:
        self._values: deque[OutgoingValue | None] = deque()
        self._received = 0

    def __repr__(self) -> str:
        return f"<GivenAnswers {self._received} received, {len(self._values)} under way>"

    def add(self, value: OutgoingValue | None) -> None:
        """Note the next answer, and its value if it has one. The oldest of too many is forgotten:
        its value goes with its run."""
        self._values.append(value)
        if len(self._values) > MOST_GIVEN:
            self._values.popleft()
            self._received += 1

    def take_back(self) -> None:
        """Forget the last answer, which was not sent."""
        self._values.pop()

    def received(self, answers: int) -> list[OutgoingValue]:
        """Note that so many answers of the stream were received. Return their values, which may
        go."""
        found: list[OutgoingValue] = []
        while self._values and self._received < answers:
            self._received += 1
            if (value := self._values.popleft()) is not None:
                found.append(value)
        return found


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
