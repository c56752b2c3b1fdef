"""Neighbouring steps that one kernel runs, beside the groups of all backends. Pure.

    get_rows, cast         rows of narrow floats unchanged
    attention, cast        a result in the narrow type
    sums, norm             a norm computes the sums that it reads, at most two
    sums with rows,        attention adds the rows to queries, keys and values as it reads them
    attention

Only neighbours are joined: no step moves past another one, so no read crosses a write, and no value
lives longer than to the next step. Bits do not change: kernels round after each sum as separate
steps do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from heliograph_backends.cuda.driver.parameters import MOST_ADDED
from heliograph_backends.cuda.lowering.attention import OPS
from heliograph_backends.cuda.lowering.launch import Located
from heliograph_backends.planning.fusion import is_row, other_operand
from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import ValuePlace, value_types, view
from heliograph_backends.planning.storage import StorageLayout
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

NARROW = ("f16", "bf16")
NORMS = ("norm", "rms_norm")


class Bias(NamedTuple):
    """A row that is added to each row of an operand: its value, and the offset and stride of the
    heads' parts."""

    value: int
    offset_bytes: int
    head_stride: int


class JoinedKernels(Protocol):
    """The steps that the device can run as one."""

    def gathers(self, number: int) -> bool:
        """True if a kernel gathers a node's rows."""

    def attends(self, number: int) -> bool:
        """True if a kernel computes a node's attention."""

    def takes_biases(self, number: int) -> bool:
        """True if that kernel adds rows to queries, keys and values itself."""


def joined(
    graph: Graph, places: Sequence[ValuePlace], groups: Sequence[Group], kernels: JoinedKernels
) -> tuple[Group, ...]:
    """Return the groups with neighbours joined."""
    joining = _Joining(graph, places, groups, kernels)
    found: list[Group] = []
    for group in groups:
        made = joining.pair(found[-1], group) if found else None
        if made is None:
            found.append(group)
        else:
            found[-1:] = made
    return tuple(found)


class _Joining:
    """The properties of a graph's groups that joining depends on."""

    def __init__(
        self,
        graph: Graph,
        places: Sequence[ValuePlace],
        groups: Sequence[Group],
        kernels: JoinedKernels,
    ) -> None:
        self.graph, self.places, self.kernels = graph, places, kernels
        self.types = value_types(graph)
        self.leaves = len(graph.leaves)
        self.kept = {places[output.value].root for output in graph.outputs}
        #: The nodes that read each root.
        self.readers: dict[int, set[int]] = {}
        for group in groups:
            for number in group.nodes:
                for value in graph.nodes[number].operands:
                    self.readers.setdefault(places[value].root, set()).add(number)

    def pair(self, first: Group, second: Group) -> tuple[Group, ...] | None:
        """Return the groups that replace two neighbours; None if they stay as they are."""
        value = self.leaves + first.last
        if self.places[value].root != value or value in self.kept:
            return None
        if not self.readers.get(value, set()) <= set(second.nodes):
            return None
        node = self.graph.nodes[second.nodes[0]]
        if node.op == "cast":
            return self._cast(first, second)
        if second.role == "norm" and node.op in NORMS and node.operands[0] == value:
            return self._norm(first, second)
        return self._attention(first, second) if node.op == "flash_attn_ext" else None

    def _cast(self, first: Group, second: Group) -> tuple[Group, ...] | None:
        """Join a conversion of a step's whole result, if the step's kernel can make it."""
        made, cast = self.graph.nodes[first.last], self.graph.nodes[second.last]
        (source,) = cast.operands
        _, offset, strides = self.places[source]
        whole = not offset and strides == self.types[source].strides and cast.type.size == made.type.size
        target = self.places[self.leaves + second.last]
        if not whole or target.strides != cast.type.strides or cast.type.dtype.name not in NARROW:
            return None
        if made.op == "get_rows":
            fits = self.types[made.operands[0]].dtype is cast.type.dtype and self.kernels.gathers(first.last)
        else:
            fits = made.op in OPS and self.kernels.attends(first.last)
        return (Group("other", first.nodes + second.nodes),) if fits else None

    def _norm(self, first: Group, second: Group) -> tuple[Group, ...] | None:
        """Move the sums at the end of a group to the norm."""
        if first.role not in ("matmul", "elementwise"):
            return None
        rest, taken = list(first.nodes), list[int]()
        while rest and len(taken) < MOST_ADDED and self._is_last_sum(rest):
            taken.insert(0, rest.pop())
        if not taken:
            return None
        norm = Group("norm", (*taken, *second.nodes))
        return (Group(first.role, tuple(rest)), norm) if rest else (norm,)

    def _is_last_sum(self, nodes: Sequence[int]) -> bool:
        """True if a group's last node adds an outside value to the result of the node before; if it
        is the only node, if it adds two outside values."""
        node = self.graph.nodes[nodes[-1]]
        if node.op != "add" or node.operands[0] == node.operands[1]:
            return False
        inner = [value for value in node.operands if value - self.leaves in nodes]
        return inner == ([self.leaves + nodes[-2]] if len(nodes) > 1 else [])

    def _attention(self, first: Group, second: Group) -> tuple[Group, ...] | None:
        """Move the sum with a row at the end of a product to the attention."""
        number, value = second.nodes[0], self.leaves + first.last
        attention, sums = self.graph.nodes[number], self.graph.nodes[first.last]
        if first.role != "matmul" or len(first.nodes) < 2 or not self._is_last_sum(first.nodes):
            return None
        row = other_operand(sums.operands, self.leaves + first.nodes[-2])
        # With as many elements, the result could reuse the memory of an operand that is still read.
        if not is_row(self.types[row], sums.type) or attention.type.size == sums.type.size:
            return None
        if any(
            self.places[one].root == value for one in attention.operands[3:]
        ) or not self.kernels.takes_biases(number):
            return None
        found = biases(self.graph, self.places, first.last, number)
        if found is None:
            return None
        return Group("matmul", first.nodes[:-1]), Group("other", (first.last, *second.nodes))


