"""The order of the bytes of weights in host memory: their own, or the form that kernels read best.

A form takes the bytes that the weight has, and is made in place. So a weight lies in memory once,
also while plans read it in a form. `Buffer.get` and copies give the bytes in their own order. Each
weight of a buffer has an order of its own.

A plan holds an order as long as it is bound to the weight. While one form is held, everyone else
who reads the bytes in place gets a copy in their own order, which is counted as device memory and
freed after its last holder. A write by `Buffer.set`, a copy or a run's output reaches all of them.
A plan that assigns the bytes needs them in place, so it is refused while a form or a copy is held.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from heliograph_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from heliograph_backends.host_memory.buffers import MemoryBudget

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: The alignment of bytes in a form, in bytes: kernels read whole vectors of them.
FORM_ALIGNMENT = 64


class Form(Protocol):
    """An order of bytes. Forms are compared: equal ones are the same order."""

    @property
    def size_bytes(self) -> int:
        """The bytes that have this form."""

    def pack(self, memory: Bytes) -> None:
        """Bring bytes from their own order into this one."""

    def unpack(self, memory: Bytes) -> None:
        """Bring bytes from this order into their own."""

    def read(self, memory: Bytes, offset_bytes: int, out: memoryview) -> None:
        """Read bytes of `memory`, which has this form, in their own order."""

    def write(self, memory: Bytes, offset_bytes: int, data: memoryview) -> None:
        """Write bytes, given in their own order, to `memory`, which has this form."""


def _nothing() -> None:
    """Release bytes whose holders are not counted."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes in an order that stays until `release`."""

    memory: Bytes
    #: The address of the buffer's first byte: a place in the buffer is here at that offset.
    address: int
    #: None: their own order.
    form: Form | None = None
    #: To be called once.
    release: Callable[[], None] = _nothing
    #: The offset in the buffer of the first byte of `memory`.
    start: int = 0


@dataclass(eq=False, slots=True)
class _Part:
    """Bytes in a form, or a copy of bytes in their own order."""

    start: int
    end: int
    memory: Bytes
    #: None: a copy.
    form: Form | None = None
    holders: int = 0

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end

    def common(self, start: int, end: int) -> tuple[int, int]:
        """The bytes that it shares with a range."""
        return max(start, self.start), min(end, self.end)


