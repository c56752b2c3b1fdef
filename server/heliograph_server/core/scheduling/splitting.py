"""From assignments to splits: runs of nodes on one device, and what is copied before each."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling.model import Assignment, Copy, Problem, Schedule, Split


def split(problem: Problem, homes: Sequence[int], assignments: Sequence[Assignment]) -> Schedule:
    """A new split wherever the device changes. Copies are of values in memory that the device cannot read."""
    graph = problem.graph
    runs = _runs(assignments)
    part_of = {number: part for part, numbers in enumerate(runs) for number in numbers}
    needed = _needed_later(graph, part_of)
    there: set[tuple[int, int]] = set()
    splits = tuple(
        _split(problem, homes, assignments, numbers, needed[part], there) for part, numbers in enumerate(runs)
    )
    return Schedule(splits, tuple(assignments), tuple(homes))


def _runs(assignments: Sequence[Assignment]) -> list[list[int]]:
    runs: list[list[int]] = []
    device = -1
    for number, found in enumerate(assignments):
        if found.device != device:
            runs.append([])
            device = found.device
        runs[-1].append(number)
    return runs


def _needed_later(graph: Graph, part_of: dict[int, int]) -> list[dict[int, None]]:
    """For each part, the results that another part or the graph's caller reads, in order."""
    leaves = len(graph.leaves)
    found: list[dict[int, None]] = [{} for _ in range(1 + max(part_of.values(), default=0))]
    for number, node in enumerate(graph.nodes):
        for value in node.operands:
            if value >= leaves and part_of[value - leaves] != part_of[number]:
                found[part_of[value - leaves]][value] = None
    for output in graph.outputs:
        if output.value >= leaves:
            found[part_of[output.value - leaves]][output.value] = None
    return found


def _split(
    problem: Problem,
    homes: Sequence[int],
    assignments: Sequence[Assignment],
    numbers: Sequence[int],
    needed: dict[int, None],
    there: set[tuple[int, int]],
) -> Split:
    """`there`: values and the devices that earlier splits copied them to."""
    graph = problem.graph
    leaves = len(graph.leaves)
    device = assignments[numbers[0]].device
    own = {leaves + number for number in numbers}
    read = dict.fromkeys(v for number in numbers for v in graph.nodes[number].operands if v not in own)
    copies = []
    for value in read:
        where = homes[value] if value < leaves else assignments[value - leaves].device
        if where >= 0 and where not in problem.devices[device].reads and (value, device) not in there:
            if not _changes(graph, value):
                there.add((value, device))
            copies.append(Copy(value, where, device, graph.type_of(value).nbytes))
    return Split(device, tuple(numbers), tuple(copies), tuple(read), tuple(sorted(needed)))


def _changes(graph: Graph, value: int) -> bool:
    """Whether a value may be another one later in the run: variables are assigned to."""
    return value < len(graph.leaves) and graph.leaves[value].kind is LeafKind.VARIABLE
