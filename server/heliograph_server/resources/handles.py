"""The handle table: what each handle of a session is, and whether it can be used.

    number ──▸ TensorHandle ──▸ Storage     several tensors (views, placed ones) may share one storage
               BufferHandle ──▸ TensorHandle  for each of its storages, one over all of its bytes
               PlanHandle   ──▸ Storage     of the variables and of the weights that are bound to tensors
               StreamHandle ──▸ DeviceQueue several streams never share one, except the device's own
               EventHandle  ──▸ CommandState the recorded mark
               ReservationHandle            the memory in which plans lie

A handle is alive from when the command that makes it comes until the command comes
that frees it; what it stands for lives on until the commands between them are done. A poisoned
handle holds an error: its own, when it was never made, or one on the bytes of its storage, when
the command that was to write them failed. Poison on bytes is a range, so that a view of healthy
bytes stays usable, and writing bytes anew heals them.

`buffer`, `stream` and `plan` are the runtime's own objects; nothing here looks into them.

Any thread, under the session's lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

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
from heliograph_proto.plans import Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, dtype
from heliograph_server.resources.run_slots import RunSlots

if TYPE_CHECKING:
    from heliograph_server.session.protocol.dependencies import CommandState

_START, _END = attrgetter("start"), attrgetter("end")
_BYTE = dtype("u8")

#: The most streams of a session; each may cost the device a thread.
MAX_STREAMS = 64
#: The most reservations of a session; their bytes count as the devices' memory.
MAX_RESERVATIONS = 64


@dataclass(slots=True, eq=False)
class DeviceQueue:
    """One ordered queue of a device: work submitted to it starts in the order of submission."""

    device: str
    #: Why it could not be made; its work fails with this.
    error: HeliographError | None = None
    #: The runtime's stream, and how many pieces of work it has been given that are not done.
    stream: Any = None
    queued: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Poison:
    """A range of bytes that a failed command was to write."""

    start: int
    end: int
    error: HeliographError
    tensor: TensorHandle


@dataclass(slots=True, eq=False)
class HandleStorage:
    """Bytes on a device, and who waits for whom on them."""

    size_bytes: int
    device: str
    #: The runtime's buffer; None before it was allocated and after it was released.
    buffer: Any = None
    #: How its bytes are made: a name of the device's; empty: the default.
    buffer_type: str = ""
    usage: Usage = Usage.ANY
    #: Whether its bytes count as its tenant's.
    is_charged: bool = False
    #: In one process only: the bytes that it is made of.
    memory: memoryview | None = None
    #: The sequence number of the command that allocates it; 0 for a variable.
    maker: int = 0
    #: Why there are no bytes at all: that command failed.
    error: HeliographError | None = None
    #: Tensors that share these bytes and were not released yet.
    tensors: int = 0
    #: Weights of plans that lie here: nobody may write there.
    frozen: dict[TensorHandle, None] = field(default_factory=dict)
    #: Their bytes as ranges that do not touch, in order; None: to be made anew.
    frozen_ranges: list[tuple[int, int]] | None = None
    #: Those of each range.
    frozen_at: dict[tuple[int, int], dict[TensorHandle, None]] = field(default_factory=dict)
    #: The last command that writes, and those after it that read, while they are not done.
    writer: CommandState | None = None
    readers: dict[CommandState, None] = field(default_factory=dict)
    #: The last join (see `ordering`), and the readers since.
    join: CommandState | None = None
    unjoined: dict[CommandState, None] = field(default_factory=dict)
    #: In the order of their bytes; they never overlap, since what is poisoned is not poisoned again.
    poisons: list[Poison] = field(default_factory=list)

    def freeze(self, tensor: TensorHandle) -> None:
        """From now on nobody may write those bytes."""
        self.frozen[tensor], self.frozen_ranges = None, None
        self.frozen_at.setdefault(tensor.span, {})[tensor] = None

    def thaw(self, tensor: TensorHandle) -> None:
        """Undoes `freeze`."""
        self.frozen.pop(tensor, None)
        self.frozen_ranges = None
        here = self.frozen_at.get(tensor.span, {})
        here.pop(tensor, None)
        if not here:
            self.frozen_at.pop(tensor.span, None)

    def is_frozen(self, start: int, end: int) -> bool:
        """Whether any byte of a range is a weight of a plan. log n, after each change n log n once."""
        if self.frozen_ranges is None:
            self.frozen_ranges = merged(one.span for one in self.frozen if one.layout.extent_bytes)
        place = bisect_right(self.frozen_ranges, start, key=itemgetter(1))
        return place < len(self.frozen_ranges) and self.frozen_ranges[place][0] < end

    def poison(self, start: int, end: int, error: HeliographError, tensor: TensorHandle) -> None:
        """Marks those bytes of a range that are not poisoned yet; the first error stays."""
        first, last = self._overlapping(start, end)
        made: list[Poison] = []
        for old in self.poisons[first:last]:
            if start < old.start:
                made.append(Poison(start, old.start, error, tensor))
            made.append(old)
            start = old.end
        if start < end:
            made.append(Poison(start, end, error, tensor))
        self.poisons[first:last] = made

    def heal(self, start: int, end: int) -> None:
        """Takes the poison off a range; what reaches over its edges keeps its rest."""
        first, last = self._overlapping(start, end)
        gone = self.poisons[first:last]
        rest = [replace(one, end=start) for one in gone[:1] if one.start < start]
        rest += [replace(one, start=end) for one in gone[-1:] if one.end > end]
        self.poisons[first:last] = rest

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        """The places of the poisons that have bytes of a range: from the first to behind the last."""
        first = bisect_right(self.poisons, start, key=_END)
        return first, max(first, bisect_left(self.poisons, end, key=_START))


@dataclass(slots=True, eq=False)
class TensorHandle:
    """A tensor or a view: a layout on a storage."""

    #: Geometry alone: its buffer is not there yet. See `placed`.
    layout: Tensor
    #: None if it was never made; then `error` says why.
    storage: HandleStorage | None = None
    #: Given when it is made, if at all.
    error: HeliographError | None = None
    #: Why its own command failed after the handle was known; others on the same bytes may be healthy.
    failure: HeliographError | None = None
    #: Whether the device knows of it: it does not of views, nor before it was made.
    is_placed: bool = False

    def __post_init__(self) -> None:
        if self.storage is not None:
            self.storage.tensors += 1

    @property
    def type(self) -> TensorType:
        return self.layout.type

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end in the storage; never empty, so that empty tensors can be poisoned."""
        start = self.layout.offset_bytes
        return start, start + max(1, self.layout.extent_bytes)

    @property
    def placed(self) -> Tensor:
        """The tensor for a device. Only between the commands that made and freed it."""
        assert self.storage is not None and self.storage.buffer is not None
        layout = self.layout
        return Tensor(layout.type, self.storage.buffer, layout.offset_bytes, layout.strides)

    def problem(self) -> HeliographError | None:
        """The error that whoever uses these bytes now must fail with."""
        if self.storage is None or self.error is not None:
            return self.error
        if self.failure is not None:
            return self.failure
        if self.storage.error is not None or not self.storage.poisons:
            return self.storage.error
        (start, end), poisons = self.span, self.storage.poisons
        # The first that ends behind our start; whether it begins before our end.
        place = bisect_right(poisons, start, key=_END)
        return poisons[place].error if place < len(poisons) and poisons[place].start < end else None

    def part(self, offset_bytes: int, size_bytes: int) -> tuple[int, int]:
        """Bytes of a contiguous tensor as a range of its storage."""
        start = self.layout.offset_bytes + offset_bytes
        return start, start + size_bytes

    def poison(self, error: HeliographError, part: tuple[int, int] | None = None) -> None:
        """Marks the bytes, or a part of them, as never written; the first error stays."""
        if self.storage is not None:
            self.storage.poison(*(part or self.span), error, self)

    def heal(self, part: tuple[int, int] | None = None) -> None:
        """Called when all of its bytes, or a part of them, were written anew."""
        if self.storage is None or not self.storage.poisons:
            return
        if part is not None or self.layout.is_contiguous:
            self.storage.heal(*(part or self.span))
        else:
            # Between its elements are bytes that it did not write.
            self.storage.poisons = [one for one in self.storage.poisons if one.tensor is not self]