class ByteOrder:
    """The order of a buffer's bytes. Thread-safe."""

    def __init__(self, memory: Bytes, budget: MemoryBudget, allocate: Callable[[int], Bytes]) -> None:
        self._memory = memory
        self._address = int(memory.ctypes.data)
        self._budget = budget
        self._allocate = allocate
        self._lock = threading.Lock()
        #: The parts in a form, in order; they do not overlap. And copies of what parts have.
        self._parts: list[_Part] = []
        self._copies: list[_Part] = []
        #: Ranges that are held in their own order and in place, with the number of holders.
        self._plain: dict[tuple[int, int], int] = {}

    @property
    def parts(self) -> int:
        """The number of ranges that are in a form now."""
        return len(self._parts)

    def hold(self, start: int, end: int, form: Form | None = None, *, writes: bool = False) -> Held:
        """Hold a range in a form if no other order is held in place, else in its own.

        A holder that `writes` has the bytes in their own order and in place, so that others see
        what it writes. Raises OutOfMemoryError if that takes a copy, and there is no memory for it,
        and InvalidArgumentError if a holder that writes cannot have them in place.
        """
        with self._lock:
            parts = [one for one in self._parts if one.overlaps(start, end)]
            held = any(one.holders for one in parts)
            if writes and (held or any(one.overlaps(start, end) for one in self._copies)):
                raise InvalidArgumentError(
                    "a tensor that a plan assigns is the packed weight of another plan",
                    advice="free that plan first, or keep the tensor in memory without usage='weights'",
                )
            if form is not None and (part := self._in_form(start, end, form, parts)) is not None:
                part.holders += 1
                return Held(self._memory, self._address, form, partial(self._release, part))
            if held:
                copy = self._copy_of(start, end)
                copy.holders += 1
                address = int(copy.memory.ctypes.data) - start
                return Held(copy.memory, address, None, partial(self._release_copy, copy), start)
            self._restore(parts)
            self._plain[start, end] = self._plain.get((start, end), 0) + 1
            return Held(self._memory, self._address, release=partial(self._release_plain, start, end))

    def read(self, offset_bytes: int, out: memoryview) -> None:
        """Read bytes in their own order."""
        with self._lock:
            self._read(offset_bytes, out)

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write bytes, given in their own order. All holders have them; no plan runs meanwhile."""
        with self._lock:
            for part, start, end in self._pieces(offset_bytes, offset_bytes + data.nbytes):
                piece = data[start - offset_bytes : end - offset_bytes]
                if part is None or part.form is None:
                    self._memory[start:end] = np.frombuffer(piece, np.uint8)
                else:
                    part.form.write(part.memory, start - part.start, piece)
            for copy in self._copies:
                start, end = copy.common(offset_bytes, offset_bytes + data.nbytes)
                if start < end:
                    piece = data[start - offset_bytes : end - offset_bytes]
                    copy.memory[start - copy.start : end - copy.start] = np.frombuffer(piece, np.uint8)

    def free(self) -> None:
        """Stop counting the copies. Holders of an order keep its memory."""
        with self._lock:
            for copy in self._copies:
                self._budget.give(copy.memory.nbytes)
            self._copies.clear()

    def _in_form(self, start: int, end: int, form: Form, parts: list[_Part]) -> _Part | None:
        """Bring a range into a form; None if it must stay in another order."""
        if len(parts) == 1 and (parts[0].start, parts[0].end) == (start, end) and parts[0].form == form:
            return parts[0]
        if form.size_bytes != end - start or (self._address + start) % FORM_ALIGNMENT:
            return None
        if any(one.holders for one in parts) or any(a < end and start < b for a, b in self._plain):
            return None
        self._restore(parts)
        made = _Part(start, end, self._memory[start:end], form)
        form.pack(made.memory)
        insort(self._parts, made, key=lambda one: one.start)
        return made

    def _restore(self, parts: list[_Part]) -> None:
        """Bring parts into their own order."""
        for one in parts:
            assert one.form is not None
            one.form.unpack(one.memory)
            self._parts.remove(one)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[_Part | None, int, int]]:
        """Cut a range into pieces that one part has, or none."""
        for one in self._parts:
            first, last = one.common(start, end)
            if first < last:
                if start < first:
                    yield None, start, first
                yield one, first, last
                start = last
        if start < end:
            yield None, start, end

    def _read(self, offset: int, out: memoryview) -> None:
        for part, start, end in self._pieces(offset, offset + out.nbytes):
            piece = out[start - offset : end - offset]
            if part is None or part.form is None:
                np.frombuffer(piece, np.uint8)[:] = self._memory[start:end]
            else:
                part.form.read(part.memory, start - part.start, piece)

    def _copy_of(self, start: int, end: int) -> _Part:
        """Return the copy of a range in its own order."""
        for one in self._copies:
            if (one.start, one.end) == (start, end):
                return one
        self._budget.take(
            end - start,
            "for a weight that other plans read packed",
            "or free the plans that use it in matrix products",
        )
        try:
            memory = self._allocate(end - start)
        except BaseException:
            self._budget.give(end - start)
            raise
        self._read(start, memory.data)
        self._copies.append(_Part(start, end, memory))
        return self._copies[-1]

    def _release(self, part: _Part) -> None:
        with self._lock:
            part.holders -= 1

    def _release_plain(self, start: int, end: int) -> None:
        with self._lock:
            self._plain[start, end] -= 1
            if not self._plain[start, end]:
                del self._plain[start, end]

    def _release_copy(self, copy: _Part) -> None:
        with self._lock:
            copy.holders -= 1
            if not copy.holders and copy in self._copies:
                self._copies.remove(copy)
                self._budget.give(copy.memory.nbytes)
