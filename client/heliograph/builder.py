"""`hg.Graph`: builds a compute graph, node by node, with every shape checked at once.

Leaves and nodes are numbered apart while the graph grows, since nodes may come before later leaves; a
reference is a node's number or the complement (~) of a leaf's. `freeze` puts the leaves first, as
the contract has it. Each node keeps the line of user code that built it (see `_source`).
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from heliograph._arguments import counted, sizes_of
from heliograph._promotion import Scalar, weak_scalar
from heliograph._source import Source, caller, describe, invalid
from heliograph._symbol import Symbol
from heliograph.value import Value
from heliograph_proto import graph as contract
from heliograph_proto.errors import HeliographError, InvalidArgumentError, Origin
from heliograph_proto.graph import MAX_NAME, Leaf, LeafKind, Node, Output
from heliograph_proto.ops import infer
from heliograph_proto.types import F32, DType, DTypeArgument, TensorType, tensor_type


class Graph:
    """A graph that is being built.

    `input`, `weight`, `variable` and `constant` give values; operators and the functions under `hg.`
    compute with them; `output` names what a run returns. Raises InvalidGraphError at the line that
    breaks a rule of the op table. Not thread-safe; built once, it can be compiled by many sessions.
    """

    def __init__(self) -> None:
        self._leaves: list[Leaf] = []
        self._nodes: list[Node] = []
        #: Beside each node: where it was built.
        self._sources: list[Source | None] = []
        #: (name, reference)
        self._outputs: list[tuple[str, int]] = []
        #: Arrays of the weights and constants, by the leaf's number.
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self._digests: dict[int, bytes] = {}
        self._names: set[tuple[LeafKind | None, str]] = set()
        self._scopes: list[str] = []
        self._scalars: dict[tuple[str, str], Value] = {}

    def __repr__(self) -> str:
        leaves = counted(len(self._leaves), "leaf", "leaves")
        return (
            f"<Graph {leaves}, {counted(len(self._nodes), 'node')}, {counted(len(self._outputs), 'output')}>"
        )

    # What comes from outside

    def input(self, name: str, shape: Sequence[int] | int, dtype: DTypeArgument) -> Value:
        """A tensor that every run is given."""
        return self._leaf(LeafKind.INPUT, name, _type(dtype, shape))

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Value:
        """A constant tensor with a name.

        The array is not copied (unless it is not contiguous) and must not change while the graph is
        in use: the server knows it by the SHA-256 of its bytes, taken once when it is compiled.
        """
        found = np.asarray(array)
        value = self._leaf(LeafKind.WEIGHT, name, _type(found.dtype, found.shape))
        self._arrays[~value.reference] = np.ascontiguousarray(found).reshape(found.shape)
        return value

    def variable(self, name: str, shape: Sequence[int] | int, dtype: DTypeArgument) -> Value:
        """A tensor that the session keeps under this name, for every plan that names it.

        It begins as zeros; `hg.assign` writes it.
        """
        return self._leaf(LeafKind.VARIABLE, name, _type(dtype, shape))

    def constant(
        self,
        array: np.ndarray[Any, Any] | np.generic | Scalar | Sequence[Any],
        dtype: DTypeArgument | None = None,
    ) -> Value:
        """A tensor of these elements, which are copied.

        Python's floats become f32 and ints i64 unless `dtype` says otherwise; arrays keep theirs.
        """
        found = _as_array(array, dtype)
        type_ = _type(found.dtype, found.shape)
        if (fill := _uniform(found)) is not None and type_.dtype.kind != "quantized":
            return self.full(found.shape, fill, type_.dtype)
        found.flags.writeable = False
        name = self._free_name(LeafKind.WEIGHT, f"constant_{len(self._leaves)}")
        value = self._leaf(LeafKind.WEIGHT, name, type_, scoped=False)
        self._arrays[~value.reference] = found
        return value

    def full(self, shape: Sequence[int] | int, value: Scalar, dtype: DTypeArgument) -> Value:
        """A tensor of one value."""
        type_ = _type(dtype, shape)
        if type_.shape == ():
            return self.scalar(value, type_.dtype)
        return self._fill(type_, value)

    def scalar(self, value: Scalar, dtype: DType) -> Value:
        """A Python scalar as a value of shape (); one node for each data type and value."""
        number = weak_scalar(value, dtype)
        key = (dtype.name, repr(number))
        if key not in self._scalars:
            self._scalars[key] = self._fill(TensorType(dtype), number)
        return self._scalars[key]

    def _fill(self, type_: TensorType, value: Scalar) -> Value:
        number = weak_scalar(value, type_.dtype)
        plain = int(number) if isinstance(number, bool) else number
        attributes = {"shape": type_.shape, "value": plain, "dtype": type_.dtype}
        return self.apply("fill", (), attributes)

    # What is computed and returned

    def apply(
        self, op: str, operands: Sequence[Symbol], attributes: Mapping[str, Any], name: str | None = None
    ) -> Value:
        """A node: an op of the op table on values of this graph. `hg.ops.NAME` is the friendly form."""
        source = caller()
        try:
            type_, complete = infer(op, [operand.type for operand in operands], attributes)
        except HeliographError as error:
            raise error.at(self._origin(op, name, operands, source)) from None
        self._check_graph(operands)
        number = len(self._nodes)
        full_name = self._scoped(name if name is not None else f"{op}_{number}")
        references = tuple(operand.reference for operand in operands)
        self._nodes.append(Node(op, references, type_, complete, full_name))
        self._sources.append(source)
        return Value(self, number, op, full_name, type_)

    def output(self, name: str, value: Value) -> None:
        """Names a value that a run returns."""
        if isinstance(name, Symbol):
            raise invalid("an output's name comes first, then its value", "g.output('y', y)")
        if not isinstance(value, Symbol):
            raise invalid(
                f"output {name!r:.40} is no value of a graph but {type(value).__name__} {value!r:.40}",
                "an output is what an op, g.input, g.weight or g.constant gave",
            )
        self._check_graph([value])
        full_name = self._scoped(_name(name, "output"))
        if (None, full_name) in self._names:
            raise invalid(f"two outputs are named {full_name!r}")
        self._names.add((None, full_name))
        self._outputs.append((full_name, value.reference))

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Everything named inside, leaves and outputs too, gets "name/" in front."""
        self._scopes.append(_name(name, "scope"))
        try:
            yield
        finally:
            self._scopes.pop()

    # For the session

    def freeze(self) -> contract.Graph:
        """The graph as the contract has it: leaves, nodes in order, outputs; weights with digests."""
        count = len(self._leaves)
        leaves = tuple(
            Leaf(leaf.kind, leaf.name, leaf.type, self._digest(number))
            for number, leaf in enumerate(self._leaves)
        )
        nodes = tuple(
            Node(node.op, _renumber(node.operands, count), node.type, node.attributes, node.name)
            for node in self._nodes
        )
        outputs = tuple(Output(name, _renumber((reference,), count)[0]) for name, reference in self._outputs)
        return contract.Graph(leaves, nodes, outputs)

    def weights(self) -> dict[bytes, np.ndarray[Any, Any]]:
        """The arrays of the weights and constants, by digest."""
        return {self._digest(number): array for number, array in self._arrays.items()}

    def source_of(self, number: int) -> str:
        """The line of user code that built a node; empty when there is no such node."""
        return describe(self._sources[number]) if number < len(self._sources) else ""

    def _digest(self, number: int) -> bytes:
        if number not in self._arrays:
            return b""
        if number not in self._digests:
            self._digests[number] = _digest_of(self._arrays[number])
        return self._digests[number]

    # Helpers

    def _leaf(self, kind: LeafKind, name: str, type_: TensorType, *, scoped: bool = True) -> Value:
        found = _name(name, kind.value)
        full_name = self._scoped(found) if scoped else found
        if (kind, full_name) in self._names:
            raise invalid(f"two {kind.value}s are named {full_name!r}")
        self._names.add((kind, full_name))
        self._leaves.append(Leaf(kind, full_name, type_))
        return Value(self, ~(len(self._leaves) - 1), kind.value, full_name, type_)

    def _free_name(self, kind: LeafKind, wanted: str) -> str:
        while (kind, wanted) in self._names:
            wanted += "_"
        return wanted

    def _scoped(self, name: str) -> str:
        return "/".join((*self._scopes, name))

    def _check_graph(self, operands: Sequence[Symbol]) -> None:
        for operand in operands:
            if operand.graph is not self:
                raise invalid(
                    f"{operand!r} belongs to another graph", "build both in one graph", InvalidArgumentError
                )

    def _origin(self, op: str, name: str | None, operands: Sequence[Symbol], source: Source | None) -> Origin:
        return Origin(
            op=op,
            node=len(self._nodes),
            node_name=self._scoped(name) if name else "",
            operands=tuple(operand.type for operand in operands),
            source=describe(source),
        )


