"""The weights that a plan reads in a form: those that only products read, all in one form.

f32 matrices are packed in panels, other weights and experts lie in groups of rows. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod

from heliograph_backends.cpu.kernels import PackedForm, RowGroups, WeightForm
from heliograph_backends.cpu.kernels.program.stored_types import FORMS, GROUP_ROWS
from heliograph_backends.cpu.lowering.products import STORED
from heliograph_backends.cpu.lowering.windows import is_direct, is_product
from heliograph_backends.planning.groups import Group, Role
from heliograph_backends.planning.layout import ValuePlace
from heliograph_backends.planning.storage import is_weight
from heliograph_proto.graph import Graph, Node
from heliograph_proto.types import F32, TensorType, contiguous_strides

#: The operand of each product that may have a form.
RIGHT_SIDES = {"matmul": 1, "mul_mat": 0, "mul_mat_id": 0}
#: f32 and floats of 16 bits have no blocks: whole vectors of them are multiplied at once.
_LEAST_DEPTH = 16


def packed_forms(
    graph: Graph,
    places: Sequence[ValuePlace],
    groups: Sequence[Group],
    has_kernel: Callable[[int], bool],
) -> Mapping[int, WeightForm]:
    """Return the form of each weight that has one. All others lie in their own order."""
    forms: dict[int, set[WeightForm | None]] = {}
    leaves = len(graph.leaves)
    weights = {value for value in range(leaves) if is_weight(graph, value)}
    nodes, roots = graph.nodes, [place.root for place in places]
    #: By what decides a form; the graph keeps its types alive, so an id is that of one object.
    known: dict[tuple[Hashable, ...], WeightForm | None] = {}
    for role, numbers in groups if weights else ():
        for number in numbers:
            node = nodes[number]
            for place, value in enumerate(node.operands):
                root = roots[value]
                # A view is no read.
                if root < leaves and root in weights and roots[leaves + number] != root:
                    form = None
                    native = role != "other" or (node.op == "mul_mat_id" and has_kernel(number))
                    if native and place == _right_side(graph, places, node, role):
                        types = id(graph.type_of(value)), id(graph.leaves[root].type)
                        key = node.op, *types, places[value].offset_bytes, places[value].strides
                        if key not in known:
                            known[key] = form_of(graph, places, value, node.op)
                        form = known[key]
                    forms.setdefault(root, set()).add(form)
    for output in graph.outputs:
        forms[places[output.value].root] = {None}
    chosen = {root: next(iter(found)) for root, found in forms.items() if len(found) == 1}
    return {root: form for root, form in chosen.items() if form is not None}


def _right_side(graph: Graph, places: Sequence[ValuePlace], node: Node, role: Role) -> int:
    """Return the operand of a native node that may have a form; -1 if there is none."""
    if role == "windows":
        types = [graph.type_of(value) for value in node.operands]
        strides = places[node.operands[-1]].strides
        return 0 if is_product(node, types, strides) or is_direct(node, types, strides) else -1
    return RIGHT_SIDES.get(node.op, -1)


def form_of(graph: Graph, places: Sequence[ValuePlace], value: int, op: str) -> WeightForm | None:
    """Return the form in which a product reads all of a weight; None if it has none."""
    type, (root, offset, strides) = graph.type_of(value), places[value]
    if not 0 < type.size == graph.type_of(root).size or offset:
        return None
    shape = type.shape
    if op == "conv_2d":
        # A kernel that has one is dense but for its first stride.
        shape, strides = (shape[0], prod(shape[1:])), (strides[0], 4)
    elif op == "mul_mat_id" or type.dtype is not F32:
        return _groups_of(type, strides, op)
    if type.dtype is not F32 or len(shape) != 2:
        return None
    if op != "matmul":
        shape, strides = shape[::-1], strides[::-1]
    depth, columns = shape
    for by_columns, own in ((False, (4 * columns, 4)), (True, (4, 4 * depth))):
        steps = zip(shape, strides, own, strict=True)
        if all(size == 1 or step == expected for size, step, expected in steps):
            return PackedForm(depth, columns, by_columns)
    return None


def _groups_of(type: TensorType, strides: tuple[int, ...], op: str) -> RowGroups | None:
    kind, shape = STORED.get(type.dtype.name), type.shape
    if kind is None or op == "matmul" or strides != contiguous_strides(shape, type.dtype):
        return None
    if shape[-2] % GROUP_ROWS or shape[-1] % max(FORMS[kind].block_size, _LEAST_DEPTH):
        return None
    return RowGroups(kind, prod(shape[:-1]), shape[-1] // FORMS[kind].block_size)
