"""A loop over several hosts as a loop for each of its partitions, which exchange values between two
steps. Pure.

    host a: step 0 ──────▸ step 1 ──────▸ ...   within a step: the plan's edges
              │  ▲            │  ▲              between two: outputs that the next step takes,
              ▼  │            ▼  │              and whether one follows, on the loop's edges
    host b:   step 0 ──────▸  step 1 ──▸ ...

The partition that makes the output that ends the loop decides whether a step follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from heliograph_proto.commands import MAX_TOLD_BYTES, Carry, Loop, LoopExchange
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import TensorType
from heliograph_server.scheduler.partitions import PartitionGraph, Partitions

#: The most hosts of a loop whose steps go on without the head, and the most edges from one to
#: another. All pairs have edges.
MOST_HOSTS = 8
MOST_EDGES = 64


@dataclass(frozen=True, slots=True)
class PairEdges:
    """The edges from one partition to another: the places of the first departure and of the first
    arrival, and the number of edges."""

    departure: int
    arrival: int
    count: int


def edges_between(found: Partitions) -> dict[tuple[int, int], int]:
    """Return the number of edges from each partition to each other one: one for each input of the
    other one that can take an output, and one more."""
    if not 1 < len(found.pieces) <= MOST_HOSTS:
        return {}
    given = [_output_types(one) for one in found.pieces]
    taken = [_input_types(found, place) for place in range(len(found.pieces))]
    places = range(len(found.pieces))
    return {
        (source, target): 1 + min(MOST_EDGES - 1, sum(type in given[source] for type in taken[target]))
        for source in places
        for target in places
        if source != target
    }


def _output_types(piece: PartitionGraph) -> set[TensorType]:
    ports = piece.graph.outputs[: len(piece.outputs)]
    return {piece.graph.type_of(one.value) for one in ports}


def _input_types(found: Partitions, place: int) -> list[TensorType]:
    arriving = {one.leaf for one in found.crossings if one.target == place}
    leaves = enumerate(found.pieces[place].graph.leaves)
    return [one.type for n, one in leaves if one.kind is LeafKind.INPUT and n not in arriving]


@dataclass(slots=True)
class _Draft:
    """The loop of one partition under construction."""

    carries: list[Carry] = field(default_factory=list)
    gives: list[tuple[int, int]] = field(default_factory=list)
    takes: list[tuple[int, int]] = field(default_factory=list)
    tells: list[int] = field(default_factory=list)
    told: int | None = None
    signals: list[int] = field(default_factory=list)
    awaits: list[int] = field(default_factory=list)
    tells_with: list[tuple[int, int]] = field(default_factory=list)
    told_with: list[int] = field(default_factory=list)
    #: The bytes that come with what it is told.
    told_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoopParts:
    """The loops of the partitions of a plan, in their order."""

    loops: tuple[Loop, ...]
    #: The partition that decides whether a step follows.
    decides: int
    #: The partitions of the streamed outputs, in the order of `Loop.taps`.
    tapped: tuple[int, ...]
    #: Pairs of partitions whose second receives something of the first.
    pairs: tuple[tuple[int, int], ...]
    #: For each partition: the inputs that feeds replace, in the whole plan and in its own.
    fed: tuple[tuple[tuple[int, int], ...], ...] = ()

    def is_alike(self, other: LoopParts) -> bool:
        """True if the partitions exchange the same between two steps in both loops."""
        ours, theirs = ([one.exchange for one in parts.loops] for parts in (self, other))
        return ours == theirs


def parts_of(
    loop: Loop, found: Partitions, edges: Mapping[tuple[int, int], PairEdges], inputs: Sequence[int]
) -> LoopParts | None:
    """Return the parts of a loop. `inputs` are the values of the plan's inputs. None: the head must
    run each step."""
    if len(edges) < len(found.pieces) * (len(found.pieces) - 1):
        return None
    makers = {output: place for place, one in enumerate(found.pieces) for output in one.outputs}
    used = {*(one.output for one in loop.carries), *loop.taps, *(() if loop.until is None else (loop.until,))}
    if not used <= makers.keys():
        # An output that is a leaf is made nowhere.
        return None
    return _Cut(loop, found, edges, inputs, makers).parts()


class _Cut:
    """A loop while it is cut."""

    def __init__(
        self,
        loop: Loop,
        found: Partitions,
        edges: Mapping[tuple[int, int], PairEdges],
        inputs: Sequence[int],
        makers: Mapping[int, int],
    ) -> None:
        self._loop, self._found, self._edges, self._inputs = loop, found, edges, inputs
        self._makers = makers
        self._drafts = [_Draft() for _ in found.pieces]
        self._count = Counter[tuple[int, int]]()
        #: The departures that tell other partitions, by these.
        self._telling = dict[int, int]()

    def parts(self) -> LoopParts | None:
        loop, makers = self._loop, self._makers
        decides = 0 if loop.until is None else makers[loop.until]
        others = [place for place in range(len(self._drafts)) if place != decides]
        for other in others:
            departure, self._drafts[other].told = self._next(decides, other)
            self._drafts[decides].tells.append(departure)
            self._telling[other] = departure
        for carry in loop.carries:
            if not self._carry(carry, decides):
                return None
        for other in others:
            # Without a way back it could fall behind without end.
            if decides not in self._reached_from(other):
                departure, arrival = self._next(other, decides)
                self._drafts[other].signals.append(departure)
                self._drafts[decides].awaits.append(arrival)
        return LoopParts(
            tuple(self._part(place, decides) for place in range(len(self._drafts))),
            decides,
            tuple(makers[one] for one in loop.taps),
            tuple(self._count),
            tuple(self._fed(place) for place in range(len(self._drafts))),
        )

    def _fed(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return the fed inputs of a partition: their places in the whole plan, and in its own."""
        own = self._found.pieces[place].inputs
        pairs = ((one, self._inputs[one]) for one in self._loop.fed_inputs)
        return tuple((one, own.index(value)) for one, value in pairs if value in own)

    def _next(self, source: int, target: int) -> tuple[int, int]:
        """Return the next free departure and arrival between two partitions."""
        pair, number = self._edges[source, target], self._count[source, target]
        self._count[source, target] += 1
        return pair.departure + number, pair.arrival + number

    def _carry(self, carry: Carry, decides: int) -> bool:
        """Carry an output to each partition with the input. False if there are too few edges."""
        source, value = self._makers[carry.output], self._inputs[carry.input]
        output = self._found.pieces[source].outputs.index(carry.output)
        for target, piece in enumerate(self._found.pieces):
            if value not in piece.inputs:
                continue
            place = piece.inputs.index(value)
            if target == source:
                self._drafts[source].carries.append(Carry(output, place))
            elif source == decides and self._tells_with(source, target, output, place):
                continue
            # The one that decides may also have to wait for a byte of each other one.
            elif self._count[source, target] < self._edges[source, target].count - (target == decides):
                departure, arrival = self._next(source, target)
                self._drafts[source].gives.append((departure, output))
                self._drafts[target].takes.append((arrival, place))
            else:
                return False
        return True

    def _tells_with(self, decides: int, target: int, output: int, place: int) -> bool:
        """Carry an output of the partition that decides with what it tells another one. False if it
        is too large for that."""
        graph, draft = self._found.pieces[decides].graph, self._drafts[target]
        size = graph.type_of(graph.outputs[output].value).nbytes
        if draft.told_bytes + size > MAX_TOLD_BYTES:
            return False
        draft.told_bytes += size
        draft.told_with.append(place)
        self._drafts[decides].tells_with.append((self._telling[target], output))
        return True

    def _reached_from(self, place: int) -> set[int]:
        """Return the partitions that wait, step by step, for what a partition makes."""
        ways = {(one.source, one.target) for one in self._found.crossings} | set(self._count)
        found, new = {place}, [place]
        while new:
            source = new.pop()
            after = {target for one, target in ways if one == source} - found
            found |= after
            new += after
        return found

    def _part(self, place: int, decides: int) -> Loop:
        draft, outputs, loop = self._drafts[place], self._found.pieces[place].outputs, self._loop
        until = outputs.index(loop.until) if loop.until is not None and place == decides else None
        exchange = LoopExchange(
            tuple(draft.gives),
            tuple(draft.takes),
            tuple(draft.tells),
            draft.told,
            tuple(draft.signals),
            tuple(draft.awaits),
            fed=bool(loop.fed_inputs),
            tells_with=tuple(draft.tells_with),
            told_with=tuple(draft.told_with),
        )
        taps = tuple(outputs.index(one) for one in loop.taps if self._makers[one] == place)
        return replace(
            loop,
            carries=tuple(draft.carries),
            until=until,
            taps=taps,
            fed_inputs=tuple(own for _, own in self._fed(place)),
            exchange=exchange,
            # One count is enough.
            counts_steps=place == decides,
        )