def assign(variable: Value, value: Value | Scalar | np.ndarray[Any, Any]) -> Value:
    """Writes a value of exactly the variable's type into it; returns the new value.

    Reads of the variable that were built before see the old value, later ones the new.
    """
    if not isinstance(variable, Symbol) or variable.op != LeafKind.VARIABLE.value:
        raise invalid(
            f"assign to {variable!r:.200}, which is no variable", "make one: g.variable(name, shape, dtype)"
        )
    graph = variable.graph
    if not isinstance(value, Symbol):
        elements = np.asarray(value, variable.dtype.numpy) if isinstance(value, (bool, int, float)) else value
        value = graph.constant(np.asarray(elements))
        if value.shape == ():
            value = graph.apply("broadcast_to", (value,), {"shape": variable.shape})
    return graph.apply("assign", (variable, value), {})


def _renumber(references: tuple[int, ...], leaves: int) -> tuple[int, ...]:
    return tuple(leaves + number if number >= 0 else ~number for number in references)


def _type(dtype: DTypeArgument, shape: Sequence[int] | int) -> TensorType:
    try:
        return tensor_type(dtype, sizes_of(shape))
    except InvalidArgumentError as error:
        raise invalid(error.message, error.advice) from None
    except (TypeError, ValueError) as error:
        raise invalid(str(error)) from None


