"""The handle table: the object behind each handle of a session, and whether it can be used.

    number ──▸ TensorHandle ──▸ HandleStorage  tensors (views, placed ones) may share one storage
               BufferHandle ──▸ TensorHandle   one for each of its storages, over all its bytes
               PlanHandle   ──▸ HandleStorage  of variables, and of weights bound to tensors
               StreamHandle ──▸ DeviceQueue    never shared, except for the device's own queue
               EventHandle  ──▸ CommandState   the recorded mark
               ReservationHandle               the memory of plans

A handle is alive from the arrival of the command that creates it to that of the command that frees
it; its object stays until the commands between them are done. A poisoned handle holds an error: its
own if it was never created, or one on bytes of its storage if the command that was to write them
failed. Poison on bytes is a range: a view of healthy bytes stays usable, and rewriting bytes heals
them.

`buffer`, `stream` and `plan` are opaque objects of the runtime.

Any thread may use these objects, under the session's lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import ref

from heliograph_backends.contract import Buffer, Tensor
from heliograph_proto.commands import SERVER_HANDLE
from heliograph_proto.devices import Usage
from heliograph_proto.errors import (
    HandleExistsError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    UnknownHandleError,
)
from heliograph_proto.plans import CompileRequest, Port, ReserveRequest
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, dtype
from heliograph_server.resources.run_slots import RunSlots

if TYPE_CHECKING:
    from heliograph_server.session.protocol.dependencies import CommandState

_START, _END = attrgetter("start"), attrgetter("end")
_BYTE = dtype("u8")

#: The most streams of a session. Each may cost the device a thread.
MAX_STREAMS = 64
#: The most reservations of a session. Their bytes count as device memory.
MAX_RESERVATIONS = 64


@dataclass(slots=True, eq=False)
class DeviceQueue:
    """An ordered queue of a device: work starts in the order of submission."""

    device: str
    #: The error if it could not be created; its work fails with it.
    error: HeliographError | None = None
    #: The runtime's stream, and its number of unfinished pieces of work.
    stream: Any = None
    queued: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Poison:
    """A range of bytes that a failed command did not write."""

    start: int
    end: int
    error: HeliographError
    tensor: TensorHandle
    #: The sequence number of the command.
    sequence: int


@dataclass(slots=True, eq=False)
class HandleStorage:
    """Bytes on a device, and the commands that wait for each other on them."""

    size_bytes: int
    device: str
    #: The runtime's buffer. None before allocation and after release.
    buffer: Any = None
    #: The name of the device's buffer type; empty: the default.
    buffer_type: str = ""
    usage: Usage = Usage.ANY
    #: True if its bytes are charged to its tenant.
    is_charged: bool = False
    #: Within one process only: the host bytes that it is made of.
    memory: memoryview | None = None
    #: The sequence number of the command that allocates it; 0 for a variable.
    maker: int = 0
    #: The error of that command if it failed; there are no bytes then.
    error: HeliographError | None = None
    #: Tensors that share these bytes and are not released yet.
    tensors: int = 0
    #: Weights of plans in this storage, by the range of their bytes.
    weights: dict[tuple[int, int], dict[TensorHandle, None]] = field(default_factory=dict)
    #: The last command that writes, and the later ones that read, while they are not done.
    writer: CommandState | None = None
    readers: dict[CommandState, None] = field(default_factory=dict)
    #: The last join (see `ordering`), and the readers since.
    join: CommandState | None = None
    unjoined: dict[CommandState, None] = field(default_factory=dict)
    #: Counts the commands that may have written its bytes, for snapshots.
    version: int = 0
    #: True once the client has mapped it, and so may write it at any time.
    is_mapped: bool = False
    #: In the order of their bytes. They never overlap, since poisoned bytes are not poisoned again.
    poisons: list[Poison] = field(default_factory=list)

    def add_weight(self, tensor: TensorHandle) -> None:
        """Note that a tensor is the weight of a plan."""
        self.weights.setdefault(tensor.span, {})[tensor] = None

    def remove_weight(self, tensor: TensorHandle) -> None:
        """Undo `add_weight`."""
        here = self.weights.get(tensor.span, {})
        here.pop(tensor, None)
        if not here:
            self.weights.pop(tensor.span, None)

    def tell_weights(self, tensor: TensorHandle) -> None:
        """Tell the buffer that a tensor here was written, if it has weights of plans."""
        if self.weights and self.buffer is not None:
            self.buffer.written(*tensor.span)

    def poison(
        self, start: int, end: int, error: HeliographError, tensor: TensorHandle, sequence: int
    ) -> None:
        """Poison the bytes of a range. Of each byte, the error of the earliest command stays."""
        first, last = self._overlapping(start, end)
        new = Poison(start, end, error, tensor, sequence)
        made: list[Poison] = []
        for old in self.poisons[first:last]:
            made.append(replace(new, start=start, end=old.start))
            if old.sequence <= sequence:
                made.append(old)
            else:
                # Its command was cancelled in a queue before this one told that it had failed.
                begin, stop = max(old.start, new.start), min(old.end, end)
                made += [replace(old, end=begin), replace(new, start=begin, end=stop)]
                made.append(replace(old, start=stop))
            start = old.end
        made.append(replace(new, start=start))
        self.poisons[first:last] = [one for one in made if one.start < one.end]

    def heal(self, start: int, end: int) -> None:
        """Remove the poison of a range. Poisons that cross its ends keep the rest."""
        first, last = self._overlapping(start, end)
        gone = self.poisons[first:last]
        rest = [replace(one, end=start) for one in gone[:1] if one.start < start]
        rest += [replace(one, start=end) for one in gone[-1:] if one.end > end]
        self.poisons[first:last] = rest

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        """The indices of the poisons with bytes in a range: the first, and the one after the
        last."""
        first = bisect_right(self.poisons, start, key=_END)
        return first, max(first, bisect_left(self.poisons, end, key=_START))


@dataclass(slots=True, eq=False, weakref_slot=True)
class TensorHandle:
    """A tensor or a view: a layout on a storage."""

    #: Only the geometry: its buffer does not exist yet. See `placed`.
    layout: Tensor
    #: None if it was never created; then `error` is set.
    storage: HandleStorage | None = None
    #: Set at creation, if at all.
    error: HeliographError | None = None
    #: The error of its own command after the handle was known. Other tensors on the same bytes may
    #: be healthy.
    failure: HeliographError | None = None
    #: True if the device knows it. False for views, and before its creation.
    is_placed: bool = False

    def __post_init__(self) -> None:
        if self.storage is not None:
            self.storage.tensors += 1

    @property
    def type(self) -> TensorType:
        return self.layout.type

    @property
    def span(self) -> tuple[int, int]:
        """The first byte and the end in the storage. Never empty, so that empty tensors can be
        poisoned."""
        start = self.layout.offset_bytes
        return start, start + max(1, self.layout.extent_bytes)

    @property
    def placed(self) -> Tensor:
        """The tensor for a device. Only valid between the commands that create and free it."""
        assert self.storage is not None and self.storage.buffer is not None
        layout = self.layout
        return Tensor(layout.type, self.storage.buffer, layout.offset_bytes, layout.strides)

    def problem(self, sequence: float = inf) -> HeliographError | None:
        """The error for the command of this number that uses these bytes now, or None.

        Later commands may have failed before this one is done, such as those that were cancelled in
        a queue. Their poison does not count.
        """
        if self.storage is None or self.error is not None:
            return self.error
        if self.failure is not None:
            return self.failure
        if self.storage.error is not None or not self.storage.poisons:
            return self.storage.error
        (start, end), poisons = self.span, self.storage.poisons
        for place in range(bisect_right(poisons, start, key=_END), len(poisons)):
            if poisons[place].start >= end:
                break
            if poisons[place].sequence < sequence:
                return poisons[place].error
        return None

    def part(self, offset_bytes: int, size_bytes: int) -> tuple[int, int]:
        """Bytes of a contiguous tensor as a range of its storage."""
        start = self.layout.offset_bytes + offset_bytes
        return start, start + size_bytes

    def poison(self, error: HeliographError, sequence: int, part: tuple[int, int] | None = None) -> None:
        """Mark the bytes, or a part of them, as never written by a command. The first error
        stays."""
        if self.storage is not None:
            self.storage.poison(*(part or self.span), error, self, sequence)

    def heal(self, part: tuple[int, int] | None = None) -> None:
        """Heal the bytes, or a part of them, which were rewritten."""
        if self.storage is None or not self.storage.poisons:
            return
        if part is not None or self.layout.is_contiguous:
            self.storage.heal(*(part or self.span))
        else:
            # Between its elements are bytes that it did not write.
            self.storage.poisons = [one for one in self.storage.poisons if one.tensor is not self]


@dataclass(slots=True, eq=False)
class BufferHandle:
    """A buffer, or several that behave as one. The bytes live as long as any tensor on them."""

    #: One for each storage, over all its bytes as u8.
    parts: tuple[TensorHandle, ...]
    error: HeliographError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BoundLeaves:
    """Tensors of the client that are leaves of a plan, by leaf."""

    tensors: Mapping[int, TensorHandle] = field(default_factory=dict)
    weights: frozenset[int] = frozenset()
    #: The client's handle of each.
    numbers: Mapping[int, int] = field(default_factory=dict)

    @property
    def weight_tensors(self) -> tuple[TensorHandle, ...]:
        """The tensors that are weights."""
        return tuple(self.tensors[leaf] for leaf in sorted(self.weights))


NOTHING_BOUND = BoundLeaves()


def hold_leaves(
    tensors: Mapping[int, TensorHandle], weights: Set[int], numbers: Mapping[int, int]
) -> BoundLeaves:
    """Hold the bytes of tensors for a plan, independently of their own handles."""
    held = {leaf: TensorHandle(one.layout, one.storage) for leaf, one in tensors.items()}
    for leaf, one in held.items():
        if one.storage is not None and leaf in weights:
            one.storage.add_weight(one)
    return BoundLeaves(held, frozenset(weights), numbers)


def let_go_of(bound: BoundLeaves) -> None:
    """Note that the tensors are weights no longer. The caller releases them."""
    for leaf in bound.weights:
        tensor = bound.tensors[leaf]
        if tensor.storage is not None:
            tensor.storage.remove_weight(tensor)


@dataclass(slots=True, eq=False)
class ReservationHandle:
    """Memory in which plans are placed. Their runs are serial."""

    #: The runtime's object.
    reservation: Any
    slots: RunSlots = field(default_factory=RunSlots)
    error: HeliographError | None = None
    #: The request that made it, if snapshots need it.
    request: ReserveRequest | None = None
    #: The error of plans in this memory after it was reset.
    lost: HeliographError | None = None

    def end(self) -> None:
        """Note that it has left the table. Its plans can no longer be used; only their handles
        remain."""
        self.lost = UnknownHandleError(
            "the plan was in reserved memory, and the reservation was reset",
            advice="compile the graph again",
        )


@dataclass(slots=True, eq=False)
class PlanHandle:
    """A compiled plan. Its runs wait for each other according to `slots`."""

    device: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    #: Variables that the graph only reads, and those that it assigns.
    read: tuple[TensorHandle, ...]
    assigned: tuple[TensorHandle, ...]
    assigned_names: tuple[str, ...]
    #: Tensors of the client that are leaves of it; released with it.
    bound: BoundLeaves
    #: The runtime's object.
    plan: Any = None
    slots: RunSlots = field(default_factory=RunSlots)
    #: The total size of the values that each run reports to its client.
    tapped_bytes: int = 0
    #: The reservation that it is placed in, if any.
    reservation: ReservationHandle | None = None
    #: For a partition: the number of the last run. None for other plans.
    exchange_run: int | None = None
    #: For a partition: its arrivals and departures between two steps of a loop.
    loop_edges: tuple[int, int] = (0, 0)
    error: HeliographError | None = None
    #: The request that made it, if snapshots need it.
    request: CompileRequest | None = None
    #: The tensors among its leaves that are weights: each run reads them.
    weights: tuple[TensorHandle, ...] = field(init=False)
    #: The tensors of the client that a run wrote and used last, which do not overlap. They may be
    #: freed meanwhile.
    separate: tuple[tuple[ref[TensorHandle], ...], tuple[ref[TensorHandle], ...]] = ((), ())
    #: The storages of its own tensors, and those that it writes, each once; empty: not known yet.
    storages: tuple[HandleStorage, ...] = ()
    written_storages: tuple[HandleStorage, ...] = ()

    def __post_init__(self) -> None:
        self.weights = self.bound.weight_tensors

    def check_there(self) -> None:
        """Raise UnknownHandleError if the memory of its reservation was reset."""
        if self.reservation is not None and self.reservation.lost is not None:
            raise self.reservation.lost.anew()

    def end(self) -> None:
        """Note that it has left the table."""


@dataclass(slots=True, eq=False)
class StreamHandle:
    """An order of commands. Its work goes to its device queue, or to that of the device that must
    do it."""

    queue: DeviceQueue
    #: The last command with device work, and the last wait that is not over.
    tail: CommandState | None = None
    gate: CommandState | None = None
    #: Runs that only marks, and users of their tensors, wait for.
    runs: dict[CommandState, None] = field(default_factory=dict)
    #: Records that are not reached, oldest first, for `first error since the last mark`. Ordered:
    #: the first key of a plain dict is slow to find after many deletions.
    records: OrderedDict[CommandState, None] = field(default_factory=OrderedDict)
    #: The first error after the last record.
    failure: HeliographError | None = None
    error: HeliographError | None = None


@dataclass(slots=True, eq=False)
class EventHandle:
    """A mark. None: never recorded, which counts as reached."""

    mark: CommandState | None = None
    error: HeliographError | None = None


Handle: TypeAlias = TensorHandle | BufferHandle | PlanHandle | StreamHandle | EventHandle | ReservationHandle
_H = TypeVar("_H", TensorHandle, BufferHandle, PlanHandle, StreamHandle, EventHandle, ReservationHandle)

_NAMES: dict[type, str] = {
    TensorHandle: "a tensor",
    BufferHandle: "a buffer",
    PlanHandle: "a plan",
    StreamHandle: "a stream",
    EventHandle: "an event",
    ReservationHandle: "a reservation",
}


def layout(type: TensorType, offset_bytes: int = 0) -> Tensor:
    """A contiguous layout without a buffer."""
    return Tensor(type, cast(Buffer, None), offset_bytes)


def whole(storage: HandleStorage) -> TensorHandle:
    """All bytes of a storage as a tensor."""
    return TensorHandle(layout(TensorType(_BYTE, (storage.size_bytes,))), storage)


class HandleTable:
    """Handles by number, within the limits of the handshake."""

    def __init__(self, limits: Limits) -> None:
        self._handles: dict[int, Handle] = {}
        self._counts: dict[type, int] = dict.fromkeys(_NAMES, 0)
        #: Numbers that a compile reserves: in use, although no object is behind them.
        self._reserved: set[int] = set()
        # Handles that were never created do not count against the others' limits, but need memory
        # too.
        self._poisoned = 0
        self._limits: dict[type, int] = {
            TensorHandle: limits.tensors,
            BufferHandle: limits.tensors,
            PlanHandle: limits.plans,
            StreamHandle: MAX_STREAMS,
            EventHandle: limits.tensors,
            ReservationHandle: MAX_RESERVATIONS,
        }

    def __repr__(self) -> str:
        counts = ", ".join(f"{name.split()[1]}s: {self._counts[kind]}" for kind, name in _NAMES.items())
        return f"<HandleTable {counts}>"

    def __len__(self) -> int:
        return len(self._handles)

    def count(self, kind: type[Handle]) -> int:
        return self._counts[kind]

    def values(self) -> list[Handle]:
        return list(self._handles.values())

    def items(self) -> list[tuple[int, Handle]]:
        return list(self._handles.items())

    def of_kind(self, kind: type[_H]) -> dict[int, _H]:
        """The handles of a kind without an error, by number."""
        return {
            number: one
            for number, one in self._handles.items()
            if isinstance(one, kind) and one.error is None
        }

    def peek(self, number: int, kind: type[_H]) -> _H | None:
        """The handle, or None if `get` would raise."""
        found = self._handles.get(number)
        return found if isinstance(found, kind) else None

    def get(self, number: int, kind: type[_H]) -> _H:
        """Return the handle. Raises UnknownHandleError, InvalidArgumentError, or the handle's
        error."""
        found = self._handles.get(number)
        if found is None:
            raise unknown(number)
        if not isinstance(found, kind):
            raise InvalidArgumentError(
                f"handle {number} is {_NAMES[type(found)]}, but {_NAMES[kind]} is needed"
            )
        if found.error is not None:
            raise found.error.anew()
        return found

    def check_new(self, number: int, kind: type[Handle], more: int = 1) -> None:
        """Check that a handle can be created. Raises InvalidArgumentError, HandleExistsError or
        LimitExceededError."""
        if not 0 < number < SERVER_HANDLE:
            raise InvalidArgumentError(
                f"handle {number} cannot be chosen by a client",
                advice="a handle is a number from 1 to 2**63 - 1",
            )
        if number in self._handles:
            raise HandleExistsError(f"handle {number} is in use: it is {self._name(number)}")
        if number in self._reserved:
            raise HandleExistsError(f"handle {number} is in use: a plan is compiled for it")
        self.check_room(kind, more)

    def reserve(self, number: int) -> None:
        """Reserve a number for a compile."""
        self._reserved.add(number)

    def give_up(self, number: int) -> None:
        """Undo `reserve`."""
        self._reserved.discard(number)

    def check_room(self, kind: type[Handle], more: int = 1) -> None:
        """Raise LimitExceededError if there is no room for so many more handles of a kind."""
        limit = self._limits[kind]
        if self._counts[kind] + more > limit:
            raise LimitExceededError(
                f"the session has {limit:,} {_NAMES[kind].split()[1]}s, the most that this server allows",
                advice="free some of them",
            )

    def add(self, number: int, handle: Handle) -> None:
        self._handles[number] = handle
        self._counts[type(handle)] += 1

    def add_poisoned(self, number: int, handle: Handle) -> None:
        """Add a handle with an error, if its number is free and there is room."""
        taken = number in self._handles or number in self._reserved
        possible = 0 < number < SERVER_HANDLE and not taken
        if possible and self._poisoned < self._limits[TensorHandle]:
            self._handles[number] = handle
            self._poisoned += 1

    def remove(self, number: int) -> Handle:
        """Free the number. Raises UnknownHandleError, and InvalidArgumentError for a variable."""
        if number not in self._handles:
            raise unknown(number)
        if number >= SERVER_HANDLE:
            raise InvalidArgumentError(
                f"handle {number} is a variable of the session, which is freed by its name",
                advice="session.free_variable(name)",
            )
        return self.remove_any(number)

    def remove_any(self, number: int) -> Handle:
        """Free a number that is in the table, also that of a variable."""
        found = self._handles.pop(number)
        if found.error is None:
            self._counts[type(found)] -= 1
        else:
            self._poisoned -= 1
        return found

    def clear(self) -> None:
        self._handles.clear()
        self._poisoned = 0
        self._counts = dict.fromkeys(_NAMES, 0)

    def _name(self, number: int) -> str:
        return _NAMES[type(self._handles[number])]


def unknown(number: int) -> UnknownHandleError:
    """The error for an unknown number."""
    return UnknownHandleError(f"handle {number} was never created in this session, or was freed")
