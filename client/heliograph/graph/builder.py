"""`hg.Graph` builds a compute graph node by node, and checks every shape at once.

Leaves and nodes have separate numbers while the graph grows, since leaves may follow nodes. A
reference is a node's number or the complement (~) of a leaf's. `_freeze` puts the leaves first, as
the contract requires. Each node keeps the line of user code that built it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import numpy as np

from heliograph.graph.arguments import FIXED_SHAPES, counted, sizes_of
from heliograph.graph.digests import digest_of, is_frozen
from heliograph.graph.promotion import Scalar, weak_scalar
from heliograph.graph.server_weights import ServerWeight
from heliograph.graph.source_lines import Source, caller, describe, invalid
from heliograph.graph.symbol import Symbol, Typed
from heliograph.graph.torch_tensors import bits_of, host_array, is_torch_tensor
from heliograph.graph.value import Value
from heliograph_proto import graph as contract
from heliograph_proto.errors import HeliographError, InvalidArgumentError, Origin
from heliograph_proto.graph import MAX_NAME, Leaf, LeafKind, Node, Output
from heliograph_proto.ops.table import infer
from heliograph_proto.types import F32, DType, DTypeArgument, TensorType, tensor_type

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _leaf_of_a_type(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Answer a call that lacks the name, the shape or the dtype with the right form."""
    form, what = signature(method), method.__name__

    @wraps(method)
    def checked(*arguments: _P.args, **named: _P.kwargs) -> _R:
        try:
            given = form.bind(*arguments, **named).arguments
        except TypeError as error:
            raise invalid(f"g.{what}: {error}", _leaf_form(what)) from None
        if not isinstance(given["name"], str):
            raise invalid(f"g.{what}: {given['name']!r:.40} is no name", _leaf_form(what))
        return method(*arguments, **named)

    return checked


def _leaf_form(what: str) -> str:
    return f"name, shape and dtype: g.{what}('x', (8, 3), 'f32'); {FIXED_SHAPES}"


