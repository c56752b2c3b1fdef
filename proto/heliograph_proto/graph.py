"""Graphs as frozen dataclasses, and their validation.

Values are numbered: the leaves first, then the nodes in order. A graph from the wire must pass
`validate` before any use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from heliograph_proto.digests import DIGEST_BYTES
from heliograph_proto.errors import HeliographError, InvalidGraphError, LimitExceededError, Origin
from heliograph_proto.ops.table import OPS, infer
from heliograph_proto.pace import in_turns
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, shape_problem

#: The maximum length of the name of a leaf, a node or an output, in characters.
MAX_NAME = 1024


class LeafKind(Enum):
    """The kinds of leaves."""

    INPUT = "input"
    WEIGHT = "weight"
    VARIABLE = "variable"


# Large graphs are made of these two, and Python makes a frozen dataclass four times as slowly as
# one whose fields only type checkers protect.


@dataclass(slots=True, unsafe_hash=True)
class Leaf:
    """A tensor that a graph takes as an input, a weight or a variable."""

    kind: Final[LeafKind]
    #: Unique among the leaves of its kind.
    name: Final[str]
    type: Final[TensorType]
    #: The BLAKE3 digest of a weight's bytes; empty for other kinds.
    digest: Final[bytes] = b""


@dataclass(slots=True)
class Node:
    """An op applied to earlier values."""

    #: A name in the op table, such as "matmul".
    op: Final[str]
    #: The numbers of its operands' values.
    operands: Final[tuple[int, ...]]
    #: The type of its result.
    type: Final[TensorType]
    #: By name; all of the op's attributes, once the graph is validated.
    attributes: Final[Mapping[str, Any]] = field(default_factory=dict)
    #: For people; may be empty, and several nodes may have the same.
    name: Final[str] = ""


@dataclass(frozen=True, slots=True)
class Output:
    """A named value that a run returns."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Graph:
    """Leaves, nodes in topological order, outputs.

    Value number v is `leaves[v]`, or from `len(leaves)` on the result of `nodes[v - len(leaves)]`.
    """

    #: Inputs, weights and variables, in any order.
    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def __repr__(self) -> str:
        counts = f"{len(self.leaves)} leaves, {len(self.nodes)} nodes, {len(self.outputs)} outputs"
        return f"<Graph {counts}>"

    def type_of(self, value: int) -> TensorType:
        """Return the type of a value."""
        count = len(self.leaves)
        return self.leaves[value].type if value < count else self.nodes[value - count].type

    def of_kind(self, kind: LeafKind) -> tuple[Leaf, ...]:
        """Return the leaves of a kind, in order."""
        return tuple(leaf for leaf in self.leaves if leaf.kind is kind)

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """The leaves that each run gets tensors for, in the order of those tensors."""
        return self.of_kind(LeafKind.INPUT)

    @property
    def weights(self) -> tuple[Leaf, ...]:
        """The leaves that are bound when a plan is compiled, and never change."""
        return self.of_kind(LeafKind.WEIGHT)

    @property
    def variables(self) -> tuple[Leaf, ...]:
        """The leaves that are bound when a plan is compiled, and that `assign` nodes write."""
        return self.of_kind(LeafKind.VARIABLE)

    def origin(self, number: int) -> Origin:
        """Return the origin of an error of node `number`."""
        node = self.nodes[number]
        operands = tuple(self.type_of(value) for value in node.operands)
        return Origin(op=node.op, node=number, node_name=node.name, operands=operands)


def validate(graph: Graph, limits: Limits, bound: Collection[int] = ()) -> Graph:
    """Check every rule of a graph and return it with complete attributes.

    `bound`: numbers of weights and variables that are bound to tensors; such a weight needs no
    digest. Linear in the graph's size and without recursion. Raises LimitExceededError,
    InvalidGraphError or UnknownOpError, with the node as origin.
    """
    check_size(len(graph.nodes), limits)
    _check_leaves(graph, bound)
    forms = _Forms(graph)
    nodes, depth = _check_nodes(graph, forms)
    if depth > limits.graph_depth:
        raise LimitExceededError(
            f"the graph is {depth:,} nodes deep; the server's limit is {limits.graph_depth:,}",
            advice="split the graph, or raise the limit in the server's configuration",
        )
    _check_outputs(graph)
    return Graph(forms.leaves, nodes, graph.outputs)


