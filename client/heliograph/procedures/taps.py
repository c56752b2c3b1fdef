"""Observation of runs and loops, for both APIs: selecting nodes, plans that observe, values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np

from heliograph.core.effects import Procedure, WaitFor
from heliograph.core.future import Outcome
from heliograph.core.protocol import ClientCore
from heliograph.graph.arguments import near_names, pattern_words
from heliograph.graph.symbol import Symbol, Typed
from heliograph.procedures.run import PlanSpec, SentRun
from heliograph_proto.errors import InvalidArgumentError, UnknownHandleError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

#: The most plans of one graph that observe different nodes; each takes memory.
MOST_VARIANTS = 8


@dataclass(frozen=True, slots=True)
class TappedNode(Typed):
    """A node of a plan's graph, for functions that select what to observe."""

    #: The node's number in the graph.
    number: int
    #: The name with its scopes.
    name: str
    op: str
    #: The type of the result.
    type: TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Tap(TappedNode):
    """The value of an observed node in a run, or in a step of a loop; in a loop also of an output.

    An output has its own name, and the number and op of the node that computes it. If a leaf is the
    output, these are -1 and "input", "weight" or "variable".
    """

    #: An array of its own; for a quantized type, the rows of bytes.
    value: np.ndarray[Any, Any]
    #: The step of a loop, from 0.
    step: int = 0
    #: True for an output of a loop.
    is_output: bool = False


#: Names of nodes as in fnmatch, a value of the graph, or a function that is True for the nodes to
#: observe.
TapPattern: TypeAlias = str | Symbol | Callable[[TappedNode], bool]
#: The nodes to observe.
Taps: TypeAlias = TapPattern | Collection[TapPattern] | None


# Which nodes


def node_of(graph: Graph, number: int) -> TappedNode:
    """Return a node; without a name it has a generated one."""
    node = graph.nodes[number]
    return TappedNode(number, node.name or f"{node.op}_{number}", node.op, node.type)


def tapped_nodes(graph: Graph, taps: TapPattern | Collection[TapPattern]) -> tuple[int, ...]:
    """Return the numbers of the nodes that the patterns select, in order: at least one each.

    Raises InvalidArgumentError.
    """
    nodes = [node_of(graph, number) for number in range(len(graph.nodes))]
    found = {number for pattern in _patterns(taps) for number in _matching(graph, nodes, pattern)}
    return tuple(sorted(found))