class Graph:
    """A compute graph under construction.

    `input`, `weight`, `bound_weight`, `variable` and `constant` make values. Operators and the
    functions under `hg.` compute with them. `output` names the results of a run. A line that breaks
    a rule of the op table raises InvalidGraphError. A graph is not thread-safe; once built, any
    number of sessions can compile it.
    """

    def __init__(self) -> None:
        self._leaves: list[Leaf] = []
        self._nodes: list[Node] = []
        #: For each node: the line that built it.
        self._sources: list[Source | None] = []
        #: The line of all nodes inside `built_at`; empty outside.
        self._line = ""
        #: Names and references.
        self._outputs: list[tuple[str, int]] = []
        #: Arrays of the weights and constants, by the leaf's number.
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self._digests: dict[int, bytes] = {}
        #: First elements of variables, by the leaf's number.
        self._initial: dict[int, np.ndarray[Any, Any]] = {}
        #: The weights whose digests were taken of arrays that may change.
        self._changeable: set[int] = set()
        #: Files on the server by the digests of the weights that lie there.
        self._server_files: dict[bytes, str] = {}
        self._names: set[tuple[LeafKind | None, str]] = set()
        self._scopes: list[str] = []
        self._scalars: dict[tuple[str, str], Value] = {}
        #: The nodes that gradients do not flow through, although their op lets them.
        self._stopped: set[int] = set()

    def __repr__(self) -> str:
        leaves = counted(len(self._leaves), "leaf", "leaves")
        return (
            f"<Graph {leaves}, {counted(len(self._nodes), 'node')}, {counted(len(self._outputs), 'output')}>"
        )

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph.graph.notebook_view import graph_view

        return graph_view(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle or a copy, in which source lines are text."""
        return {**self.__dict__, "_sources": [describe(source) for source in self._sources]}

    # Leaves

    @_leaf_of_a_type
    def input(self, name: str, shape: Sequence[int] | int, dtype: DTypeArgument) -> Value:
        """Add an input: a tensor that every run takes."""
        return self._leaf(LeafKind.INPUT, name, _type(dtype, shape))

    def weight(
        self, name: str, array: np.ndarray[Any, Any] | ServerWeight, dtype: DTypeArgument | None = None
    ) -> Value:
        """Add a weight: a constant tensor with a name.

        `array` is a NumPy array, a tensor of PyTorch, or a tensor in a file on the server, which
        has its type already (see `session.server_weights`). `dtype` names a type that NumPy lacks:
        a quantized type such as "q4_0", for uint8 rows of blocks (see `hg.quantize`), or "bf16",
        for its bits in uint16.

        A contiguous array is not copied. Each compile takes its BLAKE3 digest, by which servers
        know it, and so sees a change since the last one; that of a read-only array is taken once.
        It must not change during a compile, which then raises ContentMismatchError.
        """
        if isinstance(array, ServerWeight):
            return self._server_weight(name, array, dtype)
        if isinstance(array, Typed):
            raise invalid(
                f"weight {name!r:.40}: {array!r:.80} is no array",
                "a tensor of a session is named when the graph is compiled: w = g.bound_weight(name, shape, "
                "dtype), then session.compile(g, weights={name: tensor})",
            )
        if is_torch_tensor(array):
            array, element = bits_of(array)
            dtype = "bf16" if dtype is None and element == "bf16" else dtype
        found = np.asarray(array)
        if dtype is not None and isinstance(array, tuple) and found.ndim == 1 and found.dtype.kind == "i":
            advice = (
                "a weight comes with its array; g.bound_weight(name, shape, dtype) is given a tensor later"
            )
            raise invalid(f"weight {name!r}: {array!r:.80} is no array but a shape", advice)
        value = self._leaf(LeafKind.WEIGHT, name, _type_of(found, dtype))
        self._arrays[~value.reference] = np.ascontiguousarray(found).reshape(found.shape)
        return value

    def _server_weight(self, name: str, found: ServerWeight, dtype: DTypeArgument | None) -> Value:
        if dtype is not None and _type(dtype, found.shape) != found.type:
            raise invalid(f"{found.name!r} in {found.file} is {found.type}, not {dtype!r}")
        value = self._leaf(LeafKind.WEIGHT, name, found.type)
        self._digests[~value.reference] = found.digest
        self._server_files[found.digest] = found.file
        return value

    @_leaf_of_a_type
    def bound_weight(self, name: str, shape: Sequence[int] | int, dtype: DTypeArgument) -> Value:
        """Add a weight whose bytes are a tensor of the session, named when the graph is compiled:
        `session.compile(g, weights={name: tensor})`."""
        return self._leaf(LeafKind.WEIGHT, name, _type(dtype, shape))

    @_leaf_of_a_type
    def variable(
        self,
        name: str,
        shape: Sequence[int] | int,
        dtype: DTypeArgument,
        init: np.ndarray[Any, Any] | Scalar | None = None,
    ) -> Value:
        """Add a variable: a tensor that the session keeps under this name for all of its plans.

        It begins with the elements of `init`, which are copied, or as zeros; `hg.assign` writes it.
        A variable that the session has already keeps its elements, whatever `init` is.
        """
        type_ = _type(dtype, shape)
        first = None if init is None else _first_elements(name, type_, init)
        value = self._leaf(LeafKind.VARIABLE, name, type_)
        if first is not None:
            self._initial[~value.reference] = first
        return value

    def constant(
        self,
        array: np.ndarray[Any, Any] | np.generic | Scalar | Sequence[Any],
        dtype: DTypeArgument | None = None,
    ) -> Value:
        """Add a tensor of these elements, which are copied.

        Without `dtype`, Python floats become f32 and ints i64; arrays keep their data type.
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
        """Add a tensor filled with one value."""
        type_ = _type(dtype, shape)
        if type_.shape == ():
            return self._scalar(value, type_.dtype)
        return self._fill(type_, value)

    def _scalar(self, value: Scalar, dtype: DType) -> Value:
        """Return a scalar as a value of shape (): one node for each data type and value."""
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

    # Nodes and outputs

    def apply(
        self, op: str, operands: Sequence[Symbol], attributes: Mapping[str, Any], name: str | None = None
    ) -> Value:
        """Add a node: an op of the op table on values of this graph. `hg.ops.NAME` is simpler."""
        source = self._line or caller()
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
        """Name a value that a run returns."""
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
        """Prefix all names given inside, of leaves and outputs too, with "name/"."""
        self._scopes.append(_name(name, "scope"))
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def built_at(self, line: str) -> Iterator[None]:
        """Give errors of the nodes inside this line, that of a model which is imported. Empty: the
        line that builds each."""
        before, self._line = self._line, line
        try:
            yield
        finally:
            self._line = before

    # Look-ups

    @property
    def inputs(self) -> dict[str, Value]:
        """The inputs by name."""
        return self._of_kind(LeafKind.INPUT)

    @property
    def variables(self) -> dict[str, Value]:
        """The variables by name."""
        return self._of_kind(LeafKind.VARIABLE)

    @property
    def outputs(self) -> dict[str, Value]:
        """The values that a run returns, by the names of the outputs."""
        return {name: self._value(reference) for name, reference in self._outputs}

    def find(self, pattern: str) -> list[Value]:
        """Return the leaves and nodes with names that match a pattern, such as `layer3/*`."""
        references = [*(~leaf for leaf in range(len(self._leaves))), *range(len(self._nodes))]
        values = map(self._value, references)
        return [value for value in values if fnmatchcase(value.name, pattern)]

    def _of_kind(self, kind: LeafKind) -> dict[str, Value]:
        return {
            leaf.name: self._value(~number) for number, leaf in enumerate(self._leaves) if leaf.kind is kind
        }

    def _value(self, reference: int) -> Value:
        if reference < 0:
            leaf = self._leaves[~reference]
            return Value(self, reference, leaf.kind.value, leaf.name, leaf.type)
        node = self._nodes[reference]
        return Value(self, reference, node.op, node.name, node.type)

    # For the session

    def _freeze(self, bound: Collection[int] = ()) -> contract.Graph:
        """Return the graph as the contract has it: leaves, ordered nodes, outputs.

        Weights get digests, except the leaves numbered in `bound`, which are tensors of a session.
        """
        for number in self._changeable.difference(bound):
            self._digests.pop(number, None)
        count = len(self._leaves)
        leaves = tuple(
            Leaf(leaf.kind, leaf.name, leaf.type, b"" if number in bound else self._digest(number))
            for number, leaf in enumerate(self._leaves)
        )
        nodes = tuple(
            Node(node.op, _renumber(node.operands, count), node.type, node.attributes, node.name)
            for node in self._nodes
        )
        outputs = tuple(Output(name, _renumber((reference,), count)[0]) for name, reference in self._outputs)
        return contract.Graph(leaves, nodes, outputs)

    def _freeze_for_file(self) -> tuple[contract.Graph, dict[bytes, np.ndarray[Any, Any]]]:
        """As `_freeze`, with digests of variables' first elements, and all contents by digest."""
        frozen, contents = self._freeze(), self._contents()
        leaves = list(frozen.leaves)
        for number, array in self._initial.items():
            leaves[number] = replace(leaves[number], digest=digest_of(array))
            contents[leaves[number].digest] = array
        return replace(frozen, leaves=tuple(leaves)), contents

    def _initial_by_name(self) -> dict[str, np.ndarray[Any, Any]]:
        return {self._leaves[number].name: array for number, array in self._initial.items()}

    def _outline(self) -> contract.Graph:
        """As `_freeze`, without digests."""
        return self._freeze(range(len(self._leaves)))

    def _contents(self, bound: Collection[int] = ()) -> dict[bytes, np.ndarray[Any, Any]]:
        """The arrays of the weights and constants by digest, without those of `bound` leaves."""
        needed = {number: array for number, array in self._arrays.items() if number not in bound}
        return {self._digest(number): array for number, array in needed.items()}

    def _leaves_of(self, kind: LeafKind) -> dict[str, tuple[int, TensorType]]:
        """The numbers and types of the leaves of a kind, by name."""
        return {
            leaf.name: (number, leaf.type) for number, leaf in enumerate(self._leaves) if leaf.kind is kind
        }

    @property
    def _without_content(self) -> dict[str, int]:
        """The numbers of the weights made by `bound_weight`, by name."""
        weights = self._leaves_of(LeafKind.WEIGHT)
        return {
            name: number
            for name, (number, _) in weights.items()
            if number not in self._arrays and number not in self._digests
        }

    @property
    def _files(self) -> dict[bytes, str]:
        """Files on the server, by the digests of weights that lie only there."""
        here = self._contents()
        return {digest: file for digest, file in self._server_files.items() if digest not in here}

    def _source_of(self, number: int) -> str:
        """The line of user code that built a node; empty for an unknown node."""
        return describe(self._sources[number]) if number < len(self._sources) else ""

    def _digest(self, number: int) -> bytes:
        if number not in self._digests:
            if number not in self._arrays:
                return b""
            array = self._arrays[number]
            self._digests[number] = digest_of(array)
            if not is_frozen(array):
                self._changeable.add(number)
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
    """Write a value of exactly the variable's type into it, and return the new value.

    `variable` may also be a view of one: a slice, a reshape, dimensions in another order, and views
    of those. Reads of the variable that were built before see the old value, later ones the new.
    """
    if not isinstance(variable, Symbol) or not _is_place(variable):
        raise invalid(
            f"assign to {variable!r:.200}, which is no variable, nor a view of one",
            "make one: g.variable(name, shape, dtype)",
        )
    graph = variable.graph
    if not isinstance(value, Symbol):
        if variable.dtype.kind == "quantized":
            raise invalid(
                f"assign to {variable!r:.200}, whose elements are blocks",
                "assign a value: hg.astype(x, dtype), or g.weight(name, hg.quantize(x, dtype), dtype=dtype)",
            )
        elements = np.asarray(value, variable.dtype.numpy) if isinstance(value, (bool, int, float)) else value
        value = graph.constant(host_array(elements))
        if value.shape == ():
            value = graph.apply("broadcast_to", (value,), {"shape": variable.shape})
    target, whole = variable, value
    while target.op != LeafKind.VARIABLE.value:
        target, whole = _replaced(target, whole)
    assigned = graph.apply("assign", (target, whole), {})
    return assigned if variable is target else _read(variable)


def _is_place(value: Value) -> bool:
    """True for a variable, and for a view of one that can be assigned to."""
    while value.op in ("slice", "reshape", "permute"):
        value = _viewed(value)
    return value.op == LeafKind.VARIABLE.value


def _viewed(view: Value) -> Value:
    """Return the value that a view is of."""
    graph = view.graph
    return graph._value(graph._nodes[view.reference].operands[0])


def _read(place: Value) -> Value:
    """Return the present value of a variable or of a view of one."""
    if place.op == LeafKind.VARIABLE.value:
        return place
    return place.graph.apply(
        place.op, (_read(_viewed(place)),), place.graph._nodes[place.reference].attributes
    )


def _replaced(view: Value, value: Value) -> tuple[Value, Value]:
    """Return what a view is of, and its value with the elements of the view replaced."""
    graph, base = view.graph, _viewed(view)
    attributes = graph._nodes[view.reference].attributes
    if value.type != view.type:
        raise invalid(
            f"assign of {value.type} to a view of {view.type}: the types must be equal",
            "convert the value with hg.astype, hg.reshape or hg.broadcast_to",
        )
    if view.op == "slice":
        block = {"start": attributes["start"], "step": attributes["step"]}
        return base, graph.apply("set", (_read(base), value), block)
    if view.op == "reshape":
        return base, graph.apply("reshape", (value,), {"shape": base.shape})
    axes = attributes["axes"]
    order = tuple(axes.index(axis) for axis in range(len(axes)))
    return base, graph.apply("permute", (value,), {"axes": order})


def _renumber(references: tuple[int, ...], leaves: int) -> tuple[int, ...]:
    return tuple(leaves + number if number >= 0 else ~number for number in references)


def _type(dtype: DTypeArgument, shape: Sequence[int] | int) -> TensorType:
    try:
        sizes = sizes_of(shape)
        if any(size < 0 for size in sizes):
            raise invalid(f"shape {sizes}: a dimension cannot be negative", FIXED_SHAPES)
        return tensor_type(dtype, sizes)
    except InvalidArgumentError as error:
        raise invalid(error.message, error.advice) from None
    except (TypeError, ValueError) as error:
        raise invalid(str(error)) from None


def _type_of(array: np.ndarray[Any, Any], dtype: DTypeArgument | None) -> TensorType:
    """The tensor type of an array's elements."""
    if dtype is None:
        return _type(array.dtype, array.shape)
    wanted = _type(dtype, (0,)).dtype
    is_bfloat16 = wanted.name == "bf16" and array.dtype.name == "bfloat16"
    if array.dtype != wanted.storage and not is_bfloat16:
        raise invalid(
            f"an array of {array.dtype} as {wanted}, which is stored as {wanted.storage}",
            f"quantize it first: hg.quantize(array, '{wanted}')"
            if wanted.kind == "quantized"
            else f"convert it, array.astype('{wanted.storage}'); dtype= says of bits what they are",
        )
    if wanted.kind != "quantized":
        return _type(wanted, array.shape)
    if not array.ndim or array.shape[-1] % wanted.block_bytes:
        raise invalid(
            f"an array of shape {array.shape}: its rows are no whole blocks of {wanted.block_bytes} bytes"
        )
    return _type(wanted, (*array.shape[:-1], array.shape[-1] // wanted.block_bytes * wanted.block_size))


def _first_elements(name: str, type_: TensorType, init: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a variable's first elements in the storage of its type."""
    wanted, found, shape = type_.dtype, np.asarray(init), type_.storage_shape
    if found.dtype.name == "bfloat16":
        found = found.astype(np.float32)
    if wanted.name == "bf16" and found.dtype.kind in "fi":
        # Imported here, since few graphs need it.
        from heliograph_proto.quantization.blocks import to_bits

        found = to_bits(found.astype(np.float32))
    fits = wanted.kind != "quantized" and np.can_cast(found.dtype, wanted.storage, "same_kind")
    if found.dtype != wanted.storage and not fits:
        raise invalid(
            f"variable {name!r:.40}: init has {found.dtype} elements, for {wanted}",
            f"quantize it first: hg.quantize(array, '{wanted}')"
            if wanted.kind == "quantized"
            else f"convert it: array.astype('{wanted.storage}')",
        )
    if found.shape not in ((), shape):
        raise invalid(
            f"variable {name!r:.40}: init has shape {found.shape}, the variable has {shape}",
            "give all elements, or one number for all of them",
        )
    first = np.empty(shape, wanted.storage)
    first[...] = found
    first.flags.writeable = False
    return first


def _name(name: str, what: str) -> str:
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise invalid(f"{what}: {str(name)[:40]!r} is no name", f"1 to {MAX_NAME} printable characters")
    return name


def _as_array(elements: Any, dtype: DTypeArgument | None) -> np.ndarray[Any, Any]:
    """A copy of the elements, contiguous."""
    if is_torch_tensor(elements):
        elements = host_array(elements)
    plain = not isinstance(elements, (np.ndarray, np.generic))
    found = np.array(elements, order="C")
    if dtype is None and not (plain and found.dtype == np.float64):
        return found
    target = _type(F32 if dtype is None else dtype, ()).dtype
    return found.astype(target.numpy)


def _uniform(array: np.ndarray[Any, Any]) -> Scalar | None:
    """The element of an array of one, as a Python scalar of exactly the same value."""
    if array.size != 1 or array.dtype.kind not in "biuf":
        return None
    element: Scalar = array.reshape(()).item()
    return element if isinstance(element, float) or element < 2**63 else None
