"""`hg.compare`: one graph on two devices, node by node.

    comparison = hg.compare(graph, gpu_session, (cpu_session, "cpu0"))
    for row in comparison.worst(5):
        print(row)

Each node is computed by itself on both devices from the same operands, the first device's results.
A wrong op is therefore found itself, not the nodes behind it. With `nodes`, the whole graph runs on
both devices, which shows errors of fusion and of packed weights. ggml's counterpart is
`ggml_backend_compare_graph_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from heliograph import raw
from heliograph.comparison.differences import Difference, difference
from heliograph.comparison.inputs import check_names, checked, index_bounds, seeded
from heliograph.comparison.report import ComparedNode, Comparison, Verdict
from heliograph.comparison.runner import DeviceSide, SideArgument, attempt
from heliograph.comparison.units import ComparedUnit, last_uses, units, with_outputs, without_variables
from heliograph.graph.builder import Graph
from heliograph.graph.frozen import thaw
from heliograph.graph.server_weights import check_here
from heliograph.graph.value import Value
from heliograph.tensor import Tensor
from heliograph_proto import graph as contract
from heliograph_proto.errors import HeliographError, InvalidArgumentError, UnsupportedError
from heliograph_proto.graph import LeafKind
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import TensorType

Array = np.ndarray[Any, Any]
#: Patterns of names as in fnmatch, or what says of a value whether it is wanted.
Nodes = str | Iterable[str] | Callable[[Value], bool]


def compare(
    graph: Graph,
    a: SideArgument,
    b: SideArgument,
    inputs: Mapping[str, Any] | None = None,
    nodes: Nodes | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    on_node: Callable[[ComparedNode], bool | None] | None = None,
    timeout: float | None = None,
) -> Comparison:
    """Compute a graph on two devices and compare the results, node by node.

    Without `nodes`, each node is computed by itself, with the views in front of it; views and
    assignments are not compared. With `nodes`, the whole graph runs, and the chosen values are
    compared. Errors add up along a graph, so each value may then differ by the largest tolerance of
    the nodes before it, and a server that splits graphs over devices does so.

    Args:
        a: the reference: a session (whose URL may name a device), or a pair of session and device.
        b: the other side, likewise.
        nodes: patterns of names, or a function of a value.
        inputs: arrays by name, also for bound weights. Missing ones are random with `seed`:
            floats from -1 to 1, small integers, indices in range.
        variables: arrays by name, by default their first elements. The sessions' own variables are
            neither read nor written.
        tolerance: the largest error, by default that of each node's op. Integers and truth values
            must be equal.
        on_node: a callback for each row; it ends the comparison by returning False.
        timeout: seconds for each step.

    Raises:
        InvalidInputError, InvalidArgumentError: an argument does not fit.
        ConnectionError: a side is gone.
        HeliographError: with `nodes`, any error of compiling and running the graph.
    """
    if not isinstance(graph, Graph):
        raise InvalidArgumentError(f"{graph!r:.80} is no graph", advice="hg.compare(graph, a, b)")
    check_here(graph)
    frozen, sides = graph._freeze(), (DeviceSide(a, timeout), DeviceSide(b, timeout))
    first = {**graph._initial_by_name(), **(variables or {})}
    leaves = _leaf_arrays(frozen, graph._contents(), inputs or {}, first, seed)
    work = _Work(without_variables(frozen), frozen, leaves, sides, tolerance)
    found = work.by_node() if nodes is None else work.whole(_chosen(graph, frozen, nodes), graph._contents())
    rows, stopped = [], False
    try:
        for row in found:
            rows.append(row)
            if on_node is not None and on_node(row) is False:
                stopped = True
                break
    finally:
        for side in sides:
            side.close()
    return Comparison(sides[0].name, sides[1].name, tuple(rows), stopped)


@dataclass(frozen=True, slots=True)
class _Work:
    """A graph without state, and its two sides."""

    graph: contract.Graph
    #: The original graph, for names and ops.
    original: contract.Graph
    leaves: Mapping[int, Array]
    sides: tuple[DeviceSide, DeviceSide]
    tolerance: float | None
    #: In a run of the whole graph: what each node may differ by, with what comes before it.
    inherited: dict[int, float] = field(default_factory=dict)

    def by_node(self) -> Iterator[ComparedNode]:
        """Compare every computing node by itself."""
        found = list(units(self.graph))
        needed_until = last_uses(found)
        plans_until = {unit.key: place for place, unit in enumerate(found)}
        for place, unit in enumerate(found):
            value = len(self.graph.leaves) + unit.number
            yield self._compared(unit, value, keep=value in needed_until)
            for side in self.sides:
                for operand in unit.inputs:
                    if needed_until[operand] == place:
                        side.drop(operand)
                if plans_until[unit.key] == place:
                    side.forget(unit.key)

    def whole(self, chosen: Collection[int], weights: Mapping[bytes, Array]) -> Iterator[ComparedNode]:
        """Compare the chosen nodes of a run of the whole graph."""
        cut = thaw(with_outputs(self.graph, list(chosen)), weights)
        # A node passes on the error of its operands, also if it only moves data.
        self.inherited.update(enumerate(self._added_up()))
        leaves = enumerate(self.graph.leaves)
        inputs = {leaf.name: self.leaves[n] for n, leaf in leaves if leaf.kind is LeafKind.INPUT}
        outputs = [side.run(cut, inputs) for side in self.sides]
        for number in chosen:
            pair = [found.pop(str(number)) for found in outputs]
            yield self._row(number, [partial(self._take, tensor) for tensor in pair])[0]

    def _added_up(self) -> list[float]:
        """For each node, the largest tolerance of the nodes before it and itself."""
        found: list[float] = []
        leaves = len(self.original.leaves)
        for number, node in enumerate(self.original.nodes):
            before = (found[value - leaves] for value in node.operands if value >= leaves)
            found.append(max((self._tolerance(number), *before)))
        return found

    def _compared(self, unit: ComparedUnit, value: int, *, keep: bool) -> ComparedNode:
        """Compute a unit on both sides; a value that is needed later is then the reference's on
        both."""
        if not all(self._has(operand) for operand in unit.inputs):
            return self._node(unit.number, Verdict.SKIPPED, note="no device computed its operands")
        started = [attempt(partial(side.start, unit)) for side in self.sides]
        tensors: list[Tensor | HeliographError] = [
            run if isinstance(run, HeliographError) else attempt(partial(_result, run, side.timeout))
            for run, side in zip(started, self.sides, strict=True)
        ]
        row, arrays = self._row(unit.number, [partial(self._take, tensor) for tensor in tensors])
        if keep:
            self._keep(value, unit.node.type, tensors, arrays)
        return row

    def _has(self, value: int) -> bool:
        """True if both sides have a value; leaves are sent when they are first needed."""
        if value in self.leaves and not self.sides[0].holds(value):
            for side in self.sides:
                side.hold(value, side.put(self.leaves[value], self.graph.type_of(value)))
        return self.sides[0].holds(value)

    def _keep(
        self,
        value: int,
        type_: TensorType,
        tensors: list[Tensor | HeliographError],
        arrays: list[Array | None],
    ) -> None:
        reference = next((array for array in arrays if array is not None), None)
        if reference is None:
            return
        for side, tensor, array in zip(self.sides, tensors, arrays, strict=True):
            if isinstance(tensor, Tensor) and array is not None and _same_bytes(array, reference):
                side.hold(value, tensor)
            else:
                side.hold(value, side.put(reference, type_))

    def _take(self, tensor: Tensor | HeliographError) -> Array:
        if isinstance(tensor, HeliographError):
            raise tensor
        return raw.get(tensor, self.sides[0].timeout)

    def _row(
        self, number: int, results: list[Callable[[], Array]]
    ) -> tuple[ComparedNode, list[Array | None]]:
        """Return a node's row and its results on both sides."""
        found = [attempt(result) for result in results]
        arrays = [None if isinstance(one, HeliographError) else one for one in found]
        errors = [
            (side.name, one)
            for side, one in zip(self.sides, found, strict=True)
            if isinstance(one, HeliographError)
        ]
        if errors:
            unsupported = all(isinstance(error, UnsupportedError) for _, error in errors)
            verdict = Verdict.UNSUPPORTED if unsupported else Verdict.FAILED
            note = "; ".join(f"{name}: {error.message}" for name, error in errors)
            return self._node(number, verdict, note=note), arrays
        a, b = (array for array in arrays if array is not None)
        apart = difference(a, b, self.graph.nodes[number].type.dtype)
        verdict = Verdict.OK if apart.within(self._tolerance(number)) else Verdict.DIFFERS
        return self._node(number, verdict, apart), arrays

    def _node(
        self, number: int, verdict: Verdict, apart: Difference | None = None, note: str = ""
    ) -> ComparedNode:
        node, tolerance = self.original.nodes[number], self._tolerance(number)
        name = node.name or f"{node.op}_{number}"
        return ComparedNode(number, name, node.op, node.type, tolerance, verdict, apart, note)

    def _tolerance(self, number: int) -> float:
        """The tolerance of a node; 0 for types without fractions."""
        node = self.original.nodes[number]
        if node.type.dtype.kind not in ("float", "quantized"):
            return 0.0
        if self.tolerance is not None:
            return self.tolerance
        if number in self.inherited:
            return self.inherited[number]
        return OPS[node.op].tolerance_for([*map(self.original.type_of, node.operands)], node.type)


