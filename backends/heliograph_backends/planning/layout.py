"""The place of each value: storage of its own, or a view of another value's storage.

A view op shares its source's bytes when strides can express it. It becomes a copy in three cases:

- a reshape that strides cannot express;
- a view with gaps whose elements are added up;
- a view of a variable to which a later node assigns: it keeps the value read before.

The result of an assignment lies in the variable itself, unless it is read and the variable is
assigned to again later. An assigned value is computed directly in the variable where the result is
the same, also through reshapes. A cache of keys and values that rows are set into is therefore
neither copied nor held twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from heliograph_proto.graph import Graph, Node
from heliograph_proto.ops.table import OPS
from heliograph_proto.pace import in_turns
from heliograph_proto.types import TensorType

Strides = tuple[int, ...]


#: Ops whose result may share the first operand's bytes.
VIEWS = frozenset(name for name, row in OPS.items() if row.is_view)
#: Ops without operands, whose results are computed once, when a plan is made.
SOURCES = frozenset(name for name, row in OPS.items() if row.group == "source")
#: Ops whose last bits depend on the order in which elements are added up.
SUMS = frozenset(
    name for name, row in OPS.items() if row.group in ("rows", "reduction") and row.tolerance > 0
) - {"rope", "rope_back", "timestep_embedding"}


class ValuePlace(NamedTuple):
    """The location of a value's bytes; `root` is the value that owns the storage."""

    root: int
    offset_bytes: int
    strides: Strides


def value_types(graph: Graph) -> list[TensorType]:
    """Return the type of every value, leaves first."""
    return [leaf.type for leaf in graph.leaves] + [node.type for node in graph.nodes]


def place_values(graph: Graph, *, direct: bool = True) -> tuple[ValuePlace, ...]:
    """Return the place of every value, leaves first. A value whose root is its own number owns
    storage.

    With `direct`, results may be computed in the variables that they are assigned to. This is wrong
    if another leaf lies in the same memory.
    """
    assigned = last_assignments(graph)
    read = read_values(graph) if assigned else frozenset()
    written, reshaped = direct_writes(graph) if assigned and direct else ({}, frozenset())
    types = value_types(graph)
    summed = summed_values(graph)
    places = [ValuePlace(value, 0, leaf.type.strides) for value, leaf in enumerate(graph.leaves)]
    for value, node in enumerate(in_turns(graph.nodes), len(places)):
        place = None
        if node.op in VIEWS:
            source = places[node.operands[0]]
            if value in reshaped or assigned.get(source.root, -1) < value - len(graph.leaves):
                place = view(node.op, node.attributes, types[node.operands[0]], node.type, source)
            if place is not None and value in summed and not in_one_piece(node.type, place.strides):
                place = None
        elif node.op == "assign":
            last = assigned[node.operands[0]] == value - len(graph.leaves)
            place = places[node.operands[0]] if last or value not in read else None
        elif value in written:
            place = ValuePlace(written[value], 0, node.type.strides)
        places.append(place or ValuePlace(value, 0, node.type.strides))
    return tuple(places)


def summed_values(graph: Graph) -> frozenset[int]:
    """Return the values read by ops that add up elements.

    The order of the additions, and with it the last bits of the sum, depends on the strides. Views
    with gaps are therefore copied for these ops, so that equal values have equal sums.
    """
    return frozenset(value for node in graph.nodes if node.op in SUMS for value in node.operands)


def in_one_piece(type: TensorType, strides: Strides) -> bool:
    """True if elements lie in row-major order without gaps."""
    pairs = zip(type.shape, strides, type.strides, strict=True)
    return type.size == 0 or all(size == 1 or mine == plain for size, mine, plain in pairs)


def direct_writes(graph: Graph) -> tuple[dict[int, int], frozenset[int]]:
    """Map each result that is computed in the variable that it is assigned to, to that variable.

    Only the assignment reads such a result and assigns to the variable, no node between the
    result's and the assignment reads the variable, and the result's own node reads it in place or
    not at all. The variable may have another shape: reshapes before and after the node, which
    nothing else reads, are returned too.
    """
    assignments = [(number, *node.operands) for number, node in enumerate(graph.nodes) if node.op == "assign"]
    uses = Counter(value for node in graph.nodes for value in node.operands)
    uses.update(output.value for output in graph.outputs)
    times = Counter(variable for _, variable, _ in assignments)
    variable_of = _aliases(graph, times)
    readers: dict[int, list[int]] = {variable: [] for variable in times}
    for number, node in enumerate(graph.nodes):
        for variable in {variable_of[value] for value in node.operands if value in variable_of}:
            readers[variable].append(number)
    found, reshaped = {}, set[int]()
    for number, variable, assigned in assignments:
        after = _reshapes(graph, assigned, uses)
        value = after[-1]
        made = value - len(graph.leaves)
        if made < 0 or uses[value] != 1 or times[variable] != 1 or not _makes(graph.nodes[made].op):
            continue
        node = graph.nodes[made]
        before = [_reshapes(graph, one, uses) for one in node.operands if variable_of.get(one) == variable]
        between = any(made < reader < number for reader in readers[variable])
        if not between and _may_write_over(node, variable, variable_of, {one[0]: one[-1] for one in before}):
            found[value] = variable
            reshaped.update(one for chain in (after, *before) for one in chain[:-1])
    return found, frozenset(reshaped)


def _reshapes(graph: Graph, value: int, uses: Mapping[int, int]) -> list[int]:
    """Return a value and those that it is a reshape of, as far as each is read once."""
    found, leaves = [value], len(graph.leaves)
    while value >= leaves and graph.nodes[value - leaves].op == "reshape" and uses[value] == 1:
        value = graph.nodes[value - leaves].operands[0]
        found.append(value)
    return found