def _name(name: str, what: str) -> str:
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise invalid(f"{what}: {str(name)[:40]!r} is no name", f"1 to {MAX_NAME} printable characters")
    return name


def _as_array(elements: Any, dtype: DTypeArgument | None) -> np.ndarray[Any, Any]:
    """A copy of the elements, contiguous."""
    plain = not isinstance(elements, (np.ndarray, np.generic))
    found = np.array(elements, order="C")
    if dtype is None and not (plain and found.dtype == np.float64):
        return found
    target = _type(F32 if dtype is None else dtype, ()).dtype
    return found.astype(target.numpy)


def _uniform(array: np.ndarray[Any, Any]) -> Scalar | None:
    """The one element of an array of one element, as a Python scalar that means exactly the same."""
    if array.size != 1 or array.dtype.kind not in "biuf":
        return None
    element: Scalar = array.reshape(()).item()
    return element if isinstance(element, float) or element < 2**63 else None


class _Digests:
    """SHA-256 of arrays that cannot change: those that are read-only, by identity while they live.

    Others are hashed once by each graph, since their owner may write to them between graphs.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], bytes]] = {}
        self._lock = threading.Lock()

    def of(self, array: np.ndarray[Any, Any]) -> bytes:
        known = self._known.get(id(array))
        if known is not None and known[0]() is array:
            return known[1]
        data: Any = array.reshape(-1).view(np.uint8)
        digest = hashlib.sha256(data).digest()
        if _is_frozen(array):
            with self._lock:
                self._known = {key: item for key, item in self._known.items() if item[0]() is not None}
                self._known[id(array)] = (weakref.ref(array), digest)
        return digest


def _is_frozen(array: np.ndarray[Any, Any]) -> bool:
    """Whether nobody can write to the array, nor to one that it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return base is None or isinstance(base, bytes)


_DIGESTS = _Digests()


def _digest_of(array: np.ndarray[Any, Any]) -> bytes:
    return _DIGESTS.of(array) if math.prod(array.shape) else hashlib.sha256().digest()
