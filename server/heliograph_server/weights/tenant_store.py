"""What a tenant has of contents: bytes by digest, in the memory of devices, one copy for all its sessions.

A content may lie in parts as well (`Slice`), each known by a name of its own: when these make all of it,
there need be no whole. Whoever needs a content holds it; with its last holder it goes. A copy stays as long
as a plan uses it, or somebody compiles with it; of others one is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np

from heliograph_backends.contract import Buffer, BufferType, Device, Tensor, Usage, access, host_bytes
from heliograph_proto.errors import (
    DeviceLostError,
    HeliographError,
    InvalidGraphError,
    LimitExceededError,
    MissingContentError,
    OutOfMemoryError,
)
from heliograph_proto.graph import Leaf
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.resources.quotas import Account, QuotaKind
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.scheduler.slices import Section, Slice, digest_of, sections
from heliograph_server.weights.scattered import ScatteredBuffer, scattered

#: The most contents and parts of a tenant; their bytes count as the device's memory.
MAX_CONTENTS = 250_000

#: The names of a device and of its buffer type.
Where: TypeAlias = tuple[str, str]


#: A content or a part of one, by name, and its memory.
Copy: TypeAlias = tuple[bytes, Where]


def parts_of(weights: Iterable[tuple[Leaf, BufferType]]) -> list[Copy]:
    """Those that are no whole contents."""
    return [(leaf.digest, where_of(memory)) for leaf, memory in weights if Slice.of(leaf.digest) is not None]


def where_of(memory: BufferType) -> Where:
    """By what memory is known."""
    return memory.device.name, memory.name


class TenantContents:
    """Thread-safe. A user is a session, or whoever else needs contents; it is only told apart from others."""

    def __init__(self, room: MemoryReclaim, account: Account) -> None:
        self._room = room
        #: On which its bytes count.
        self._account = account
        #: Held while memory is made, filled and freed, so that no source goes while it is copied.
        self._changing = threading.RLock()
        self._lock = threading.Lock()
        #: By name, which is a digest or that of a part, and by memory.
        self._buffers: dict[bytes, dict[Where, Buffer]] = {}
        #: By digest: how large the content is, the names of the parts that there are of it, who holds it.
        self._sizes: dict[bytes, int] = {}
        self._parts: dict[bytes, set[bytes]] = {}
        self._holders: dict[bytes, set[object]] = {}
        #: Users whose plans were compiled for a copy, and those who compile, or read, just now.
        self._used: dict[tuple[bytes, Where], set[object]] = {}
        self._wanted: dict[tuple[bytes, Where], set[object]] = {}
        #: By digest: copies on devices that are lost. Plans may still read them, so they go with the content.
        self._lost: dict[bytes, list[Buffer]] = {}

    def __repr__(self) -> str:
        return f"<TenantContents {len(self._holders)} contents, {self.size_bytes(self._holders):,} bytes>"

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds anything."""
        return not self._holders

    def bytes_of(self, digest: bytes, device: str) -> int:
        """What there is of a content on a device."""
        self._forget_lost(digest)
        with self._lock:
            copies = [self._buffers.get(name, {}) for name in (digest, *self._parts.get(digest, ()))]
            return sum(
                buffer.size_bytes for one in copies for where, buffer in one.items() if where[0] == device
            )

    def size_bytes(self, digests: Iterable[bytes]) -> int:
        """Bytes of all that there is of some contents."""
        with self._lock:
            names = [name for one in tuple(digests) for name in (one, *self._parts.get(one, ()))]
            return sum(buffer.size_bytes for name in names for buffer in self._buffers.get(name, {}).values())

    def room_for(self, size_bytes: int, devices: Sequence[Device]) -> Buffer:
        """Memory for a content: on the first device that has it, else over several, as its rows may lie one
        day. Raises the first one's OutOfMemoryError."""
        refusal: HeliographError | None = None
        for device in devices:
            try:
                return self._room.for_work(partial(device.buffer_type.allocate, size_bytes, Usage.WEIGHTS))
            except (OutOfMemoryError, DeviceLostError) as error:
                refusal = refusal or error
        assert refusal is not None, "a host has devices"
        if (found := scattered(devices, size_bytes)) is None:
            raise refusal
        return found

    def add(self, digest: bytes, buffer: Buffer, user: object) -> None:
        """Keeps verified bytes, which the user holds; the second of two equal ones goes.

        Raises LimitExceededError.
        """
        with self._changing:
            self._forget_lost(digest)
            with self._lock:
                is_known = self._is_here(digest)
                if not is_known:
                    self._sizes[digest] = buffer.size_bytes
            if is_known:
                buffer.free()
            else:
                try:
                    self._keep_all(digest, buffer)
                except BaseException:
                    self._sizes.pop(digest, None)
                    raise
            with self._lock:
                self._holders.setdefault(digest, set()).add(user)

    def hold(self, digest: bytes, user: object) -> bool:
        """Whether a content is here; the user holds it then."""
        self._forget_lost(digest)
        with self._lock:
            is_here = digest in self._holders and self._is_here(digest)
            if is_here:
                self._holders[digest].add(user)
            return is_here

    def has(self, digest: bytes) -> bool:
        """Whether all of a content is here."""
        self._forget_lost(digest)
        with self._lock:
            return self._is_here(digest)

    def release(self, digests: Iterable[bytes], user: object) -> None:
        """The user needs these contents no more. With its last holder a content goes."""
        with self._changing:
            for digest in digests:
                self._release(digest, user)

    def try_release(self, digest: bytes, user: object) -> bool:
        """As `release`, unless another thread changes something here: whether it was done."""
        if not self._changing.acquire(blocking=False):
            return False
        try:
            self._release(digest, user)
        finally:
            self._changing.release()
        return True

    def _release(self, digest: bytes, user: object) -> None:
        held = self._all_of(digest)
        with self._lock:
            for marks in (self._used, self._wanted):
                for one in held:
                    _unmark(marks, one, user)
            holders = self._holders.get(digest, set())
            holders.discard(user)
            is_free = not holders
            if is_free:
                self._holders.pop(digest, None)
        if is_free:
            self._drop(held)
            with self._lock:
                self._sizes.pop(digest, None)
                self._parts.pop(digest, None)
                lost = self._lost.pop(digest, [])
            for buffer in lost:
                buffer.free()
        else:
            self._drop_unneeded(digest, user)

    def whole(self, digest: bytes, user: object) -> Buffer | memoryview:
        """All of a content that the user holds, to be read: a copy that stays until `release`, best in the
        host's memory; its bytes where there is none. Raises MissingContentError."""
        with self._changing:
            self._forget_lost(digest)
            with self._lock:
                copies = self._buffers.get(digest, {})
                if copies:
                    best = max(copies, key=lambda where: copies[where].buffer_type.is_host)
                    self._wanted.setdefault((digest, best), set()).add(user)
                    return copies[best]
            return self._read(digest)

    def bytes_on(self, device: str, weights: Sequence[Leaf]) -> int:
        """Bytes of those weights that lie on a device; of such as do not lie anywhere yet also what goes once
        they do: whatever else of their contents no plan uses."""
        names = [leaf.digest for leaf in weights]
        for digest in {digest_of(name) for name in names}:
            self._forget_lost(digest)
        with self._lock:
            cut = {digest_of(name) for name in names if name not in self._buffers}
            others = {one for digest in cut for one in (digest, *self._parts.get(digest, ()))}.difference(
                names
            )
            held = [(name, *one) for name in (*names, *others) for one in self._buffers.get(name, {}).items()]
            return sum(
                buffer.size_bytes
                for name, where, buffer in held
                if where[0] == device and not (name in others and self._used.get((name, where)))
            )

    def tensor(self, leaf: Leaf, memory: BufferType, user: object) -> Tensor:
        """A weight's tensor in a memory, for a plan; `use` it when there is one. The content must be here.

        Raises InvalidGraphError, MissingContentError, OutOfMemoryError.
        """
        with self._changing:
            self._forget_lost(digest_of(leaf.digest))
            self._check_size(leaf)
            with self._lock:
                found = self._buffers.get(leaf.digest, {}).get(where_of(memory))
            found = found or self._make(leaf.digest, memory)
            with self._lock:
                self._wanted.setdefault((leaf.digest, where_of(memory)), set()).add(user)
            return Tensor(leaf.type, found)

    def cut(
        self,
        weight: Leaf,
        parts: Sequence[tuple[Leaf, BufferType]],
        user: object,
        *,
        keeps_whole: bool = False,
    ) -> None:
        """Puts all parts of a weight where they are to lie; then whatever else of it no plan uses goes, but
        the whole if that is kept. The content must be here. Raises InvalidGraphError, MissingContentError,
        OutOfMemoryError.
        """
        with self._changing:
            self._cut(weight, parts, user, keeps_whole)

    def _cut(
        self, weight: Leaf, parts: Sequence[tuple[Leaf, BufferType]], user: object, keeps_whole: bool
    ) -> None:
        self._check_size(weight)
        late: list[tuple[Leaf, BufferType, memoryview]] = []
        for leaf, memory in parts:
            try:
                self.tensor(leaf, memory, user)
            except OutOfMemoryError:
                # The whole may be in the way of its own part: that waits here until it is gone.
                late.append((leaf, memory, self._read(leaf.digest)))
        made = {(leaf.digest, where_of(memory)) for leaf, memory in parts}
        kept = weight.digest if keeps_whole else None
        self._drop((one for one in self._all_of(weight.digest) if one not in made and one[0] != kept), user)
        for leaf, memory, data in late:
            buffer = self._room.for_work(partial(memory.allocate, data.nbytes, Usage.WEIGHTS))
            with _freed_on_error(buffer):
                buffer.set(0, data)
            self._keep(leaf.digest, buffer)

    def use(self, weights: Iterable[tuple[Leaf, BufferType]], user: object) -> None:
        """A plan was compiled for those copies: they stay, and others that no plan uses go."""
        found = {(leaf.digest, where_of(memory)) for leaf, memory in weights}
        with self._changing:
            with self._lock:
                for one in found:
                    self._used.setdefault(one, set()).add(user)
            for digest in {digest_of(name) for name, _ in found}:
                self._settle(digest, user)

    def unuse(self, copies: Iterable[Copy], user: object) -> None:
        """The user's plans need these copies no more: they go when others are made, or memory is wanted."""
        with self._lock:
            for one in copies:
                _unmark(self._used, one, user)

    def trim(self, weights: Iterable[Leaf], user: object) -> None:
        """A compile failed: of the copies that no plan uses, one is enough."""
        with self._changing:
            for digest in {digest_of(leaf.digest) for leaf in weights}:
                self._settle(digest, user)

    def _settle(self, digest: bytes, user: object) -> None:
        """The user compiles no more."""
        held = self._all_of(digest)
        with self._lock:
            for one in held:
                _unmark(self._wanted, one, user)
        self._drop_unneeded(digest, user)

    # Making copies

    def _check_size(self, leaf: Leaf) -> None:
        size_bytes = self._size_of(leaf.digest)
        if size_bytes != leaf.type.nbytes:
            raise InvalidGraphError(
                f"weight {leaf.name!r} is {leaf.type} of {leaf.type.nbytes} bytes, "
                f"but its content has {size_bytes}"
            )

    def _size_of(self, name: bytes) -> int:
        if (whole_bytes := self._sizes.get(digest_of(name))) is None:
            raise self._gone()
        piece = Slice.of(name)
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
        charge = self._account.charge(QuotaKind.MEMORY, size_bytes)
        try:
            return self._keep(name, self._filled(memory, size_bytes, wanted, found))
        finally:
            # What is kept counts by itself.
            charge.give()

    def _filled(
        self, memory: BufferType, size_bytes: int, wanted: Slice, found: list[tuple[Buffer, Section]]
    ) -> Buffer:
        buffer = self._room.for_work(partial(memory.allocate, size_bytes, Usage.WEIGHTS))
        with _freed_on_error(buffer):
            for source, section in found if size_bytes else ():
                _, start, stop = section
                target = _view(buffer, (wanted, start, stop))
                access.copy(_view(source, section), target)
        return buffer

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
            held = _view(source, section)
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

    @staticmethod
    def _gone() -> HeliographError:
        """The error for a content of which not all is here: it was when compiling began."""
        return MissingContentError(
            "the content of a weight was lost with memory that did not suffice",
            advice="upload it and compile again",
        )

    # Letting go

    def forget_lost(self) -> None:
        """What lies on devices that are gone is here no more: who wants it is told to bring it again. Waits
        for nobody who changes something here."""
        with self._lock:
            digests = {digest_of(name) for name in self._buffers}
        for digest in digests:
            self._forget_lost(digest)

    def _forget_lost(self, digest: bytes) -> None:
        """What of a content lay on devices that are lost is not here any more; others may come there under
        the same names. Their plans' runs fail, but may not be over: so it is freed with the content."""
        with self._lock:
            for name in (digest, *self._parts.get(digest, ())):
                copies = self._buffers.get(name, {})
                gone = [where for where, one in copies.items() if _is_lost(one)]
                for where in gone:
                    self._lost.setdefault(digest, []).append(copies.pop(where))
                    self._account.give(QuotaKind.MEMORY, self._lost[digest][-1].size_bytes)
                    self._used.pop((name, where), None)
                    self._wanted.pop((name, where), None)
                if gone and not copies:
                    self._buffers.pop(name, None)
            if digest in self._lost and digest in self._parts:
                self._parts[digest] = {name for name in self._parts[digest] if name in self._buffers}

    def _all_of(self, digest: bytes) -> list[tuple[bytes, Where]]:
        """All that there is of a content."""
        with self._lock:
            names = (digest, *self._parts.get(digest, ()))
            return [(name, where) for name in names for where in self._buffers.get(name, ())]

    def _drop_unneeded(self, digest: bytes, user: object) -> None:
        """Frees copies of a content that no plan was compiled for, but not the last."""
        held = self._all_of(digest)
        needed = self._needed(digest, held)
        self._drop((one for one in held if one not in needed), user)

    def _needed(self, digest: bytes, held: Sequence[tuple[bytes, Where]]) -> set[tuple[bytes, Where]]:
        """Of what there is of a content, so much that it is here: what plans use, and what that lacks."""
        used = [one for one in held if self._used.get(one)]
        if _is_whole(digest, (name for name, _ in used)):
            return set(used)
        whole = [one for one in held if one[0] == digest]
        return {*used, *(whole[:1] or held)}

    def _drop(self, copies: Iterable[tuple[bytes, Where]], user: object = None) -> None:
        """Frees copies that no plan uses, and nobody but the user compiles with."""
        gone: list[Buffer] = []
        with self._lock:
            for one in copies:
                name, where = one
                there = self._buffers.get(name, {})
                others = self._wanted.get(one, set()) - {user}
                if not self._used.get(one) and not others and where in there:
                    gone.append(there.pop(where))
                    self._account.give(QuotaKind.MEMORY, gone[-1].size_bytes)
                    self._wanted.pop(one, None)
                if not there:
                    self._buffers.pop(name, None)
                    self._parts.get(digest_of(name), set()).discard(name)
        for buffer in gone:
            buffer.free()

    def _keep(self, name: bytes, buffer: Buffer) -> Buffer:
        where = where_of(buffer.buffer_type)
        with self._lock:
            if (error := buffer.buffer_type.device.lost) is not None:
                # Whoever forgets what is lost may have been here.
                buffer.free()
                raise error.at(error.origin)
            if len(self._buffers) >= MAX_CONTENTS:
                buffer.free()
                raise LimitExceededError(f"there are {MAX_CONTENTS:,} contents, the most there may be")
            kept = self._buffers.setdefault(name, {}).setdefault(where, buffer)
            if kept is buffer:
                # Whoever brought it has asked.
                self._account.take(QuotaKind.MEMORY, buffer.size_bytes, by_force=True)
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


def _unmark(marks: dict[tuple[bytes, Where], set[object]], one: tuple[bytes, Where], user: object) -> None:
    users = marks.get(one)
    if users is not None:
        users.discard(user)
        if not users:
            del marks[one]


@contextmanager
def _freed_on_error(buffer: Buffer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        buffer.free()
        raise


def _is_lost(buffer: Buffer) -> bool:
    return buffer.buffer_type.device.lost is not None


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


def _view(buffer: Buffer, section: Section) -> Tensor:
    """Of every period the bytes from `start` to before `stop`, in a buffer with that slice of a content."""
    held, start, stop = section
    row_bytes = held.stop - held.start
    count = buffer.size_bytes // row_bytes
    return Tensor(TensorType(DTYPES["u8"], (count, stop - start)), buffer, start - held.start, (row_bytes, 1))
