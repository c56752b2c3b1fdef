"""The walk of an ONNX graph, node by node, into a graph of Heliograph.

A name of the ONNX graph stands for a value of the device, or for an array of the host as long as no
input of a run is in it. The walk runs subgraphs and functions as deep as they are nested, within
bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.lowerings.names import Names
from heliograph.onnx import checks, functions, ops
from heliograph.onnx.bounds import NEEDS_SIZE, bounded_axis
from heliograph.onnx.elements import (
    DIRECT,
    NARROW,
    Array,
    Bounded,
    Coded,
    Item,
    Maps,
    decode,
    element_of_array,
    encode,
    name_of,
    storage_of,
)
from heliograph.onnx.errors import broken, label, refusal
from heliograph.onnx.folding import fold
from heliograph.onnx.node import Body, Node
from heliograph.onnx.ports import Port, Spec, TensorSpec, elements_in, input_port, output_port
from heliograph.onnx.rules import MOVES, REFUSED, Result, find
from heliograph.onnx.stages import Stage, Stages
from heliograph.onnx.tensors import Tensors, constant_of

#: The most nodes that one import walks, with those of unrolled loops and of functions.
MOST_NODES = 100_000
#: The most elements of one tensor.
MOST_ELEMENTS = 2**32
#: Larger constants are weights, which are uploaded once, and keep the names of the model.
_SMALL = 256
_MISSING: Any = object()
_IN_BODY = ", in its body: "
#: The exceptions of a rule for a model that breaks ONNX's rules.
_FAULTS = (
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    MemoryError,
    RuntimeError,
)

assert ops


@dataclass(slots=True)
class Program:
    """The graphs made of a model, and how to feed the first and read the results of the last."""

    stages: list[Stage]
    inputs: dict[str, Port]
    outputs: dict[str, Port]
    #: The inputs whose values the graph was made for.
    fixed: dict[str, Array]
    #: The graph's input with a seed and the number of the run, if a node makes random numbers.
    random_state: str | None = None


@dataclass(slots=True)
class Shared:
    """The state that all levels of one import share."""

    tensors: Tensors
    functions: functions.Functions
    #: True if no loop may be a graph by itself.
    is_one: bool = False
    stages: Stages = field(default_factory=Stages)
    names: Names = field(default_factory=Names)
    #: Constants of a graph, by the identity of it and of their array, which is kept.
    lifted: dict[tuple[int, int], tuple[Array, hg.Value]] = field(default_factory=dict)
    nodes: int = 0
    depth: int = 0
    #: The input with a seed and the number of the run, if a node makes random numbers.
    state: tuple[str, hg.Value] | None = None
    random_nodes: int = 0

    @property
    def graph(self) -> hg.Graph:
        """The graph of the last stage."""
        return self.stages.last.graph

    def count(self, node: NodeProto) -> None:
        """Count a node. Raises UnsupportedError beyond the bound."""
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise refusal(node, f"loops and functions unroll to more than {MOST_NODES:,} nodes")

    def random(self, seed: int | None) -> tuple[hg.Value, hg.Value]:
        """Return a seed of its own for a node without one, and the counter."""
        if self.state is None:
            made = self.stages.all[0].graph.input(self.names.free("random_state"), (2,), "i64")
            self.state = made.name, made
        state = self.stages.here(self.state[1])
        assert isinstance(state, hg.Value)
        if seed is None:
            self.random_nodes += 1
            first = state[0] + self.random_nodes
        else:
            first = self.graph.constant(np.array(seed, np.int64))
        if self.stages.turn is not None:
            # Each turn of a loop draws others.
            first = first + self.stages.turn * MOST_NODES
        return first, state[1]

    def constant(self, array: Array, name: str) -> hg.Value:
        """Return a constant as a value of the graph, the same for the same array."""
        key = id(self.graph), id(array)
        if key not in self.lifted:
            is_weight = array.size > _SMALL and name != ""
            value = (
                self.graph.weight(self.names.free(name), array) if is_weight else self.graph.constant(array)
            )
            self.lifted[key] = (array, value)
        return self.lifted[key][1]


class Scope:
    """One level of an ONNX graph: the main graph, a subgraph or the body of a function."""

    def __init__(
        self, shared: Shared, opsets: Mapping[str, int], parent: Scope | None = None, *, is_main: bool = False
    ) -> None:
        self.shared = shared
        self.opsets = opsets
        self.parent = parent
        self.is_main = is_main
        self.items: dict[str, Item] = {}
        #: The inputs of the main graph that decide each name.
        self.origins: dict[str, frozenset[str]] = {}

    # For rules

    @property
    def graph(self) -> hg.Graph:
        return self.shared.graph

    def opset(self, domain: str) -> int:
        """The version of a domain."""
        other = "ai.onnx" if domain == "" else ""
        return self.opsets.get(domain) or self.opsets.get(other, 1)

    def origin(self, name: str) -> frozenset[str]:
        """The inputs of the main graph that decide a name."""
        level: Scope | None = self
        while level is not None:
            if name in level.origins:
                return level.origins[name]
            level = level.parent
        return frozenset()

    def lift(self, item: Item, node: Node, name: str = "") -> hg.Value:
        """Return an item as a value of the graph. Raises UnsupportedError for other element
        types."""
        if isinstance(item, hg.Value):
            return item
        if isinstance(item, Bounded):
            raise node.refuse(NEEDS_SIZE)
        if item is None or isinstance(item, (list, Maps)):
            raise node.broken(f"{name!r} is a sequence or nothing, where a tensor is needed")
        element = item.element if isinstance(item, Coded) else element_of_array(item)
        if element not in DIRECT or isinstance(item, Coded):
            what = NARROW[element].name if element in NARROW else name_of(element)
            raise node.refuse(f"it computes with elements of type {what}, which no device has")
        return self.shared.constant(item, name)

    def tensor(self, tensor: TensorProto) -> Array:
        """Return the elements of a constant."""
        return self.shared.tensors.read(tensor)

    def random(self, seed: int | None) -> tuple[hg.Value, hg.Value]:
        """Return the seed and the counter of random numbers."""
        return self.shared.random(seed)

    @property
    def may_loop(self) -> bool:
        """True where a loop may be a stage by itself: no rule holds values of another one."""
        return self.is_main and self.shared.depth == 0 and not self.shared.is_one

    def here(self, item: Item) -> Item:
        """Return an item whose values are in the graph that nodes are added to."""
        return self.shared.stages.here(item)

    def loop(
        self, node: Node, steps: int, condition: Item, state: Sequence[Item], body: Body
    ) -> tuple[Item, ...]:
        """Run a body in a loop on a server, as a stage by itself."""
        stages, flag = self.shared.stages, None
        stages.begin()
        turn = stages.take(np.zeros(1, np.int64))
        before = [stages.take(_tensor(one, node)) for one in state]
        if not isinstance(condition, np.ndarray):
            flag = hg.reshape(stages.take(_tensor(condition, node)), ())
        inputs = list(stages.last.takes)
        stages.turn = hg.reshape(turn, ())
        going, found, parts = body(stages.turn, before)
        stages.turn = None
        after = [self.lift(one, node) for one in found]
        for old, new in zip(before, after, strict=True):
            if old.type != new.type:
                raise node.refuse(f"its state changes from {old.type} to {new.type} in {steps:,} turns")
        rows = [self.lift(one, node) for one in parts]
        if any(steps * one.size > MOST_ELEMENTS for one in rows):
            raise node.refuse(f"its results of {steps:,} turns are too large")
        stacks = [stages.stack(one, turn, steps) for one in rows]
        goes = None if isinstance(going, np.ndarray) and going.all() else self.lift(going, node)
        goes = goes if goes is None else hg.reshape(goes, ())
        if flag is not None:
            after = [hg.where(flag, new, old) for new, old in zip(after, before, strict=True)]
            goes = flag if goes is None else flag & goes
        count = turn + (1 if flag is None else cast(flag, "i64"))
        ends = [count, *after, *([] if flag is None or goes is None else [goes])]
        stages.loop(steps, inputs, ends, goes)
        stages.begin()
        results = [stages.here(one) for one in after]
        total = None if goes is None else hg.reshape(self.lift(stages.here(count), node), ())
        for name, row in zip(stacks, rows, strict=True):
            stacked = hg.reshape(stages.stacked(name, row, steps), (steps, *row.shape))
            results.append(stacked if total is None else Bounded(stacked, 0, total))
        return tuple(results)

    def subgraph(self, graph: GraphProto, inputs: Sequence[Item], node: Node) -> list[Item]:
        """Run a subgraph with these inputs, and return its outputs."""
        if len(inputs) != len(graph.input):
            raise node.broken(f"its body has {len(graph.input)} inputs, and {len(inputs)} are given")
        inner = Scope(self.shared, self.opsets, self)
        decided = self._origin_of(node.proto)
        for one, item in zip(graph.input, inputs, strict=True):
            inner.bind(one.name, item, decided)
        inner.add_initializers(graph)
        self._enter(node.proto)
        try:
            inner.walk(graph.node)
        finally:
            self.shared.depth -= 1
        return [inner.look_up(one.name, node.proto) for one in graph.output]

    # The walk

    def bind(self, name: str, item: Item, origin: frozenset[str]) -> None:
        """Let a name stand for an item."""
        self.items[name] = item
        self.origins[name] = origin

    def add_initializers(self, graph: GraphProto) -> None:
        """Bind the constants of a graph."""
        for tensor in graph.initializer:
            if tensor.name in self.items:
                raise hg.InvalidModelError(f"two constants or inputs are named {tensor.name!r:.80}")
            read = self.shared.tensors.read_main if self.is_main else self.shared.tensors.read
            self.bind(tensor.name, read(tensor), frozenset())
        for sparse in graph.sparse_initializer:
            self.bind(sparse.values.name, self.shared.tensors.read_sparse(sparse), frozenset())

    def look_up(self, name: str, node: NodeProto) -> Item:
        """Return what a name stands for. Raises InvalidModelError if it is not computed yet."""
        if name == "":
            return None
        level: Scope | None = self
        while level is not None:
            found = level.items.get(name, _MISSING)
            if found is not _MISSING:
                return self.shared.stages.here(found)
            level = level.parent
        raise broken(
            node, f"it reads {name!r:.80}, which nothing before it computes: the graph has a cycle or a gap"
        )

    def walk(self, nodes: Iterable[NodeProto]) -> None:
        """Run nodes in their order."""
        for node in nodes:
            self.shared.count(node)
            items = [self.look_up(name, node) for name in node.input]
            origin = self._origin_of(node)
            results = self._checked_results(node, items)
            if len(results) < len([name for name in node.output if name]):
                raise broken(node, f"it has {len(node.output)} outputs, and the op gives {len(results)}")
            for name, item in zip(node.output, results, strict=False):
                if name and name in self.items:
                    raise broken(node, f"its output {name!r:.80} is computed twice")
                if name:
                    self.bind(name, item, origin)

    def _origin_of(self, node: NodeProto) -> frozenset[str]:
        """The inputs of the main graph that decide a node's outputs."""
        names = set(node.input)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names |= _captured(attribute.g)
        return frozenset().union(*(self.origin(name) for name in names if name))

    def _checked_results(self, node: NodeProto, items: list[Item]) -> Sequence[Item]:
        """As `_results`; faults of a damaged node become errors that name it."""
        try:
            return self._results(node, items)
        except (hg.HeliographError, RecursionError):
            raise
        except _FAULTS as error:
            raise broken(node, f"{type(error).__name__}: {error!s:.300}") from error

    def _results(self, node: NodeProto, items: list[Item]) -> Sequence[Item]:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            return [constant_of(node, self.shared.tensors)]
        is_own = (node.domain, node.op_type) in self.shared.functions
        if not is_own:
            folded = fold(node, items, self.opsets)
            if folded is not None:
                return folded
        rule = None if is_own else find(node.domain, node.op_type)
        if rule is None:
            return self._inlined(node, items)
        try:
            return self._by_rule(node, items)
        except (hg.UnsupportedError, hg.InvalidGraphError) as error:
            reason = error if isinstance(error, hg.UnsupportedError) else refusal(node, error.message)
        if node.op_type in REFUSED or not functions.has_body(node, {}, self.opsets):
            raise reason
        try:
            return self._inlined(node, items)
        except (hg.UnsupportedError, hg.InvalidModelError):
            raise reason from None

    def _by_rule(self, node: NodeProto, items: list[Item]) -> Sequence[Item]:
        rule = find(node.domain, node.op_type)
        assert rule is not None
        narrow = _narrow_of(items) if node.op_type in MOVES else None
        given = [_codes(item, narrow) for item in items] if narrow else items
        bounded = next((one for one in items if isinstance(one, Bounded)), None)
        axis = None
        if bounded is not None:
            given = [one.value if isinstance(one, Bounded) else one for one in items]
            axis = bounded_axis(Node(node, given, self), items)
            if axis is None:
                raise refusal(node, NEEDS_SIZE)
        with self._named(node):
            result: Result = rule(Node(node, given, self))
        results = result if isinstance(result, tuple) else (result,)
        for one in results:
            if isinstance(one, hg.Value) and one.size > MOST_ELEMENTS:
                raise refusal(node, f"it makes a tensor of shape {one.shape}, which is too large")
        if bounded is not None and axis is not None:
            return [
                Bounded(one, axis, bounded.count) if isinstance(one, hg.Value) else one for one in results
            ]
        return [_coded(one, *narrow) for one in results] if narrow else results

    def _named(self, node: NodeProto) -> Any:
        """Name what a node builds after it."""
        name = node.name[:200]
        return self.graph.scope(name) if self.is_main and name and name.isprintable() else nullcontext()

    def _inlined(self, node: NodeProto, items: list[Item]) -> Sequence[Item]:
        """Run the body of a function."""
        function = functions.body_of(node, items, self.shared.functions, self.opsets)
        if function is None:
            raise refusal(node, REFUSED.get(node.op_type, "there is no rule for this op"))
        imports = {one.domain: one.version for one in function.opset_import}
        inner = Scope(self.shared, {**self.opsets, **imports})
        padded = [*items, *[None] * (len(function.input) - len(items))]
        for place, (name, item) in enumerate(zip(function.input, padded, strict=False)):
            given = place < len(node.input) and node.input[place] != ""
            inner.bind(name, item, self.origin(node.input[place]) if given else frozenset())
        attributes = functions.attributes_of(node, function)
        self._enter(node)
        try:
            inner.walk(functions.bound(one, attributes) for one in function.node)
        except (hg.UnsupportedError, hg.InvalidModelError) as error:
            # The outermost and the innermost node are named.
            reason = error.message.rpartition(_IN_BODY)[2]
            raise type(error)(f"{label(node)}{_IN_BODY}{reason}", advice=error.advice) from None
        finally:
            self.shared.depth -= 1
        # A body need not compute the outputs that the node does not name.
        wanted = [
            place < len(node.output) and node.output[place] != "" for place in range(len(function.output))
        ]
        return [
            inner.look_up(name, node) if is_wanted else None
            for name, is_wanted in zip(function.output, wanted, strict=True)
        ]

    def _enter(self, node: NodeProto) -> None:
        """Go one level deeper. Raises UnsupportedError beyond the bound."""
        if self.shared.depth >= checks.MOST_DEPTH:
            raise refusal(node, f"functions and subgraphs are nested deeper than {checks.MOST_DEPTH}")
        self.shared.depth += 1