def biases(
    graph: Graph, places: Sequence[ValuePlace], sums: int, attention: int
) -> tuple[Bias | None, Bias | None, Bias | None] | None:
    """Return the rows that a node adds to q, k and v, which are views of its result; None if a row
    differs between the rows of a head, or is not contiguous."""
    value = len(graph.leaves) + sums
    node, types = graph.nodes[sums], value_types(graph)
    row = next(one for one in node.operands if is_row(types[one], node.type))
    item = node.type.dtype.block_bytes
    if places[row].strides[-1] != item:
        return None
    start = ValuePlace(row, 0, (0,) * (node.type.ndim - 1) + (item,))
    found: list[Bias | None] = []
    for operand in graph.nodes[attention].operands[:3]:
        if places[operand].root != value:
            found.append(None)
            continue
        place = _through_views(graph, types, operand, value, start)
        if place is None or place.strides[0] or place.strides[2] or place.strides[3] != item:
            return None
        found.append(Bias(row, place.offset_bytes, place.strides[1]))
    q, k, v = found
    return q, k, v


def _through_views(
    graph: Graph, types: Sequence[TensorType], value: int, source: int, start: ValuePlace
) -> ValuePlace | None:
    """Return the place of a view's elements, given that of its source's."""
    if value == source:
        return start
    node = graph.nodes[value - len(graph.leaves)]
    place = _through_views(graph, types, node.operands[0], source, start)
    if place is None:
        return None
    return view(node.op, node.attributes, types[node.operands[0]], node.type, place)


def summands(graph: Graph, sums: Sequence[int], norm: int) -> tuple[int, list[int]]:
    """Return the first value of the sums before a norm, and the values that they add."""
    if not sums:
        return graph.nodes[norm].operands[0], []
    leaves = len(graph.leaves)
    first, *others = (graph.nodes[number] for number in sums)
    value, more = first.operands
    found = [more]
    for before, node in zip(sums, others, strict=False):
        found.append(other_operand(node.operands, leaves + before))
    return value, found


def biased(
    graph: Graph, storage: StorageLayout, sums: int, attention: int
) -> tuple[list[Located], list[Located | None]]:
    """Return attention's operands in the memory that a sum adds a row to, since the sum itself is
    not computed, and the rows added to q, k and v."""
    root, types = len(graph.leaves) + sums, value_types(graph)
    node, reads = graph.nodes[sums], graph.nodes[attention].operands
    row = next(value for value in node.operands if is_row(types[value], node.type))
    slot, start, _ = storage.locate(other_operand(node.operands, row))
    values = []
    for value in reads:
        place = storage.places[value]
        if place.root == root:
            values.append(Located(types[value], slot, start + place.offset_bytes, place.strides))
        else:
            values.append(Located(types[value], *storage.locate(value)))
    found = biases(graph, storage.places, sums, attention)
    assert found is not None, "its group has them"
    slot, start, _ = storage.locate(row)
    item = node.type.dtype.block_bytes
    return values, [
        None
        if one is None
        else Located(types[row], slot, start + one.offset_bytes, (0, one.head_stride, 0, item))
        for one in found
    ]
