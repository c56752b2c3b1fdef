"""Weights whose rows are divided over several devices: the graph is rewritten before it is
scheduled.

    mul_mat(w, x)  ─▸  concat(mul_mat(rows 0 to a of w, x), mul_mat(rows a to n of w, x), ...)

Each part is pinned to the device of its rows, and the concat to the main one. After ggml's split
buffer type. Each element of a product depends on one row alone, so no sum is cut, and the results
are the same.

Products wait until a node reads one of them. So the parts of several products of the same value,
such as a layer's queries, keys and values, run together on one device while the other devices run
theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output, check_size
from heliograph_proto.ops.table import infer
from heliograph_proto.plans import RowSplit
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType
from heliograph_server.scheduler.model import Candidate
from heliograph_server.scheduler.slices import Slice

#: Parts begin at multiples of this number of rows if there are enough of them: kernels work on
#: panels of this height.
ROWS = 32
#: The number of such multiples for each device that is enough.
STEPS = 4
#: The products whose weight can be divided: the place of the weight, and its dimension that becomes
#: the last one of the result. The columns of a `matmul` weight correspond to the rows of the
#: others.
PRODUCTS: Mapping[str, tuple[int, int]] = {"mul_mat": (0, -2), "mul_mat_id": (0, -2), "matmul": (1, -1)}


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a weight on a device."""

    #: The weight in the client's graph.
    leaf: int
    #: The part in the divided graph.
    value: int
    device: str
    first: int
    count: int
    size_bytes: int
    #: True for columns: those of a weight that `matmul` reads.
    are_columns: bool = False


@dataclass(frozen=True, slots=True)
class Divided:
    """A graph with divided weights, and the mapping between its numbers and those of the client's
    graph.

    Leaves keep their numbers; additional ones follow.
    """

    graph: Graph
    client: Graph
    #: For each node, the client's node that it is or is a part of.
    nodes: tuple[int, ...]
    #: For each of the client's nodes, the node with its result.
    results: tuple[int, ...]
    #: For each of the client's nodes with a divided weight, the place of that operand.
    products: Mapping[int, int]
    #: Device names by node.
    pins: Mapping[int, str]
    #: Nodes that begin a split, so that parts can run at the same time.
    begins: frozenset[int]
    parts: tuple[WeightPart, ...]
    #: For each node that is a part of a product, its weight's place in `parts`.
    part_of: Mapping[int, int]

    @property
    def values_of(self) -> dict[int, list[int]]:
        """The values of the parts, by the client's weight."""
        found: dict[int, list[int]] = {}
        for one in self.parts:
            found.setdefault(one.leaf, []).append(one.value)
        return found

    def with_pins(self, pins: Mapping[int, str]) -> dict[int, str]:
        """Return all pins, given the client's. A pin of a product applies to its concat. Raises
        InvalidArgumentError if all rows of its weight lie elsewhere."""
        found = {self.results[node]: name for node, name in pins.items()}
        for number in found.keys() & self.part_of.keys():
            if found[number] != self.pins[number]:
                node = self.graph.nodes[number]
                raise InvalidArgumentError(
                    f"node {node.name!r} is pinned to {found[number][:64]}, but all rows of its weight "
                    f"belong on {self.pins[number]}",
                    advice="pin it there, or not at all",
                    origin=self.graph.origin(number),
                )
        return {**self.pins, **found}


def divide(graph: Graph, splits: Mapping[int, RowSplit], limits: Limits, bound: Collection[int]) -> Divided:
    """Return the graph with weights divided: `splits` by leaf; `bound` holds the leaves that are
    tensors of the session.

    A weight that another node reads as well is kept as a whole for that node. Raises
    InvalidArgumentError, LimitExceededError.
    """
    readers = _readers(graph, splits)
    axes = {leaf: _axis(graph, leaf, found, bound) for leaf, found in readers.items()}
    shares = {leaf: _shares(graph.leaves[leaf].type, axes[leaf], split) for leaf, split in splits.items()}
    products = {
        number: leaf
        for leaf, found in readers.items()
        for number in found
        if number < len(graph.nodes) and _divides(graph.nodes[number], leaf, axes[leaf])
    }
    check_size(len(graph.nodes) + sum(len(shares[leaf]) for leaf in products.values()), limits)
    dividing = _Dividing(graph, splits, axes, products)
    for leaf, found in readers.items():
        is_read_whole = any(products.get(number) != leaf for number in found)
        dividing.cut(leaf, shares[leaf], keeps_whole=is_read_whole)
    for number in range(len(graph.nodes)):
        dividing.add(number)
    return dividing.divided()


def check_able(divided: Divided, devices: Sequence[Candidate], pins: Mapping[int, int]) -> None:
    """Raise UnsupportedError if a device cannot run its part of a product; `pins` holds places of
    devices."""
    for number, place in divided.part_of.items():
        device = devices[pins[number]]
        if reason := device.refusals[number]:
            weight = divided.client.leaves[divided.parts[place].leaf].name
            raise UnsupportedError(
                f"weight {weight!r} lies partly on {device.name}, which cannot run "
                f"{divided.graph.nodes[number].op}: {reason}",
                advice=f"give {device.name} none of its rows",
                origin=divided.graph.origin(number),
            )


