"""Seeded scheduling problems, and a checker that runs a schedule on symbols instead of bytes.

Every result is a number: that of its node and its operands' results, so two runs that compute the same have
the same numbers. Memory between splits is a list of bytes' spans with the result that lies there; what is
written puts an end to all that it overlaps. No device is needed, and a schedule takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import TensorType, tensor_type
from heliograph_server.scheduler.model import Candidate, Problem, Schedule
from heliograph_server.scheduler.split_memory import (
    Moves,
    Place,
    Spans,
    SplitMove,
    ahead_of,
    moves,
    plan_between,
    returned_places,
    values_between,
)
from heliograph_server.scheduler.splits import READS_ROWS, Clock, SplitGraph, clocks, cut
from heliograph_server.scheduler.weight_homes import NOWHERE

TYPES = tuple(tensor_type("f32", shape) for shape in ((1,), (4,), (40,), (400,), (10, 40), (2, 5, 8)))
OPS = ("neg", "add", "reshape", "assign", "matmul", "rope", "mul", "add", "get_rows", "mul_mat_id")
KINDS = (LeafKind.INPUT, LeafKind.WEIGHT, LeafKind.WEIGHT, LeafKind.VARIABLE)
PLENTY = 2**40


def random_problem(seed: int) -> Problem:
    """A graph of up to 60 nodes over one to four devices: gaps, memories that are shared, or by one side
    alone, helpers, offload, pins, nodes that begin splits, and leaves that lie somewhere already. Shapes
    mean nothing here."""
    random = Random(seed)
    graph = _graph(random)
    devices = random.randint(1, 4)
    placed = {
        value: random.randrange(devices)
        for value, leaf in enumerate(graph.leaves)
        if leaf.kind is not LeafKind.INPUT and random.random() < 0.3
    }
    pins = {
        node: random.randrange(devices)
        for node in range(len(graph.nodes))
        if random.random() < random.choice((0.0, 0.1))
    }
    reads = [_reads(random, devices, place) for place in range(devices)]
    candidates = [_candidate(random, graph, place, reads[place], devices) for place in range(devices)]
    offload, share = random.random() < 0.8, random.choice((0.0, 0.0, 0.1))
    begins = frozenset(node for node in range(len(graph.nodes)) if random.random() < share)
    return Problem(graph, candidates, placed, pins, offload, begins)


def _graph(random: Random) -> Graph:
    kinds = [random.choice(KINDS) for _ in range(random.randint(1, 12))]
    leaves = tuple(
        Leaf(kind, f"{kind.value}{n}", random.choice(TYPES), bytes(32 * (kind is LeafKind.WEIGHT)))
        for n, kind in enumerate(kinds)
    )
    variables = [n for n, kind in enumerate(kinds) if kind is LeafKind.VARIABLE]
    nodes: list[Node] = []
    for number in range(random.randint(0, 60)):
        op = random.choice(OPS)
        count = len(leaves) + number
        first = (
            random.randrange(count) if random.random() < 0.4 else random.randrange(max(0, count - 6), count)
        )
        second = random.choice(variables) if variables and random.random() < 0.3 else random.randrange(count)
        operands: tuple[int, ...] = (first,) if op in ("neg", "reshape") else (first, second)
        if op in READS_ROWS:
            place, dimensions = READS_ROWS[op]
            weights = [n for n, one in enumerate(leaves) if one.type.ndim == dimensions]
            table = random.choice(weights) if weights and random.random() < 0.8 else first
            operands = (table, second, random.randrange(count))[: place + 1]
        if op == "assign":
            if not variables:
                op = "add"
            else:
                operands = random.choice(variables), first
        nodes.append(Node(op, operands, random.choice(TYPES), {}, f"node{number}"))
    values = range(len(leaves) + len(nodes))
    chosen = [random.choice(values) for _ in range(random.randint(1, 4))]
    return Graph(leaves, tuple(nodes), tuple(Output(f"y{n}", value) for n, value in enumerate(chosen)))


def _reads(random: Random, devices: int, place: int) -> frozenset[int]:
    return frozenset((place, *(other for other in range(devices) if random.random() < 0.25)))


def _candidate(random: Random, graph: Graph, place: int, reads: frozenset[int], devices: int) -> Candidate:
    gaps = 0.0 if place == devices - 1 else random.choice((0.0, 0.05, 0.5))
    lacks = random.choice(OPS) if gaps and random.random() < 0.3 else ""
    return Candidate(
        name="abcd"[place],
        refusals=["a gap" if node.op == lacks or random.random() < gaps else "" for node in graph.nodes],
        reads=reads,
        free_bytes=random.choice((PLENTY, PLENTY, 2000)) if place < devices - 1 else PLENTY,
        is_host=place == devices - 1 or random.random() < 0.2,
        helps=random.random() < 0.3,
        offloads=[random.random() < 0.2 for _ in graph.nodes] if random.random() < 0.3 else (),
    )


class Plain:
    """A device's memory as the planner asks for it."""

    alignment = 16
    max_size = 2**60

    def alloc_size(self, tensor: TensorType) -> int:
        return tensor.nbytes