@dataclass(slots=True, eq=False)
class BufferHandle:
    """A buffer, or several that behave as one. Its bytes live as long as any tensor that lies there."""

    #: Each over all bytes of one storage, as unsigned bytes.
    parts: tuple[TensorHandle, ...]
    error: HeliographError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BoundLeaves:
    """Tensors of the client that are leaves of a plan, by leaf; those of `weights` are frozen."""

    tensors: Mapping[int, TensorHandle] = field(default_factory=dict)
    weights: frozenset[int] = frozenset()
    #: Under which handle the client knows each.
    numbers: Mapping[int, int] = field(default_factory=dict)


NOTHING_BOUND = BoundLeaves()


def hold_leaves(
    tensors: Mapping[int, TensorHandle], weights: Set[int], numbers: Mapping[int, int]
) -> BoundLeaves:
    """Holds the bytes of tensors for a plan, whatever becomes of their own handles."""
    held = {leaf: TensorHandle(one.layout, one.storage) for leaf, one in tensors.items()}
    for leaf, one in held.items():
        if one.storage is not None and leaf in weights:
            one.storage.freeze(one)
    return BoundLeaves(held, frozenset(weights), numbers)


def let_go_of(bound: BoundLeaves) -> None:
    """Thaws the weights; the tensors themselves are to be released."""
    for leaf in bound.weights:
        tensor = bound.tensors[leaf]
        if tensor.storage is not None:
            tensor.storage.thaw(tensor)