def check_size(nodes: int, limits: Limits) -> None:
    """Raise LimitExceededError if a graph has too many nodes."""
    if nodes > limits.graph_nodes:
        raise LimitExceededError(
            f"the graph has {nodes:,} nodes; the server's limit is {limits.graph_nodes:,}",
            advice="split the graph, or raise the limit in the server's configuration",
        )


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """Return the graph with its nodes in another order: `order` has the old number of each.

    Raises InvalidGraphError unless the order has every node once, each after its operands, and
    keeps the order of each variable's reads and assignments.
    """
    leaves = len(graph.leaves)
    if sorted(order) != list(range(len(graph.nodes))):
        raise InvalidGraphError("the order does not name each node once")
    value_of = {value: value for value in range(leaves)}
    nodes: list[Node] = []
    for old in order:
        node = graph.nodes[old]
        if any(value not in value_of for value in node.operands):
            raise InvalidGraphError(f"the order puts node {old} before one of its operands")
        value_of[leaves + old] = leaves + len(nodes)
        nodes.append(replace(node, operands=tuple(value_of[value] for value in node.operands)))
    _check_variables_order(graph, order)
    outputs = tuple(Output(one.name, value_of[one.value]) for one in graph.outputs)
    return Graph(graph.leaves, tuple(nodes), outputs)


def _check_variables_order(graph: Graph, order: Sequence[int]) -> None:
    """Check that the nodes that touch an assigned variable keep their relative order."""
    assigned = {node.operands[0] for node in graph.nodes if node.op == "assign"}
    touching = _touching(graph, assigned)
    last: dict[int, int] = {}
    for old in order:
        for variable in touching[old]:
            if last.get(variable, -1) > old:
                raise InvalidGraphError(f"the order moves node {old} past another of the same variable")
            last[variable] = old


def _touching(graph: Graph, variables: Set[int]) -> list[frozenset[int]]:
    """Return, for each node, the variables that it reads or writes, also through views."""
    through: dict[int, frozenset[int]] = {value: frozenset((value,)) for value in variables}
    found = []
    for number, node in enumerate(graph.nodes):
        mine = frozenset().union(*(through.get(value, frozenset()) for value in node.operands))
        found.append(mine)
        if mine and (OPS[node.op].is_view or node.op == "assign"):
            through[len(graph.leaves) + number] = mine
    return found


def _check_leaves(graph: Graph, bound: Collection[int]) -> None:
    for number in bound:
        if not 0 <= number < len(graph.leaves) or graph.leaves[number].kind is LeafKind.INPUT:
            raise InvalidGraphError(f"value {number} is bound to a tensor, but is not a weight or variable")
    seen: set[tuple[LeafKind, str]] = set()
    sound: set[TensorType] = set()
    for number, leaf in enumerate(graph.leaves):
        _check_name(leaf.name, leaf.kind.value, required=True)
        if (leaf.kind, leaf.name) in seen:
            raise InvalidGraphError(f"two {leaf.kind.value}s are named {leaf.name!r}")
        seen.add((leaf.kind, leaf.name))
        if leaf.type not in sound:
            if problem := shape_problem(leaf.type):
                raise InvalidGraphError(f"{leaf.kind.value} {leaf.name!r}: {problem}")
            sound.add(leaf.type)
        if number in bound and leaf.kind is LeafKind.WEIGHT:
            continue
        if (leaf.kind is LeafKind.WEIGHT) != (len(leaf.digest) == DIGEST_BYTES):
            raise InvalidGraphError(f"{leaf.kind.value} {leaf.name!r}: only weights have a digest")


def _check_name(name: str, what: str, *, required: bool) -> None:
    if len(name) > MAX_NAME or not name.isprintable() or (required and not name):
        raise InvalidGraphError(
            f"{what}: the name {name[:40]!r} is empty, longer than {MAX_NAME} characters, "
            "or has unprintable characters"
        )


