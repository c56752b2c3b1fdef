"""The contents of a session: bytes by digest, in the memory of devices.

A content is uploaded before anybody knows which device will need it: it goes to the first with room for it,
and moves when a plan is compiled for another. What plans use stays where they use it. A content may lie in
parts as well (`Slice`), each known by a name of its own: when these make all of it, there need be no whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np

from heliograph_backends import access
from heliograph_backends.contract import Buffer, BufferType, Device, Tensor, Usage, host_bytes
from heliograph_proto.errors import (
    HeliographError,
    InvalidGraphError,
    LimitExceededError,
    MissingContentError,
    OutOfMemoryError,
)
from heliograph_proto.graph import Leaf
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.core.room import Room
from heliograph_server.core.scattered import ScatteredBuffer, scattered
from heliograph_server.core.slices import Section, Slice, digest_of, sections

#: The most contents and parts of a session; their bytes count as the device's memory.
MAX_CONTENTS = 250_000

#: The names of a device and of its buffer type.
Where: TypeAlias = tuple[str, str]


def where_of(memory: BufferType) -> Where:
    """By what memory is known."""
    return memory.device.name, memory.name


class Contents:
    """Contents on devices, by priority. Thread-safe."""

    def __init__(self, devices: Sequence[Device], room: Room) -> None:
        self._devices = tuple(devices)
        self._room = room
        self._lock = threading.Lock()
        #: By name, which is a digest or that of a part, and by memory.
        self._buffers: dict[bytes, dict[Where, Buffer]] = {}
        #: By digest: how large the content is, and the names of the parts that there are of it.
        self._sizes: dict[bytes, int] = {}
        self._parts: dict[bytes, set[bytes]] = {}
        #: Those that a plan was compiled for.
        self._used: set[tuple[bytes, Where]] = set()
        self._closed: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<Contents {len(self._buffers)}, {self.size_bytes:,} bytes>"

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(one.size_bytes for copies in self._buffers.values() for one in copies.values())

    def room_for(self, size_bytes: int) -> Buffer:
        """Memory for a content: on the first device that has it, else over several, as its rows may lie one
        day. Raises the first one's OutOfMemoryError."""
        refusal: OutOfMemoryError | None = None
        for device in self._devices:
            try:
                return self._room.for_work(partial(device.buffer_type.allocate, size_bytes, Usage.WEIGHTS))
            except OutOfMemoryError as error:
                refusal = refusal or error
        assert refusal is not None, "a host has devices"
        if (found := scattered(self._devices, size_bytes)) is None:
            raise refusal
        return found

    def add(self, digest: bytes, buffer: Buffer) -> None:
        """Keeps verified bytes; the second of two equal ones goes.

        Raises the error of a closed session, and LimitExceededError.
        """
        with self._lock:
            is_known = self._is_here(digest)
        if is_known:
            buffer.free()
        else:
            self._sizes[digest] = buffer.size_bytes
            self._keep_all(digest, buffer)

    def missing(self, digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Those that are not here, in their order."""
        with self._lock:
            return tuple(one for one in digests if not self._is_here(one))

    def bytes_on(self, device: str, weights: Sequence[Leaf]) -> int:
        """Bytes of those weights that lie on a device; of such as do not lie anywhere yet also what goes once
        they do: whatever else of their contents no plan uses."""
        names = [leaf.digest for leaf in weights]
        with self._lock:
            cut = {digest_of(name) for name in names if name not in self._buffers}
            others = {one for digest in cut for one in (digest, *self._parts.get(digest, ()))}.difference(
                names
            )
            held = [(name, *one) for name in (*names, *others) for one in self._buffers.get(name, {}).items()]
            return sum(
                buffer.size_bytes
                for name, where, buffer in held
                if where[0] == device and not (name in others and (name, where) in self._used)
            )

    def tensor(self, leaf: Leaf, memory: BufferType) -> Tensor:
        """A weight's tensor in a memory, for a plan; `use` it when there is one. The content must be here.

        Raises InvalidGraphError, OutOfMemoryError.
        """
        self._check_size(leaf)
        with self._lock:
            found = self._buffers.get(leaf.digest, {}).get(where_of(memory))
        return Tensor(leaf.type, found or self._make(leaf.digest, memory))

    def cut(
        self, weight: Leaf, parts: Sequence[tuple[Leaf, BufferType]], *, keeps_whole: bool = False
    ) -> None:
        """Puts all parts of a weight where they are to lie; then whatever else of it no plan uses goes, but
        the whole if that is kept. The content must be here. Raises InvalidGraphError, OutOfMemoryError.
        """
        self._check_size(weight)
        late: list[tuple[Leaf, BufferType, memoryview]] = []
        for leaf, memory in parts:
            try:
                self.tensor(leaf, memory)
            except OutOfMemoryError:
                # The whole may be in the way of its own part: that waits here until it is gone.
                late.append((leaf, memory, self._read(leaf.digest)))
        made = {(leaf.digest, where_of(memory)) for leaf, memory in parts}
        kept = weight.digest if keeps_whole else None
        self._drop(one for one in self._all_of(weight.digest) if one not in made and one[0] != kept)
        for leaf, memory, data in late:
            buffer = self._room.for_work(partial(memory.allocate, data.nbytes, Usage.WEIGHTS))
            with _freed_on_error(buffer):
                buffer.set(0, data)
            self._keep(leaf.digest, buffer)

    def use(self, weights: Iterable[tuple[Leaf, BufferType]]) -> None:
        """A plan was compiled for those copies: they stay, and others that no plan uses go."""
        found = {(leaf.digest, where_of(memory)) for leaf, memory in weights}
        with self._lock:
            self._used |= found
        for digest in {digest_of(name) for name, _ in found}:
            self._drop_unneeded(digest)

    def trim(self, weights: Iterable[Leaf]) -> None:
        """A compile failed: of the copies that no plan uses, one is enough."""
        for digest in {digest_of(leaf.digest) for leaf in weights}:
            self._drop_unneeded(digest)

    # Making copies

    def _check_size(self, leaf: Leaf) -> None:
        size_bytes = self._size_of(leaf.digest)
        if size_bytes != leaf.type.nbytes:
            raise InvalidGraphError(
                f"weight {leaf.name!r} is {leaf.type} of {leaf.type.nbytes} bytes, "
                f"but its content has {size_bytes}"
            )

    def _size_of(self, name: bytes) -> int:
        whole_bytes, piece = self._sizes[digest_of(name)], Slice.of(name)
        return whole_bytes if piece is None else piece.size_bytes(whole_bytes)

    def _make(self, name: bytes, memory: BufferType) -> Buffer:
        """A content, or a part of one, in a memory: from what there is of it."""
        size_bytes = self._size_of(name)
        with self._lock:
            wanted, found = self._sources(name)
        if found is None:
            if Slice.of(name) is None:
                raise self._gone()
            # It lies in parts, cut as a matrix of another shape.
            self._make(digest_of(name), memory)
            return self._make(name, memory)
        buffer = self._room.for_work(partial(memory.allocate, size_bytes, Usage.WEIGHTS))
        with _freed_on_error(buffer):
            for source, section in found if size_bytes else ():
                _, start, stop = section
                target = _view(buffer, wanted, start, stop)
                access.copy(_view(source, *section), target)
        return self._keep(name, buffer)

    def _read(self, name: bytes) -> memoryview:
        """The bytes of a content, or of a part of one."""
        with self._lock:
            wanted, found = self._sources(name)
        if found is None:
            if (piece := Slice.of(name)) is None:
                raise self._gone()
            whole = np.frombuffer(self._read(digest_of(name)), np.uint8).reshape(-1, piece.period)
            return host_bytes(np.ascontiguousarray(whole[:, piece.start : piece.stop]))
        made = np.empty(self._size_of(name), np.uint8)
        rows = made.reshape(-1, wanted.stop - wanted.start)
        for source, section in found:
            held = _view(source, *section)
            bounce = np.empty(held.type.shape, np.uint8)
            access.read(held, 0, host_bytes(bounce))
            rows[:, section[1] - wanted.start : section[2] - wanted.start] = bounce
        return host_bytes(made)

    def _sources(self, name: bytes) -> tuple[Slice, list[tuple[Buffer, Section]] | None]:
        """What a name stands for, and what it can be made of; None: of nothing that is cut like it."""
        digest, wanted = digest_of(name), Slice(0, 0, 0)
        for period in self._periods(name):
            wanted = Slice.of(name) or Slice(0, period, period)
            held = self._held(digest, period)
            if (found := sections(wanted.start, wanted.stop, held)) is not None:
                return wanted, [(held[section[0]], section) for section in found]
        return wanted, None

    def _periods(self, name: bytes) -> Sequence[int]:
        """How the content of a name may be cut."""
        if (piece := Slice.of(name)) is not None:
            return (piece.period,)
        if name in self._buffers:
            return (self._sizes[name],)
        return sorted({_slice(part).period for part in self._parts.get(name, ())})

    def _held(self, digest: bytes, period: int) -> dict[Slice, Buffer]:
        """What there is of a content that is cut like this. The whole is cut in every way."""
        found = {_slice(name): name for name in self._parts.get(digest, ())}
        names = {piece: name for piece, name in found.items() if piece.period == period}
        if digest in self._buffers:
            names[Slice(0, period, period)] = digest
        return {piece: next(iter(self._buffers[name].values())) for piece, name in names.items()}

    def _is_here(self, digest: bytes) -> bool:
        if digest in self._buffers or not self._parts.get(digest):
            return digest in self._buffers
        return self._sources(digest)[1] is not None

    def _gone(self) -> HeliographError:
        """The error for a content of which not all is here: it was when compiling began."""
        return self._closed or MissingContentError(
            "the content of a weight was lost with memory that did not suffice",
            advice="upload it and compile again",
        )

    # Letting go

    def _all_of(self, digest: bytes) -> list[tuple[bytes, Where]]:
        """All that there is of a content."""
        with self._lock:
            names = (digest, *self._parts.get(digest, ()))
            return [(name, where) for name in names for where in self._buffers.get(name, ())]

    def _drop_unneeded(self, digest: bytes) -> None:
        """Frees copies of a content that no plan was compiled for, but not the last."""
        held = self._all_of(digest)
        needed = self._needed(digest, held)
        self._drop(one for one in held if one not in needed)

    def _needed(self, digest: bytes, held: Sequence[tuple[bytes, Where]]) -> set[tuple[bytes, Where]]:
        """Of what there is of a content, so much that it is here: what plans use, and what that lacks."""
        used = [one for one in held if one in self._used]
        if _is_whole(digest, (name for name, _ in used)):
            return set(used)
        whole = [one for one in held if one[0] == digest]
        return {*used, *(whole[:1] or held)}

    def _drop(self, copies: Iterable[tuple[bytes, Where]]) -> None:
        """Frees copies that no plan uses."""
        gone: list[Buffer] = []
        with self._lock:
            for name, where in copies:
                there = self._buffers.get(name, {})
                if (name, where) not in self._used and where in there:
                    gone.append(there.pop(where))
                if not there:
                    self._buffers.pop(name, None)
                    self._parts.get(digest_of(name), set()).discard(name)
        for buffer in gone:
            buffer.free()

    def _keep(self, name: bytes, buffer: Buffer) -> Buffer:
        where = where_of(buffer.buffer_type)
        with self._lock:
            refusal = self._closed
            if refusal is None and len(self._buffers) >= MAX_CONTENTS:
                refusal = LimitExceededError(
                    f"the session holds {MAX_CONTENTS:,} contents, the most there may be"
                )
            if refusal is not None:
                buffer.free()
                raise refusal
            kept = self._buffers.setdefault(name, {}).setdefault(where, buffer)
            if Slice.of(name) is not None:
                self._parts.setdefault(digest_of(name), set()).add(name)
        if kept is not buffer:
            buffer.free()
        return kept

    def _keep_all(self, digest: bytes, buffer: Buffer) -> None:
        """Keeps a whole, or the slices in which it came, or nothing of it."""
        if not isinstance(buffer, ScatteredBuffer):
            self._keep(digest, buffer)
            return
        kept: list[tuple[bytes, Where]] = []
        try:
            for piece, part in buffer.pieces():
                self._keep(piece.name(digest), part)
                kept.append((piece.name(digest), where_of(part.buffer_type)))
        except BaseException:
            self._drop(kept)
            raise

    def close(self, error: HeliographError) -> None:
        """Frees all; uploads that are not finished will fail with this error."""
        with self._lock:
            self._closed = error
            buffers, self._buffers = self._buffers, {}
            self._parts = {}
        for copies in buffers.values():
            for buffer in copies.values():
                buffer.free()


@contextmanager
def _freed_on_error(buffer: Buffer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        buffer.free()
        raise


def _slice(name: bytes) -> Slice:
    found = Slice.of(name)
    assert found is not None, "the name of a part"
    return found


def _is_whole(digest: bytes, names: Iterable[bytes]) -> bool:
    """Whether the whole is among them, or parts that make it."""
    by_period: dict[int, list[Slice]] = {}
    for name in names:
        if name == digest:
            return True
        by_period.setdefault(_slice(name).period, []).append(_slice(name))
    return any(sections(0, period, held) is not None for period, held in by_period.items())


def _view(buffer: Buffer, held: Slice, start: int, stop: int) -> Tensor:
    """Of every period the bytes from `start` to before `stop`, in a buffer with that slice of a content."""
    row_bytes = held.stop - held.start
    count = buffer.size_bytes // row_bytes
    return Tensor(TensorType(DTYPES["u8"], (count, stop - start)), buffer, start - held.start, (row_bytes, 1))
