"""The contents of a tenant: bytes by digest, in device memory, one copy for all its sessions.

A content may also be stored in parts (`Slice`), each with a name of its own; parts that cover the
content replace the whole. A content is freed with its last holder. A copy stays while a plan uses
it or a compile needs it. Without either, one copy of the content stays until an allocation needs
its memory (`make_room`), unless a holder is about to compile with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np

from heliograph_backends.contract import (
    Buffer,
    BufferType,
    Device,
    MultiBuffer,
    Tensor,
    Usage,
    access,
    host_bytes,
)
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

#: The most contents and parts of a tenant. Their bytes count as device memory.
MAX_CONTENTS = 250_000
#: Slices of a scattered content begin at multiples of this many bytes.
GRAIN_BYTES = 4096

#: The names of a device and of its buffer type.
Where: TypeAlias = tuple[str, str]

#: The name of a content or part, and its memory.
Copy: TypeAlias = tuple[bytes, Where]
K = TypeVar("K")
U = TypeVar("U")


class WeightUse:
    """The copies that a plan uses, until `end`."""

    def __init__(self, copies: Iterable[Copy], ended: Callable[[WeightUse], None]) -> None:
        self.copies = frozenset(copies)
        #: True while the plan has no handle and gives way to other work.
        self.is_resting = False
        self._ended = ended

    def __repr__(self) -> str:
        return f"<WeightUse {len(self.copies)} copies{', resting' if self.is_resting else ''}>"

    def end(self) -> None:
        """Note that the plan is gone. Takes no lock that is held for long. Idempotent."""
        self._ended(self)


def where_of(memory: BufferType) -> Where:
    """The key of a memory."""
    return memory.device.name, memory.name


class TenantContents:
    """The contents of one tenant. Thread-safe.

    A user is a session, or any other object that needs contents; only its identity matters.
    """

    def __init__(self, room: MemoryReclaim, account: Account) -> None:
        self._room = room
        #: Charged for the bytes.
        self._account = account
        #: Held while memory is allocated, filled and freed, so that no source is freed while it is
        #: copied.
        self._changing = threading.RLock()
        self._lock = threading.Lock()
        #: By name (a digest or the name of a part), then by memory.
        self._buffers: dict[bytes, dict[Where, Buffer]] = {}
        #: By digest: the size of the content, the names of its parts, its holders.
        self._sizes: dict[bytes, int] = {}
        self._parts: dict[bytes, set[bytes]] = {}
        self._holders: dict[bytes, set[object]] = {}
        #: The plans that were compiled for a copy, and users that are compiling with or reading one.
        self._used: dict[Copy, set[WeightUse]] = {}
        self._needed: dict[Copy, set[object]] = {}
        #: By digest: holders that will compile with the content, or keep it for another reason.
        self._wanted: dict[bytes, set[object]] = {}
        #: By digest: copies on lost devices. Plans may still read them, so they are freed with the
        #: content.
        self._lost: dict[bytes, list[Buffer]] = {}

    def __repr__(self) -> str:
        return f"<TenantContents {len(self._holders)} contents, {self.size_bytes(self._holders):,} bytes>"

    @property
    def is_empty(self) -> bool:
        """True if no user holds any content."""
        return not self._holders

    def bytes_of(self, digest: bytes, device: str) -> int:
        """The bytes of a content on a device."""
        self._forget_lost(digest)
        with self._lock:
            copies = [self._buffers.get(name, {}) for name in (digest, *self._parts.get(digest, ()))]
            return sum(
                buffer.size_bytes for one in copies for where, buffer in one.items() if where[0] == device
            )

    def whole_bytes(self, digest: bytes) -> int:
        """The size of a content; 0 if it is not here."""
        with self._lock:
            return self._sizes.get(digest, 0)

    def size_bytes(self, digests: Iterable[bytes]) -> int:
        """The bytes of all copies and parts of some contents."""
        with self._lock:
            names = [name for one in tuple(digests) for name in (one, *self._parts.get(one, ()))]
            return sum(buffer.size_bytes for name in names for buffer in self._buffers.get(name, {}).values())

    def room_for(self, size_bytes: int, devices: Sequence[Device]) -> Buffer:
        """Allocate memory for a content: on the first device with room for it, or else over several
        devices.

        Raises the OutOfMemoryError of the first device.
        """
        refusal: HeliographError | None = None
        for device in devices:
            try:
                return self._room.for_work(partial(device.buffer_type.allocate, size_bytes, Usage.WEIGHTS))
            except (OutOfMemoryError, DeviceLostError) as error:
                refusal = refusal or error
        assert refusal is not None, "a host has devices"
        if (found := _scattered(devices, size_bytes)) is None:
            raise refusal
        return found

    def add(self, digest: bytes, buffer: Buffer, user: object) -> None:
        """Add verified bytes, held by the user. A second copy of equal bytes is freed.

        Raises LimitExceededError.
        """
        with self._changing:
            self._forget_lost(digest)
            with self._lock:
                # From now on, so that it does not give way to other work before it is held.
                self._wanted.setdefault(digest, set()).add(user)
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
                    self.spare((digest,), user)
                    raise
            with self._lock:
                self._holders.setdefault(digest, set()).add(user)

    def hold(self, digest: bytes, user: object) -> bool:
        """Hold a content for the user, who wants it, if it is here. Return True if it is."""
        self._forget_lost(digest)
        with self._lock:
            is_here = digest in self._holders and self._is_here(digest)
            if is_here:
                self._holders[digest].add(user)
                self._wanted.setdefault(digest, set()).add(user)
            return is_here

    def spare(self, digests: Iterable[bytes], user: object) -> None:
        """Note that the user wants these contents no longer, though it still holds them."""
        with self._lock:
            for digest in digests:
                _unmark(self._wanted, digest, user)

    def has(self, digest: bytes) -> bool:
        """True if the content is here completely."""
        self._forget_lost(digest)
        with self._lock:
            return self._is_here(digest)

    def release(self, digests: Iterable[bytes], user: object) -> None:
        """End the user's hold of these contents. A content is freed with its last holder."""
        with self._changing:
            for digest in digests:
                self._release(digest, user)

    def try_release(self, digest: bytes, user: object) -> bool:
        """As `release`, unless another thread is changing the contents. Return True if it was
        done."""
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
            for one in held:
                _unmark(self._needed, one, user)
            _unmark(self._wanted, digest, user)
            holders = self._holders.get(digest, set())
            holders.discard(user)
            is_free = not holders
            if is_free:
                self._holders.pop(digest, None)
                for one in held:
                    self._used.pop(one, None)
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
        """All bytes of a content that the user holds, for reading. Raises MissingContentError.

        Return a copy that stays until `release`, in host memory if possible; or the assembled bytes
        if the content is in parts.
        """
        with self._changing:
            self._forget_lost(digest)
            with self._lock:
                copies = self._buffers.get(digest, {})
                if copies:
                    best = max(copies, key=lambda where: copies[where].buffer_type.is_host)
                    self._needed.setdefault((digest, best), set()).add(user)
                    return copies[best]
            return self._read(digest)

    def bytes_on(self, device: str, weights: Sequence[Leaf]) -> int:
        """The bytes on a device of those weights, plus bytes that loading them would free there.

        The latter are the unused copies and parts of contents whose weights are not in memory in
        the required form yet. Idle copies are not among them: `idle_on` has these.
        """
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
                if where[0] == device
                and not (name in others and self._used.get((name, where)))
                and not self._is_idle((name, where))
            )

    def tensor(self, leaf: Leaf, memory: BufferType, user: object) -> Tensor:
        """The tensor of a weight in a memory, for a plan. Call `use` when the plan exists. The
        content must be here.

        Raises InvalidGraphError, MissingContentError, OutOfMemoryError.
        """
        with self._changing:
            self._forget_lost(digest_of(leaf.digest))
            self._check_size(leaf)
            with self._lock:
                found = self._buffers.get(leaf.digest, {}).get(where_of(memory))
            found = found or self._make(leaf.digest, memory)
            with self._lock:
                self._needed.setdefault((leaf.digest, where_of(memory)), set()).add(user)
            return Tensor(leaf.type, found)

    def cut(
        self,
        weight: Leaf,
        parts: Sequence[tuple[Leaf, BufferType]],
        user: object,
        *,
        keeps_whole: bool = False,
    ) -> None:
        """Put all parts of a weight into their memories, and free its other unused copies.

        The content must be here. `keeps_whole`: the whole stays too. Raises InvalidGraphError,
        MissingContentError, OutOfMemoryError.
        """
        with self._changing:
            self._check_size(weight)
            late: list[tuple[Leaf, BufferType, memoryview]] = []
            for leaf, memory in parts:
                try:
                    self.tensor(leaf, memory, user)
                except OutOfMemoryError:
                    # The whole may occupy the memory of its part, which waits for that.
                    late.append((leaf, memory, self._read(leaf.digest)))
            made = {(leaf.digest, where_of(memory)) for leaf, memory in parts}
            kept = weight.digest if keeps_whole else None
            others = (one for one in self._all_of(weight.digest) if one not in made and one[0] != kept)
            self._drop(others, user)
            for leaf, memory, data in late:
                buffer = self._room.for_work(partial(memory.allocate, data.nbytes, Usage.WEIGHTS))
                with _freed_on_error(buffer):
                    buffer.set(0, data)
                self._keep(leaf.digest, buffer)

    def use(self, weights: Iterable[tuple[Leaf, BufferType]], user: object) -> WeightUse:
        """Mark copies as used by a plan of the user. They stay until the use ends; other copies
        that no plan uses are freed."""
        made = WeightUse(((leaf.digest, where_of(memory)) for leaf, memory in weights), self._end_use)
        with self._changing:
            with self._lock:
                for one in made.copies:
                    self._used.setdefault(one, set()).add(made)
            for digest in {digest_of(name) for name, _ in made.copies}:
                self._settle(digest, user)
        return made

    def leave_elsewhere(self, weights: Iterable[tuple[Leaf, BufferType]]) -> None:
        """Free the copies of weights that lie at these homes, where they lie elsewhere and no plan
        uses them: what else the plan needs there may have no room beside them."""
        homes = {(leaf.digest, where_of(memory)) for leaf, memory in weights}
        with self._changing:
            for name, _ in homes:
                if Slice.of(name) is None:
                    self._drop(one for one in self._all_of(name) if one not in homes)

    def _end_use(self, use: WeightUse) -> None:
        with self._lock:
            for one in use.copies:
                _unmark(self._used, one, use)

    def trim(self, weights: Iterable[Leaf], user: object) -> None:
        """Free unused copies after a failed compile, except for one."""
        with self._changing:
            for digest in {digest_of(leaf.digest) for leaf in weights}:
                self._settle(digest, user)

    def _settle(self, digest: bytes, user: object) -> None:
        """End a compile of the user."""
        held = self._all_of(digest)
        with self._lock:
            for one in held:
                _unmark(self._needed, one, user)
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
        """Make a copy of a content or a part, from the copies and parts that are here."""
        size_bytes = self._size_of(name)
        with self._lock:
            piece, found = self._sources(name)
        if found is None:
            if Slice.of(name) is None:
                raise self._gone()
            # The content is in parts that are cut for a matrix of another shape.
            self._make(digest_of(name), memory)
            return self._make(name, memory)
        charge = self._account.charge(QuotaKind.MEMORY, size_bytes)
        try:
            buffer = self._room.for_work(partial(memory.allocate, size_bytes, Usage.WEIGHTS))
            with _freed_on_error(buffer):
                for source, section in found if size_bytes else ():
                    _, start, stop = section
                    access.copy(_view(source, section), _view(buffer, (piece, start, stop)))
            return self._keep(name, buffer)
        finally:
            # `_keep` charges the copy by itself.
            charge.give()

    def _read(self, name: bytes) -> memoryview:
        """Read the bytes of a content or a part."""
        with self._lock:
            target, found = self._sources(name)
        if found is None:
            if (piece := Slice.of(name)) is None:
                raise self._gone()
            whole = np.frombuffer(self._read(digest_of(name)), np.uint8).reshape(-1, piece.period)
            return host_bytes(np.ascontiguousarray(whole[:, piece.start : piece.stop]))
        made = np.empty(self._size_of(name), np.uint8)
        rows = made.reshape(-1, target.stop - target.start)
        for source, section in found:
            held = _view(source, section)
            bounce = np.empty(held.type.shape, np.uint8)
            access.read(held, 0, host_bytes(bounce))
            rows[:, section[1] - target.start : section[2] - target.start] = bounce
        return host_bytes(made)

    def _sources(self, name: bytes) -> tuple[Slice, list[tuple[Buffer, Section]] | None]:
        """The slice that a name stands for, and the buffers and sections to make it of. None if no
        parts with the same period cover it."""
        digest, piece = digest_of(name), Slice(0, 0, 0)
        for period in self._periods(name):
            piece = Slice.of(name) or Slice(0, period, period)
            held = self._held(digest, period)
            if (found := sections(piece.start, piece.stop, held)) is not None:
                return piece, [(held[section[0]], section) for section in found]
        return piece, None

    def _periods(self, name: bytes) -> Sequence[int]:
        """The periods with which the content of a name may be cut."""
        if (piece := Slice.of(name)) is not None:
            return (piece.period,)
        if name in self._buffers:
            return (self._sizes[name],)
        return sorted({_slice(part).period for part in self._parts.get(name, ())})

    def _held(self, digest: bytes, period: int) -> dict[Slice, Buffer]:
        """The buffers of a content by slice, for slices of this period. The whole has every
        period."""
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
        """The error of a content that was here when compiling began, and is not complete any
        more."""
        return MissingContentError(
            "the content of a weight was lost when memory ran out",
            advice="upload it and compile again",
        )

    # Freeing copies

    def forget_lost(self) -> None:
        """Forget the contents on lost devices; clients upload them again. Does not wait for other
        changes."""
        with self._lock:
            digests = {digest_of(name) for name in self._buffers}
        for digest in digests:
            self._forget_lost(digest)

    def _forget_lost(self, digest: bytes) -> None:
        """Forget the copies of a content on lost devices. New copies may get the same names.

        Runs of plans that use them fail, but may not have ended: the memory is freed with the
        content.
        """
        with self._lock:
            for name in (digest, *self._parts.get(digest, ())):
                copies = self._buffers.get(name, {})
                gone = [key for key, one in copies.items() if one.buffer_type.device.lost is not None]
                for where in gone:
                    self._lost.setdefault(digest, []).append(copies.pop(where))
                    self._account.give(QuotaKind.MEMORY, self._lost[digest][-1].size_bytes)
                    self._used.pop((name, where), None)
                    self._needed.pop((name, where), None)
                if gone and not copies:
                    self._buffers.pop(name, None)
            if digest in self._lost and digest in self._parts:
                self._parts[digest] = {name for name in self._parts[digest] if name in self._buffers}

    def _all_of(self, digest: bytes) -> list[Copy]:
        """All copies and parts of a content."""
        with self._lock:
            names = (digest, *self._parts.get(digest, ()))
            return [(name, where) for name in names for where in self._buffers.get(name, ())]

    def _drop_unneeded(self, digest: bytes, user: object) -> None:
        """Free the copies of a content that no plan uses, but keep enough of it to make others."""
        held = self._all_of(digest)
        kept = {one for one in held if self._used.get(one)}
        if not _is_whole(digest, (name for name, _ in kept)):
            whole = [one for one in held if one[0] == digest]
            kept.update(whole[:1] or held)
        self._drop((one for one in held if one not in kept), user)

    def _drop(self, copies: Iterable[Copy], user: object = None) -> None:
        """Free copies that no plan uses and no other user needs."""
        with self._lock:
            gone = self._take_out(copies, user)
        for buffer in gone:
            buffer.free()

    def _take_out(self, copies: Iterable[Copy], user: object = None) -> list[Buffer]:
        """Remove copies as `_drop`, and return their buffers for the caller to free. Lock held."""
        gone: list[Buffer] = []
        for one in copies:
            name, where = one
            there = self._buffers.get(name, {})
            others = self._needed.get(one, set()) - {user}
            if not self._used.get(one) and not others and where in there:
                gone.append(there.pop(where))
                self._account.give(QuotaKind.MEMORY, gone[-1].size_bytes)
                self._needed.pop(one, None)
            if not there:
                self._buffers.pop(name, None)
                self._parts.get(digest_of(name), set()).discard(name)
        return gone

    # Idle copies

    def _is_idle(self, one: Copy) -> bool:
        """True if no holder wants a copy, and only plans without a handle use it."""
        is_free = not self._needed.get(one) and not self._wanted.get(digest_of(one[0]))
        return is_free and all(use.is_resting for use in self._used.get(one, ()))

    def _idle(self) -> list[Copy]:
        copies = [(name, where) for name, there in self._buffers.items() for where in there]
        return [one for one in copies if self._is_idle(one)]

    def make_room(self) -> bool:
        """As `Reclaimable.make_room`: free the idle copies that no plan uses.

        Holders upload them again, or read them from files, when they need them. Waits for no thread
        that changes contents: such a thread wants them.
        """
        with self._lock:
            gone = self._take_out(self._idle())
        for buffer in gone:
            buffer.free()
        return bool(gone)

    def leave(self) -> None:
        """Leave the tenant's account. Nothing is held any more."""
        self._account.leave(self)

    def idle_on(self, device: str) -> int:
        """As `Reclaimable.idle_on`, with the copies of plans that give way first."""
        with self._lock:
            found = [self._buffers[name][where] for name, where in self._idle() if where[0] == device]
        return sum(one.size_bytes for one in found)

    def _keep(self, name: bytes, buffer: Buffer) -> Buffer:
        where = where_of(buffer.buffer_type)
        with self._lock:
            if (error := buffer.buffer_type.device.lost) is not None:
                # `forget_lost` may have passed this content already.
                buffer.free()
                raise error.at(error.origin)
            if len(self._buffers) >= MAX_CONTENTS:
                buffer.free()
                raise LimitExceededError(f"there are {MAX_CONTENTS:,} contents, which is the limit")
            kept = self._buffers.setdefault(name, {}).setdefault(where, buffer)
            if kept is buffer:
                # The caller has charged it already.
                self._account.take(QuotaKind.MEMORY, buffer.size_bytes, by_force=True)
            if Slice.of(name) is not None:
                self._parts.setdefault(digest_of(name), set()).add(name)
        if kept is not buffer:
            buffer.free()
        return kept

    def _keep_all(self, digest: bytes, buffer: Buffer) -> None:
        """Keep a whole content, or the slices in which it arrived; all of it or none."""
        if not isinstance(buffer, ScatteredBuffer):
            self._keep(digest, buffer)
            return
        kept: list[Copy] = []
        try:
            for piece, part in buffer.pieces():
                self._keep(piece.name(digest), part)
                kept.append((piece.name(digest), where_of(part.buffer_type)))
        except BaseException:
            self._drop(kept)
            raise