def is_step(graph: Graph, places: Sequence[ValuePlace], number: int) -> bool:
    """True if a node moves or computes data; some views and the assignments of direct writes do
    not."""
    node, leaves = graph.nodes[number], len(graph.leaves)
    if node.op in VIEWS:
        return places[leaves + number].root == leaves + number
    return node.op != "assign" or not is_direct(graph, places, node.operands[1])


def is_direct(graph: Graph, places: Sequence[ValuePlace], value: int) -> bool:
    """True if a value is a direct write, or a reshape of one."""
    leaves = len(graph.leaves)
    while value >= leaves and graph.nodes[value - leaves].op == "reshape":
        value = graph.nodes[value - leaves].operands[0]
    made, root = value - leaves, places[value].root
    return made >= 0 and root != value and _makes(graph.nodes[made].op)


def _makes(op: str) -> bool:
    """True if an op computes new elements in every run."""
    return op not in VIEWS and op != "assign" and op not in SOURCES


def _aliases(graph: Graph, variables: Container[int]) -> dict[int, int]:
    """Map each value that is a variable, or may be a view of one, to that variable."""
    found = {value: value for value in range(len(graph.leaves)) if value in variables}
    for value, node in enumerate(graph.nodes, len(graph.leaves)):
        if (node.op in VIEWS or node.op == "assign") and node.operands[0] in found:
            found[value] = found[node.operands[0]]
    return found


def _may_write_over(
    node: Node, variable: int, variable_of: Mapping[int, int], whole: Mapping[int, int]
) -> bool:
    """True if a node's own reads allow its result to be written over a variable.

    `whole`: the values that its operands are reshapes of.
    """
    reads = [place for place, value in enumerate(node.operands) if variable_of.get(value) == variable]
    if any(whole[node.operands[place]] != variable for place in reads):
        return False
    row = OPS[node.op]
    return not reads or (reads[0] in row.in_place and (len(reads) == 1 or row.group == "elementwise"))


def read_values(graph: Graph) -> frozenset[int]:
    """Return every value that is an operand or an output."""
    operands = (value for node in graph.nodes for value in node.operands)
    return frozenset(operands) | {output.value for output in graph.outputs}


def last_assignments(graph: Graph) -> dict[int, int]:
    """Map each variable that is assigned to, by value number, to the last node that assigns to
    it."""
    return {node.operands[0]: number for number, node in enumerate(graph.nodes) if node.op == "assign"}


def view(
    op: str, attributes: Mapping[str, Any], source: TensorType, result: TensorType, place: ValuePlace
) -> ValuePlace | None:
    """Return the place of a view op's result in its source's storage; None if strides cannot
    express it."""
    strides: Strides | None
    offset = place.offset_bytes
    match op:
        case "reshape":
            whole = place.strides == source.strides and result.size
            shapes = source.block_shape, result.block_shape
            strides = result.strides if whole else reshape_strides(shapes[0], place.strides, shapes[1])
        case "permute":
            strides = tuple(place.strides[axis] for axis in attributes["axes"])
        case "broadcast_to":
            strides = broadcast_strides(source.block_shape, place.strides, result.block_shape)
        case _:
            starts, steps = list(attributes["start"]), attributes["step"]
            if source.dtype.block_size > 1:
                starts[-1] //= source.dtype.block_size
            offset += sum(a * b for a, b in zip(starts, place.strides, strict=True))
            # With a single element the step may be any number, and its stride may exceed 64 bits.
            triples = zip(result.block_shape, steps, place.strides, strict=True)
            strides = tuple(stride * (step if size > 1 else 1) for size, step, stride in triples)
    return None if strides is None else ValuePlace(place.root, offset if result.size else 0, strides)


def broadcast_strides(shape: tuple[int, ...], strides: Strides, target: tuple[int, ...]) -> Strides:
    """Return strides that read a tensor as the target shape; 0 along repeated dimensions."""
    extra = len(target) - len(shape)
    kept = (0 if size == 1 else step for size, step in zip(shape, strides, strict=True))
    return (0,) * extra + tuple(kept)


def reshape_strides(shape: tuple[int, ...], strides: Strides, target: tuple[int, ...]) -> Strides | None:
    """Return the strides of a reshape that moves no data; None if there are none.

    Both shapes are cut into runs of dimensions with equal products. Within a run the old dimensions
    must be contiguous among themselves; the new ones are laid out over them.
    """
    if 0 in target:
        return (0,) * len(target)
    old = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    result: list[int] = []
    new = list(target)
    while new:
        if new[0] == 1:
            new.pop(0)
            result.append(0)
            continue
        run = _take_run(old, new)
        if run is None:
            return None
        result.extend(run)
    return tuple(result)


def _take_run(old: list[tuple[int, int]], new: list[int]) -> list[int] | None:
    """Take the shortest runs of equal products off both lists; return the new run's strides or
    None."""
    old_run, new_run = [old.pop(0)], [new.pop(0)]
    while (have := math.prod(size for size, _ in old_run)) != (want := math.prod(new_run)):
        if have < want:
            old_run.append(old.pop(0))
        else:
            new_run.append(new.pop(0))
    for (_, outer_step), (size, step) in zip(old_run, old_run[1:], strict=False):
        if outer_step != size * step:
            return None
    strides, step = [], old_run[-1][1]
    for size in reversed(new_run):
        strides.append(step)
        step *= size
    return strides[::-1]