class Symbols:
    """A number for every result that can be told apart."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}
        self._rows: dict[int, tuple[int, int]] = {}

    def of(self, *what: object) -> int:
        return self._known.setdefault(what, len(self._known))

    def of_rows(self, value: int, names: int) -> int:
        """Those rows of a value that another one names."""
        made = self.of("rows", value, names)
        self._rows[made] = value, names
        return made

    def rows_of(self, symbol: int) -> tuple[int, int] | None:
        """Of which value, and which ones, if it is rows alone."""
        return self._rows.get(symbol)


@dataclass
class Bytes:
    """What lies in the memory between splits of one device."""

    contents: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def write(self, span: tuple[int, int, int], symbol: int) -> None:
        """`span`: chunk, first byte, and the byte behind the last one."""
        chunk, start, end = span
        for other in [one for one in self.contents if one[0] == chunk and one[1] < end and start < one[2]]:
            del self.contents[other]
        self.contents[span] = symbol

    def read(self, span: tuple[int, int, int]) -> int:
        assert span in self.contents, "a value is read before it is written, or its memory was used again"
        return self.contents[span]


class Checker:
    """Runs a schedule in any order that its clocks allow."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.schedule = schedule
        self.ended: tuple[Clock, ...] = clocks(self.graph, schedule)
        self.spans: Spans = values_between(self.graph, schedule, self.ended)
        self.parts: tuple[SplitGraph, ...] = cut(self.graph, schedule)
        self.ahead = ahead_of(self.graph, schedule, self.ended)
        self.moves: list[Moves] = moves(
            self.graph, schedule, self.spans, (part.inputs for part in self.parts), self.ahead
        )
        self.where = dict(self._places())
        self.symbols = Symbols()

    def _places(self) -> Iterator[tuple[Place, tuple[int, int, int]]]:
        for device, spans in self.spans.items():
            arena = plan_between(self.graph, spans, Plain())
            for value, chunk, offset in zip(spans, arena.chunks, arena.offsets, strict=True):
                yield (value, device), (chunk, offset, offset + max(1, self.graph.type_of(value).nbytes))

    def check(self, random: Random) -> None:
        """Asserts all that must hold of the schedule, and that two runs have the unsplit graph's results."""
        self._check_devices()
        expected, self.nodes = interpret(self.graph, self.symbols)
        assert self._run(range(len(self.parts)), random) == expected, "in the order of the list"
        assert self._run(self._any_order(random), random) == expected, (
            "in another order that the clocks allow"
        )

    def _check_devices(self) -> None:
        nodes = [node for split in self.schedule.splits for node in split.nodes]
        assert nodes == list(range(len(self.graph.nodes))), "every node once, in order"
        for number, found in enumerate(self.schedule.assignments):
            node, device = self.graph.nodes[number], self.problem.devices[found.device]
            assert not device.refusals[number], f"node {number} runs where it cannot"
            assert self.problem.pins.get(number, found.device) == found.device, f"the pin of node {number}"
            if node.op == "assign":
                assert self.schedule.homes[node.operands[0]] in device.reads, (
                    f"node {number} writes elsewhere"
                )
        for value, home in self.problem.placed.items():
            assert self.schedule.homes[value] == home, f"leaf {value} has moved"
        for split, found, part in zip(self.schedule.splits, self.moves, self.parts, strict=True):
            reads = self.problem.devices[split.device].reads | {NOWHERE}
            where = [device for _, device in found.reads]
            where += [self.schedule.homes[value] for _, value in part.bound]
            assert reads.issuperset(where), "a device reads memory that it cannot"

    def _any_order(self, random: Random) -> Iterator[int]:
        """Splits in a random order: each when what its clock names has ended."""
        chains: dict[int, list[int]] = {}
        for number, split in enumerate(self.schedule.splits):
            chains.setdefault(split.device, []).append(number)
        ended = [-1] * (1 + max(chains, default=0))
        while chains:
            ready = [
                device
                for device, chain in chains.items()
                if all(map(int.__ge__, ended, self.ended[chain[0]]))
            ]
            device = random.choice(ready)
            number = chains[device].pop(0)
            if not chains[device]:
                del chains[device]
            yield number
            ended[device] = number

    def _run(self, order: Sequence[int] | Iterator[int], random: Random) -> list[int]:
        leaves = [self.symbols.of("leaf", value) for value in range(len(self.graph.leaves))]
        memory = {device: Bytes() for device in range(len(self.problem.devices))}

        def read(place: Place) -> int:
            value, device = place
            return memory[device].read(self.where[place]) if place in self.where else leaves[value]

        for number in order:
            found, part, device = self.moves[number], self.parts[number], self.schedule.splits[number].device
            # What is copied ahead may come first or last.
            early = len(found.ahead) if random.random() < 0.5 else 0
            for move in (*found.ahead[:early], *found.copies):
                self._copy(move, memory[device], read)
            given = [*map(read, found.reads)]
            made = self._compute(part, given, leaves)
            for place, symbol in zip(found.writes, made, strict=True):
                memory[place[1]].write(self.where[place], symbol)
            for move in found.ahead[early:]:
                self._copy(move, memory[device], read)
            after = [*map(read, found.reads)]
            assert all(map(self._keeps, given, after)), "a split writes over what it reads"
            self._check_observed(number, read)
        return [read(place) for place in returned_places(self.graph, self.schedule)]

    def _check_observed(self, number: int, read: Callable[[Place], int]) -> None:
        split = self.schedule.splits[number]
        assert self.schedule.taps.isdisjoint(split.nodes[:-1]), "observed nodes end splits"
        if (last := split.nodes[-1]) in self.schedule.taps:
            assert read((len(self.graph.leaves) + last, split.device)) == self.nodes[last], f"node {last}"

    def _copy(self, move: SplitMove, memory: Bytes, read: Callable[[Place], int]) -> None:
        """Rows alone are another symbol than all of them, unless all lie there already."""
        symbol, span = read(move.source), self.where[move.target]
        if move.rows is not None and memory.contents.get(span) != symbol:
            symbol = self.symbols.of_rows(symbol, read(move.rows))
        memory.write(span, symbol)

    def _keeps(self, before: int, after: int) -> bool:
        """Whether what lay there lies there still: the same, or all where there were rows."""
        rows = self.symbols.rows_of(before)
        return before == after or (rows is not None and rows[0] == after)

    def _compute(self, part: SplitGraph, given: Sequence[int], leaves: list[int]) -> list[int]:
        """What a part's outputs are; it assigns to the leaves that are bound to it."""
        bound = dict(part.bound)
        inputs = iter(given)
        values = [
            leaves[bound[number]] if number in bound else next(inputs)
            for number in range(len(part.graph.leaves))
        ]
        for number, node in zip(part.nodes, part.graph.nodes, strict=True):
            read = [leaves[bound[value]] if value in bound else values[value] for value in node.operands]
            rows = self.symbols.rows_of(read[0]) if node.op in READS_ROWS else None
            if rows is not None and rows[1] == read[READS_ROWS[node.op][0]]:
                # Those that it reads were copied.
                read[0] = rows[0]
            values.append(read[1] if node.op == "assign" else self.symbols.of(number, *read))
            if node.op == "assign":
                leaves[bound[node.operands[0]]] = read[1]
        return [values[output.value] for output in part.graph.outputs]


def interpret(graph: Graph, symbols: Symbols) -> tuple[list[int], list[int]]:
    """The outputs of the unsplit graph, and what each node is."""
    values = [symbols.of("leaf", value) for value in range(len(graph.leaves))]
    for number, node in enumerate(graph.nodes):
        read = [values[value] for value in node.operands]
        values.append(read[1] if node.op == "assign" else symbols.of(number, *read))
        if node.op == "assign":
            values[node.operands[0]] = read[1]
    return [values[output.value] for output in graph.outputs], values[len(graph.leaves) :]