def _tensor(item: Item, node: Node) -> hg.Value | Array:
    if isinstance(item, np.ndarray) and element_of_array(item) in DIRECT:
        return item
    if not isinstance(item, hg.Value):
        raise node.refuse("its state is not all tensors of device types, and it has many turns")
    return item


def _captured(graph: GraphProto) -> set[str]:
    """The names that a subgraph reads."""
    found = {one.name for one in graph.output}
    for node in graph.node:
        found |= set(node.input)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found |= _captured(attribute.g)
    return found


_Narrow: TypeAlias = "tuple[int, Array | None]"


def _narrow_of(items: Sequence[Item]) -> _Narrow | None:
    """The narrow element type of a node's inputs, and the names of strings; None if there is none."""
    for item in items:
        if isinstance(item, Coded):
            return item.element, item.names
        if isinstance(item, np.ndarray) and (element := element_of_array(item)) in NARROW:
            return element, None
        if isinstance(item, np.ndarray) and element == TensorProto.STRING:
            return element, np.unique(item.astype(str)).astype(object)
    return None


def _codes(item: Item, narrow: _Narrow) -> Item:
    """Return the codes of an item of this type, and others as they are. Strings of other names stay
    strings, which are refused."""
    element, names = narrow
    if isinstance(item, Coded):
        return item.codes if item.names is names else item
    if not isinstance(item, np.ndarray):
        return item
    if names is not None and element_of_array(item) == element and np.isin(item, names).all():
        return np.searchsorted(names.astype(str), item.astype(str)).astype(np.int64)
    return encode(item)