class ScatteredBuffer(MultiBuffer):
    """Consecutive bytes of a content over several buffers. It is written, and never read."""

    def set(self, offset_bytes: int, data: memoryview) -> None:
        data = data.cast("B")
        for piece, part in self.pieces():
            start, stop = max(offset_bytes, piece.start), min(offset_bytes + data.nbytes, piece.stop)
            if start < stop:
                part.set(start - piece.start, data[start - offset_bytes : stop - offset_bytes])

    def pieces(self) -> Iterator[tuple[Slice, Buffer]]:
        """The slice of the content in each buffer."""
        start = 0
        for part in self.parts:
            yield Slice(start, start + part.size_bytes, self.size_bytes), part
            start += part.size_bytes


def _scattered(devices: Sequence[Device], size_bytes: int) -> ScatteredBuffer | None:
    """Allocate memory over the devices, each as much as it has free. None if that does not
    suffice."""
    shares: list[tuple[Device, int]] = []
    for device in devices:
        free_bytes = min(device.memory().free_bytes, device.buffer_type.max_size)
        share_bytes = min(size_bytes, free_bytes // GRAIN_BYTES * GRAIN_BYTES)
        size_bytes -= share_bytes
        shares.append((device, share_bytes))
    if size_bytes:
        return None
    parts: list[Buffer] = []
    try:
        for device, share_bytes in shares:
            if share_bytes:
                parts.append(device.buffer_type.allocate(share_bytes, Usage.WEIGHTS))
    except BaseException as error:
        for part in parts:
            part.free()
        if isinstance(error, OutOfMemoryError):
            return None  # another thread took the memory
        raise
    return ScatteredBuffer(parts[0].buffer_type, parts) if parts else None


def _unmark(marks: dict[K, set[U]], one: K, user: U) -> None:
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


def _slice(name: bytes) -> Slice:
    found = Slice.of(name)
    assert found is not None, "the name of a part"
    return found


def _is_whole(digest: bytes, names: Iterable[bytes]) -> bool:
    """True if the names include the whole, or parts that cover it."""
    by_period: dict[int, list[Slice]] = {}
    for name in names:
        if name == digest:
            return True
        by_period.setdefault(_slice(name).period, []).append(_slice(name))
    return any(sections(0, period, held) is not None for period, held in by_period.items())


def _view(buffer: Buffer, section: Section) -> Tensor:
    """A view of the bytes from `start` to `stop` of every period, in a buffer that has a slice of a
    content."""
    held, start, stop = section
    row_bytes = held.stop - held.start
    count = buffer.size_bytes // row_bytes
    return Tensor(TensorType(DTYPES["u8"], (count, stop - start)), buffer, start - held.start, (row_bytes, 1))