@dataclass(slots=True, eq=False)
class ReservationHandle:
    """Memory in which plans lie, whose runs are serial."""

    #: The runtime's.
    reservation: Any
    slots: RunSlots = field(default_factory=RunSlots)
    error: HeliographError | None = None
    #: Why the plans that lie there can run no more: it was reset.
    lost: HeliographError | None = None

    def end(self) -> None:
        """It is in the table no more: so are the plans that lie there, but for their numbers."""
        self.lost = UnknownHandleError(
            "the plan lay in memory that was reserved, and the reservation was reset",
            advice="compile the graph again",
        )


@dataclass(slots=True, eq=False)
class PlanHandle:
    """A compiled plan. Its runs wait for each other as `slots` says."""

    device: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    #: Variables that the graph reads only, and those that it assigns.
    read: tuple[TensorHandle, ...]
    assigned: tuple[TensorHandle, ...]
    #: Tensors of the client that are leaves of it; released with it.
    bound: BoundLeaves
    #: The runtime's.
    plan: Any = None
    slots: RunSlots = field(default_factory=RunSlots)
    #: The values that each run tells of, all together.
    tapped_bytes: int = 0
    #: In whose memory it lies, if so.
    reservation: ReservationHandle | None = None
    #: Of a partition: the number of the last run; None: it is none.
    exchange_run: int | None = None
    error: HeliographError | None = None

    def check_there(self) -> None:
        """Raises UnknownHandleError for one whose memory went."""
        if self.reservation is not None and self.reservation.lost is not None:
            raise self.reservation.lost

    def end(self) -> None:
        """It is in the table no more."""


@dataclass(slots=True, eq=False)
class StreamHandle:
    """An order of commands. Its work goes to its device queue, or to that of the device that must do it."""

    queue: DeviceQueue
    #: The last command that does device work, and the last wait that is not over.
    tail: CommandState | None = None
    gate: CommandState | None = None
    #: Runs that nothing of the stream waits for but marks, and what uses their tensors.
    runs: dict[CommandState, None] = field(default_factory=dict)
    #: Records that are not reached, oldest first, for `first error since the last mark`. Ordered: the
    #: first of a plain dict is slow to find once many before it are gone.
    records: OrderedDict[CommandState, None] = field(default_factory=OrderedDict)
    #: The first error after the last of them.
    failure: HeliographError | None = None
    error: HeliographError | None = None


@dataclass(slots=True, eq=False)
class EventHandle:
    """A mark; None: never recorded, which counts as reached."""

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


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges as few that do not touch, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def layout(type: TensorType, offset_bytes: int = 0) -> Tensor:
    """A contiguous layout without a buffer."""
    return Tensor(type, cast(Buffer, None), offset_bytes)


def whole(storage: HandleStorage) -> TensorHandle:
    """All bytes of a storage as a tensor."""
    return TensorHandle(layout(TensorType(_BYTE, (storage.size_bytes,))), storage)


class HandleTable:
    """Numbers to handles, within the limits of the handshake."""

    def __init__(self, limits: Limits) -> None:
        self._handles: dict[int, Handle] = {}
        self._counts: dict[type, int] = dict.fromkeys(_NAMES, 0)
        #: Numbers that a compile holds: in use, though nothing stands behind them yet or any more.
        self._reserved: set[int] = set()
        # Handles that were never made take no room from the others, but need memory all the same.
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

    def peek(self, number: int, kind: type[_H]) -> _H | None:
        """The handle, or None where `get` would refuse it."""
        found = self._handles.get(number)
        return found if isinstance(found, kind) else None

    def get(self, number: int, kind: type[_H]) -> _H:
        """The handle. Raises UnknownHandleError, InvalidArgumentError, or the error it holds."""
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
        """Raises InvalidArgumentError, HandleExistsError or LimitExceededError."""
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
        """Holds a number that nothing stands behind."""
        self._reserved.add(number)

    def give_up(self, number: int) -> None:
        """Undoes `reserve`."""
        self._reserved.discard(number)

    def check_room(self, kind: type[Handle], more: int = 1) -> None:
        """Raises LimitExceededError."""
        limit = self._limits[kind]
        if self._counts[kind] + more > limit:
            raise LimitExceededError(
                f"the session has {limit:,} {_NAMES[kind].split()[1]}s, the most that this server takes",
                advice="free some",
            )

    def add(self, number: int, handle: Handle) -> None:
        self._handles[number] = handle
        self._counts[type(handle)] += 1

    def add_poisoned(self, number: int, handle: Handle) -> None:
        """Adds a handle that holds an error, if its number is free and there is room for it."""
        taken = number in self._handles or number in self._reserved
        possible = 0 < number < SERVER_HANDLE and not taken
        if possible and self._poisoned < self._limits[TensorHandle]:
            self._handles[number] = handle
            self._poisoned += 1

    def remove(self, number: int) -> Handle:
        """Frees the number. Raises UnknownHandleError, and InvalidArgumentError for a variable's."""
        if number not in self._handles:
            raise unknown(number)
        if number >= SERVER_HANDLE:
            raise InvalidArgumentError("a variable lives as long as its session and cannot be freed")
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
    """The error for a number that is no handle."""
    return UnknownHandleError(f"handle {number} was never made in this session, or was freed")