def _coded(item: Item, element: int, names: Array | None = None) -> Item:
    if isinstance(item, hg.Value):
        return Coded(item, element, names)
    if names is not None and isinstance(item, np.ndarray):
        return names[item]
    return decode(item, element) if isinstance(item, np.ndarray) else item


def opsets_of(model: ModelProto) -> dict[str, int]:
    """Return the versions of the domains that a model uses."""
    return {one.domain: one.version for one in model.opset_import} or {"": 1}


def functions_of(model: ModelProto) -> dict[tuple[str, str], FunctionProto]:
    """Return the functions of a model."""
    return {(one.domain, one.name): one for one in model.functions}


def build(
    model: ModelProto,
    tensors: Tensors,
    specs: Mapping[str, Spec],
    fixed: Mapping[str, Array],
    *,
    is_one: bool = False,
) -> Program:
    """Make graphs of a model for inputs of these specs, or only one.

    `fixed`: values of inputs that decide shapes. Raises UnsupportedError, InvalidModelError, and
    NeedsValue for an input that must be fixed.
    """
    shared = Shared(tensors, functions_of(model), is_one)
    main = Scope(shared, opsets_of(model), is_main=True)
    main.add_initializers(model.graph)
    program = Program(shared.stages.all, {}, {}, dict(fixed))
    outputs = Names()
    for one in model.graph.input:
        if one.name in main.items:
            continue
        if one.name in fixed:
            main.bind(one.name, np.asarray(fixed[one.name]), frozenset([one.name]))
            continue
        spec = specs[one.name]
        port, item = _input(one.name, spec, shared)
        program.inputs[one.name] = port
        main.bind(one.name, item, frozenset([one.name]))
    try:
        main.walk(model.graph.node)
    except RecursionError:
        raise hg.InvalidModelError("functions and subgraphs are nested too deep") from None
    for one in model.graph.output:
        if one.name in program.outputs:
            raise hg.InvalidModelError(f"two outputs are named {one.name!r:.80}")
        item = main.look_up(one.name, NodeProto(name=one.name, op_type="output"))
        program.outputs[one.name] = output_port(item, one.name, shared.graph, outputs)
    program.random_state = shared.state and shared.state[0]
    return program


def _input(name: str, spec: Spec, shared: Shared) -> tuple[Port, Item]:
    elements = set(elements_in(spec))
    if unknown := [one for one in elements if storage_of(one) is None]:
        raise hg.UnsupportedError(f"input {name!r:.80}: there is no data type for {name_of(unknown[0])}")
    if isinstance(spec, TensorSpec) and math.prod(spec.shape) > MOST_ELEMENTS:
        raise hg.UnsupportedError(f"input {name!r:.80} of shape {list(spec.shape)} is too large")
    element = next(iter(elements), 1)
    port, item = input_port(spec, name, shared.graph, shared.names, storage_of(element) or "f32")
    return port, _all_coded(item, element) if element in NARROW else item


def _all_coded(item: Item, element: int) -> Item:
    return [_all_coded(one, element) for one in item] if isinstance(item, list) else _coded(item, element)