# The axis and the shares of each weight


def _readers(graph: Graph, leaves: Collection[int]) -> dict[int, dict[int, None]]:
    """Return for each leaf the nodes that read it, in order; the number after the last node stands
    for the caller."""
    found: dict[int, dict[int, None]] = {leaf: {} for leaf in leaves}
    for number, node in enumerate(graph.nodes):
        for value in node.operands:
            if value in found:
                found[value][number] = None
    for output in graph.outputs:
        if output.value in found:
            found[output.value][len(graph.nodes)] = None
    return found


def _axis(graph: Graph, leaf: int, readers: Collection[int], bound: Collection[int]) -> int:
    """Return the dimension along which a weight is divided: that of its first product. Raises
    InvalidArgumentError."""
    if not 0 <= leaf < len(graph.leaves) or graph.leaves[leaf].kind is not LeafKind.WEIGHT:
        raise InvalidArgumentError(f"value {leaf} is to lie over devices, but is no weight")
    name = graph.leaves[leaf].name
    if leaf in bound:
        raise InvalidArgumentError(
            f"weight {name!r} is to lie over devices, but is bound to a tensor, which lies where it is",
            advice="divide weights whose contents the graph has",
        )
    nodes = {number: graph.nodes[number] for number in readers if number < len(graph.nodes)}
    for node in nodes.values():
        if _place(node, leaf) is not None:
            return PRODUCTS[node.op][1]
    raise _no_product(graph, name, nodes)


def _no_product(graph: Graph, name: str, readers: Mapping[int, Node]) -> InvalidArgumentError:
    advice = f"only weights of {', '.join(PRODUCTS)} can be divided by rows"
    for number, node in readers.items():
        return InvalidArgumentError(
            f"weight {name!r} is to lie over devices, but node {node.name!r} ({node.op}) reads it, and no "
            "product does",
            advice=advice,
            origin=graph.origin(number),
        )
    return InvalidArgumentError(
        f"weight {name!r} is to lie over devices, but no node reads it", advice=advice
    )


def _place(node: Node, leaf: int) -> int | None:
    """Return the operand as which a product reads a weight; None if the node is no product or also
    reads the weight otherwise."""
    if node.op not in PRODUCTS or node.operands.count(leaf) != 1:
        return None
    place = PRODUCTS[node.op][0]
    return place if node.operands[place] == leaf else None


def _divides(node: Node, leaf: int, axis: int) -> bool:
    """True if a node is a product whose weight can be divided along that dimension."""
    return _place(node, leaf) is not None and PRODUCTS[node.op][1] == axis


def _shares(type: TensorType, axis: int, split: RowSplit) -> list[tuple[str, int, int]]:
    """Return (device, first row, rows) for each device with rows; for the main one if the weight is
    empty."""
    count = type.shape[axis]
    named = [(name, fraction) for name, fraction in split.fractions if fraction > 0]
    bounds = [0, *_bounds(count, [fraction for _, fraction in named])]
    pairs = zip(named, pairwise(bounds), strict=True)
    found = [(name, first, last - first) for (name, _), (first, last) in pairs if first < last]
    return found if type.nbytes else [(split.main, 0, count)]


def _bounds(count: int, fractions: Sequence[float]) -> Iterator[int]:
    """Yield the row at which each of the fractions ends."""
    step = ROWS
    while step > 1 and STEPS * step * len(fractions) > count:
        step //= 2
    total, running = sum(fractions), 0.0
    for fraction in fractions[:-1]:
        running += fraction
        yield min(count, int(count * (running / total) / step + 0.5) * step)
    yield count


# The divided graph