def _same_bytes(a: Array, b: Array) -> bool:
    return a is b or np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


def _result(run: Any, timeout: float | None) -> Tensor:
    tensor: Tensor = run.result(timeout)["y"]
    return tensor


def _leaf_arrays(
    graph: contract.Graph,
    weights: Mapping[bytes, Array],
    inputs: Mapping[str, Any],
    variables: Mapping[str, Any],
    seed: int,
) -> dict[int, Array]:
    """The elements of every leaf, by value number. Raises InvalidInputError."""
    asked = [leaf for leaf in graph.leaves if not leaf.digest and leaf.kind is not LeafKind.VARIABLE]
    check_names([leaf.name for leaf in asked], inputs, "input")
    check_names([leaf.name for leaf in graph.variables], variables, "variable")
    bounds = index_bounds(graph)
    found: dict[int, Array] = {}
    for value, leaf in enumerate(graph.leaves):
        given = variables if leaf.kind is LeafKind.VARIABLE else inputs
        if leaf.digest:
            found[value] = weights[leaf.digest]
        elif leaf.name in given:
            found[value] = checked(leaf, given[leaf.name])
        elif leaf.kind is LeafKind.VARIABLE:
            found[value] = np.zeros(leaf.type.storage_shape, leaf.type.dtype.storage)
        else:
            found[value] = seeded(leaf, seed, bounds.get(value))
    return found


def _chosen(graph: Graph, frozen: contract.Graph, nodes: Nodes) -> list[int]:
    """The numbers of the chosen nodes. Raises InvalidArgumentError if there are none."""
    names = [node.name for node in frozen.nodes]
    if callable(nodes):
        found = [number for number in range(len(names)) if nodes(graph._value(number))]
        asked = "the function"
    else:
        patterns = [nodes] if isinstance(nodes, str) else list(nodes)
        found = [n for n, name in enumerate(names) if any(fnmatchcase(name, one) for one in patterns)]
        asked = ", ".join(map(repr, patterns))
    if not found:
        near = get_close_matches(asked.strip("'*"), names, 3) or names[:3]
        raise InvalidArgumentError(
            f"no node matches {asked}",
            advice=f"patterns are as in fnmatch, of names such as {', '.join(near)}",
        )
    return found