def _check_nodes(graph: Graph, forms: _Forms) -> tuple[tuple[Node, ...], int]:
    """Return the nodes with complete attributes, and the length of the longest path."""
    types = forms.types
    depths = [0] * len(types)
    complete = []
    for number, node in enumerate(in_turns(graph.nodes)):
        try:
            checked = forms.check(node)
        except HeliographError as error:
            raise error.at(_partial_origin(number, node, types)) from None
        complete.append(checked)
        depths.append(1 + max([depths[value] for value in node.operands], default=0))
    return tuple(complete), max(depths, default=0)


class _Forms:
    """The inferred types and attributes of nodes, by form: op, attributes, and operands' types.

    Models repeat their layers, so most nodes have the form of an earlier one, and nothing is
    inferred for them. Equal types become one object, and so do equal attributes, so that forms are
    told apart by the ids of these objects, here and in what compiles the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._types: dict[TensorType, TensorType] = {}
        self._attributes: dict[str, Mapping[str, Any]] = {}
        #: The types of the leaves, and of the nodes checked so far.
        self.types = [self._types.setdefault(leaf.type, leaf.type) for leaf in graph.leaves]
        pairs = zip(graph.leaves, self.types, strict=True)
        self.leaves = tuple([leaf if leaf.type is type else replace(leaf, type=type) for leaf, type in pairs])
        #: Result and attributes.
        self._known: dict[tuple[Any, ...], tuple[TensorType, Mapping[str, Any]]] = {}
        self._ids = [*map(id, self.types)]

    def check(self, node: Node) -> Node:
        """Return a node complete, and append its type. Raises InvalidGraphError, UnknownOpError."""
        operands, attributes, types, name = node.operands, node.attributes, self.types, node.name
        if len(name) > MAX_NAME or not name.isprintable():
            _check_name(name, "node", required=False)
        if operands and not 0 <= min(operands) <= max(operands) < len(types):
            value = next(value for value in operands if not 0 <= value < len(types))
            raise InvalidGraphError(
                f"an operand is value {value}, which does not come before this node",
                advice="each node comes after its operands; a graph has no cycles",
            )
        # The graph keeps the attributes alive, so their id is theirs.
        key = node.op, id(attributes) if attributes else 0, *map(self._ids.__getitem__, operands)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._infer(node)
        found, complete = known
        if node.op == "assign":
            self._check_assigned(operands[0])
        if found is not node.type and found != node.type:
            raise InvalidGraphError(f"the result is {found}, but the graph says {node.type}")
        types.append(found)
        self._ids.append(id(found))
        if found is node.type and (complete is attributes or not (complete or attributes)):
            return node
        return Node(node.op, operands, found, complete, node.name)

    def _infer(self, node: Node) -> tuple[TensorType, Mapping[str, Any]]:
        given, found = node.attributes, node.type
        inferred, complete = infer(node.op, [self.types[value] for value in node.operands], given)
        if inferred != found:
            found = inferred
        text = repr(complete)
        attributes = given if text == repr(given) else complete
        # A text has all bits of a number, except those of a NaN.
        known = attributes if "nan" in text else self._attributes.setdefault(text, attributes)
        return self._types.setdefault(found, found), known

    def _check_assigned(self, value: int) -> None:
        if value >= len(self.leaves) or self.leaves[value].kind is not LeafKind.VARIABLE:
            raise InvalidGraphError("assign: the first operand is not a variable")


def _partial_origin(number: int, node: Node, types: list[TensorType]) -> Origin:
    operands = tuple(types[value] for value in node.operands[:8] if 0 <= value < len(types))
    return Origin(op=node.op[:64], node=number, node_name=node.name[:64], operands=operands)


def _check_outputs(graph: Graph) -> None:
    names: set[str] = set()
    count = len(graph.leaves) + len(graph.nodes)
    if not graph.outputs:
        raise InvalidGraphError("the graph has no outputs", advice="name one: g.output('y', y)")
    for output in graph.outputs:
        _check_name(output.name, "output", required=True)
        if output.name in names:
            raise InvalidGraphError(f"two outputs are named {output.name!r}")
        names.add(output.name)
        if not 0 <= output.value < count:
            raise InvalidGraphError(f"output {output.name!r} is value {output.value} of {count}")