def tapped_in_loop(
    graph: Graph, taps: TapPattern | Collection[TapPattern]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the nodes of `tapped_nodes`, and the outputs whose name is exactly that of a pattern.

    Raises InvalidArgumentError.
    """
    outputs = {output.name: place for place, output in enumerate(graph.outputs)}
    patterns = _patterns(taps)
    named = {outputs[one] for one in patterns if isinstance(one, str) and one in outputs}
    others = [one for one in patterns if not (isinstance(one, str) and one in outputs)]
    # Nodes are many, and get names.
    return tapped_nodes(graph, others) if others else (), tuple(sorted(named))


def _patterns(taps: TapPattern | Collection[TapPattern]) -> Collection[TapPattern]:
    patterns = [taps] if isinstance(taps, str | Symbol) or callable(taps) else taps
    if not isinstance(patterns, Collection) or isinstance(patterns, Mapping):
        raise InvalidArgumentError(
            f"taps is {type(taps).__name__}", advice="names as in fnmatch: taps=['layer0/*', 'logits']"
        )
    return patterns


def _number_of(value: Symbol, nodes: list[TappedNode]) -> int:
    """Return the number of the node that a value of the plan's graph stands for."""
    number = value.reference
    if number < 0:
        raise InvalidArgumentError(
            f"{value!r:.200} is a leaf, and taps observe nodes",
            advice="its elements are known already",
        )
    if number >= len(nodes) or (nodes[number].name, nodes[number].type) != (value.name, value.type):
        raise InvalidArgumentError(
            f"{value!r:.200} is no node of the plan's graph", advice="a value of the graph that was compiled"
        )
    return number


def _matching(graph: Graph, nodes: list[TappedNode], pattern: TapPattern) -> list[int]:
    if isinstance(pattern, Symbol):
        return [_number_of(pattern, nodes)]
    if isinstance(pattern, str):
        found = [one.number for one in nodes if fnmatchcase(one.name, pattern)]
    elif callable(pattern):
        found = [one.number for one in nodes if pattern(one)]
    else:
        raise InvalidArgumentError(
            f"a tap is a pattern, not {pattern!r:.80}",
            advice="names as in fnmatch, 'layer0/*', or a function of a node",
        )
    if not found:
        advice = _advice(graph, nodes, pattern) if isinstance(pattern, str) else ""
        raise InvalidArgumentError(
            f"no node matches {pattern_words(pattern)}, which is tapped", advice=advice
        )
    return found


def _advice(graph: Graph, nodes: list[TappedNode], pattern: str) -> str:
    if any(fnmatchcase(leaf.name, pattern) for leaf in graph.leaves):
        return "it matches only leaves, which are known without a run; tap the nodes that read them"
    return near_names(pattern, dict.fromkeys(one.name for one in nodes))


# The plans that observe


@dataclass(eq=False, slots=True)
class Variant:
    """A plan that observes nodes."""

    spec: PlanSpec
    #: The number of runs that are being sent with it.
    users: int = 0


@dataclass(eq=False, slots=True)
class Variants:
    """The plans of one graph that observe nodes, each compiled once, by the numbers of the nodes.

    Used where the core is, except `free`, which is safe in destructors.
    """

    #: Frees a handle; safe in destructors.
    release: Callable[[int], None]
    #: The least recently used first.
    _known: dict[tuple[int, ...], Variant] = field(default_factory=dict)
    #: Those that are being compiled.
    _coming: dict[tuple[int, ...], Outcome] = field(default_factory=dict)
    _freed: bool = False

    def of(
        self, core: ClientCore, nodes: tuple[int, ...], compiling: Callable[[], Procedure[PlanSpec]]
    ) -> Procedure[Variant]:
        """Return the plan that observes these nodes, compiling it unless it exists."""
        while (found := self._known.pop(nodes, None)) is None:
            if (coming := self._coming.get(nodes)) is not None:
                yield WaitFor(coming)
                continue
            self._coming[nodes] = turn = Outcome()
            try:
                self._keep(nodes, Variant((yield from compiling())))
            finally:
                del self._coming[nodes]
                core.settle(turn)
        self._keep(nodes, found)
        return found

    def _keep(self, nodes: tuple[int, ...], one: Variant) -> None:
        """Keep a plan as the most recently used.

        Raises UnknownHandleError if all were freed meanwhile.
        """
        self._known[nodes] = one
        if self._freed:
            self.free()
            raise UnknownHandleError("the plan was freed or updated before the run was sent")
        idle = [key for key, other in list(self._known.items()) if not other.users and key != nodes]
        for key in idle[: max(0, len(self._known) - MOST_VARIANTS)]:
            if (oldest := self._known.pop(key, None)) is not None:
                self.release(oldest.spec.handle)

    def free(self) -> None:
        """Free all of them. Idempotent."""
        self._freed = True
        for key in list(self._known):
            if (one := self._known.pop(key, None)) is not None:
                self.release(one.spec.handle)


# Their values


def not_observed() -> InvalidArgumentError:
    """Return the error for a run that is not observed."""
    return InvalidArgumentError(
        "nothing of the run is observed", advice="name nodes: plan.submit(..., taps=['layer0/*'])"
    )


def next_tap(core: ClientCore, run: SentRun) -> Procedure[Tap | None]:
    """Return the next value of a run, or None if it succeeded and none is left.

    Raises the run's error. Interrupting the wait, except by a deadline, cancels the run.
    """
    found = yield from next_value(core, run)
    if found is None:
        return None
    what, step, raw = found
    assert run.observed is not None
    node = _observed_node(run.observed.graph, what)
    # For other types the raw elements are the elements.
    value = raw.view(node.dtype.numpy) if node.dtype.name == "bf16" else raw
    return Tap(node.number, node.name, node.op, node.type, value, step, what < 0)


def next_raw(core: ClientCore, run: SentRun) -> Procedure[tuple[TappedNode, np.ndarray[Any, Any]] | None]:
    """Return the next observed node and its raw elements (`DType.storage`), like `next_tap`."""
    found = yield from next_value(core, run)
    if found is None:
        return None
    assert run.observed is not None
    return _observed_node(run.observed.graph, found[0]), found[2]


def next_value(core: ClientCore, run: SentRun) -> Procedure[tuple[int, int, np.ndarray[Any, Any]] | None]:
    """Return the key of a value, the step of a loop, and the raw elements."""
    pending, observed = run.pending, run.observed
    feed = pending.feed
    assert observed is not None and feed is not None
    try:
        while not feed.ready:
            if pending.done:
                core.raise_error(pending)
            if feed.error is not None and (pending.done or feed.ends_at_gap):
                raise feed.error.at(feed.error.origin)
            if pending.done:
                return None
            core.proceed(pending)
            yield WaitFor(feed.changed)
    except BaseException as error:
        if not isinstance(error, Exception):
            core.cancel(pending)
        raise
    found = feed.take()
    if observed.loop is not None:
        core.proceed(pending)
    return found


def _observed_node(graph: Graph, what: int) -> TappedNode:
    """Return a node, or an output of a loop, by its key in a feed."""
    if what >= 0:
        return node_of(graph, what)
    output = graph.outputs[-1 - what]
    number = output.value - len(graph.leaves)
    op = graph.nodes[number].op if number >= 0 else graph.leaves[output.value].kind.value
    return TappedNode(max(number, -1), output.name, op, graph.type_of(output.value))