class _Dividing:
    """The divided graph so far."""

    def __init__(
        self,
        graph: Graph,
        splits: Mapping[int, RowSplit],
        axes: Mapping[int, int],
        products: Mapping[int, int],
    ) -> None:
        self._client = graph
        self._splits, self._axes = splits, axes
        #: The weight of each node to divide.
        self._products = products
        self._leaves = list(graph.leaves)
        self._parts: list[WeightPart] = []
        #: The places of the parts of each weight.
        self._parts_of: dict[int, list[int]] = {}
        #: The numbers here of the client's values so far.
        self._value_of = dict(enumerate(range(len(graph.leaves))))
        self._nodes: list[Node] = []
        self._numbers: list[int] = []
        self._pins: dict[int, str] = {}
        self._begins: set[int] = set()
        self._part_of: dict[int, int] = {}
        #: Products that no node has read yet.
        self._waiting: dict[int, None] = {}

    def cut(self, leaf: int, shares: Sequence[tuple[str, int, int]], *, keeps_whole: bool) -> None:
        """Add a weight's parts as leaves, before any node. The first part replaces the weight
        unless it is kept."""
        whole, axis = self._client.leaves[leaf], self._axes[leaf]
        is_single = len(shares) == 1
        self._parts_of[leaf] = []
        for device, first, count in shares:
            made = whole if is_single else _part(whole, axis, first, count)
            stays = bool(self._parts_of[leaf]) or (keeps_whole and not is_single)
            value = len(self._leaves) if stays else leaf
            self._leaves[value : value + 1] = [made]
            self._parts_of[leaf].append(len(self._parts))
            found = WeightPart(leaf, value, device, first, count, made.type.nbytes, axis == -1)
            self._parts.append(found)

    def add(self, number: int) -> None:
        """Add the client's next node."""
        node, leaves = self._client.nodes[number], len(self._client.leaves)
        # A waiting product may read the variable that is assigned to.
        if node.op == "assign" or any(value - leaves in self._waiting for value in node.operands):
            self._flush()
        if number not in self._products:
            self._put(number, node)
        elif len(self._parts_of[self._products[number]]) > 1:
            self._waiting[number] = None
        else:
            (place,) = self._parts_of[self._products[number]]
            self._part_of[len(self._nodes)] = place
            self._put(number, node, self._parts[place].device)

    def _put(self, number: int, node: Node, device: str = "") -> int:
        """Add a node with the client's operands and return its value."""
        operands = tuple(self._value_of[value] for value in node.operands)
        value = self._append(number, replace(node, operands=operands), device)
        self._value_of[len(self._client.leaves) + number] = value
        return value

    def _append(self, number: int, node: Node, device: str) -> int:
        if device:
            self._pins[len(self._nodes)] = device
        self._nodes.append(node)
        self._numbers.append(number)
        return len(self._leaves) + len(self._nodes) - 1

    def _flush(self) -> None:
        """Add the waiting products: by device, then the concats. The parts of the main devices come
        last, next to their readers."""
        waiting, self._waiting = list(self._waiting), {}
        if not waiting:
            return
        made: dict[int, dict[int, int]] = {number: {} for number in waiting}
        for device in self._devices_of(waiting):
            self._begins.add(len(self._nodes))
            for number in waiting:
                for place in self._parts_of[self._products[number]]:
                    if self._parts[place].device == device:
                        made[number][place] = self._put_part(number, place)
        self._begins.add(len(self._nodes))
        for number in waiting:
            self._join(number, [made[number][place] for place in sorted(made[number])])

    def _devices_of(self, products: Sequence[int]) -> list[str]:
        leaves = [self._products[number] for number in products]
        mains = {self._splits[leaf].main for leaf in leaves}
        found = dict.fromkeys(self._parts[place].device for leaf in leaves for place in self._parts_of[leaf])
        return sorted(found, key=lambda device: device in mains)

    def _put_part(self, number: int, place: int) -> int:
        """Add a product of some rows and return its value."""
        node, part = self._client.nodes[number], self._parts[place]
        operands = [self._value_of[value] for value in node.operands]
        operands[PRODUCTS[node.op][0]] = part.value
        type = TensorType(node.type.dtype, (*node.type.shape[:-1], part.count))
        self._part_of[len(self._nodes)] = place
        return self._append(number, replace(node, operands=tuple(operands), type=type), part.device)

    def _join(self, number: int, parts: Sequence[int]) -> None:
        node, leaves = self._client.nodes[number], len(self._leaves)
        _, attributes = infer("concat", [self._nodes[value - leaves].type for value in parts], {"axis": -1})
        joined = Node("concat", tuple(parts), node.type, attributes, node.name)
        main = self._splits[self._products[number]].main
        self._value_of[len(self._client.leaves) + number] = self._append(number, joined, main)

    def divided(self) -> Divided:
        """Return the graph after all nodes were added."""
        self._flush()
        client, leaves = self._client, len(self._client.leaves)
        outputs = tuple(Output(one.name, self._value_of[one.value]) for one in client.outputs)
        return Divided(
            graph=Graph(tuple(self._leaves), tuple(self._nodes), outputs),
            client=client,
            nodes=tuple(self._numbers),
            results=tuple(
                self._value_of[leaves + number] - len(self._leaves) for number in range(len(client.nodes))
            ),
            products={number: PRODUCTS[client.nodes[number].op][0] for number in self._products},
            pins=self._pins,
            begins=frozenset(self._begins),
            parts=tuple(self._parts),
            part_of=self._part_of,
        )


def _part(whole: Leaf, axis: int, first: int, count: int) -> Leaf:
    """Return some rows of a weight. The digest of the new leaf is the name of a part of a
    content."""
    shape = list(whole.type.shape)
    rows, shape[axis] = shape[axis], count
    type = TensorType(whole.type.dtype, tuple(shape))
    # Bytes of each matrix, or of each row if the weight is divided by columns.
    period = whole.type.nbytes // prod(whole.type.shape[:axis])
    row_bytes = period // rows
    piece = Slice(first * row_bytes, (first + count) * row_bytes, period)
    return replace(whole, type=type, digest=piece.name(whole.digest))
