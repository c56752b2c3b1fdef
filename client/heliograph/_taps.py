"""Observing runs: which nodes, the plans that do it, and what they tell, for both APIs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np

from heliograph._effects import Procedure, Wait
from heliograph._outcome import Outcome
from heliograph._patterns import near_names, pattern_words
from heliograph._running import PlanSpec, Run
from heliograph._typed import Typed
from heliograph.protocol import ClientCore
from heliograph_proto.errors import InvalidArgumentError, UnknownHandleError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

#: Plans of one graph that observe different nodes take memory each: so many are kept.
MOST_VARIANTS = 8


@dataclass(frozen=True, slots=True)
class Node(Typed):
    """A node of a plan's graph, for functions that say whether to observe it."""

    #: In the graph.
    number: int
    #: With the scopes in front.
    name: str
    op: str
    #: Of its result.
    type: TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Tap(Node):
    """The value of an observed node in one run."""

    #: In memory of its own; of a quantized type, the rows of bytes.
    value: np.ndarray[Any, Any]


#: Names of nodes as in fnmatch, or what says of a node whether it is meant.
TapPattern: TypeAlias = str | Callable[[Node], bool]
#: Which nodes are observed.
Taps: TypeAlias = TapPattern | Collection[TapPattern] | None


# Which nodes


def nodes_of(graph: Graph) -> list[Node]:
    """The nodes with their names."""
    return [node_of(graph, number) for number in range(len(graph.nodes))]


def node_of(graph: Graph, number: int) -> Node:
    """One of them; without a name it has the one that stands for it."""
    node = graph.nodes[number]
    return Node(number, node.name or f"{node.op}_{number}", node.op, node.type)


def tapped_nodes(graph: Graph, taps: TapPattern | Collection[TapPattern]) -> tuple[int, ...]:
    """The numbers of the nodes that are meant, in order: at least one by each pattern.

    Raises InvalidArgumentError.
    """
    patterns = [taps] if isinstance(taps, str) or callable(taps) else taps
    if not isinstance(patterns, Collection) or isinstance(patterns, Mapping):
        raise InvalidArgumentError(
            f"taps is {type(taps).__name__}", advice="names as in fnmatch: taps=['layer0/*', 'logits']"
        )
    nodes = nodes_of(graph)
    return tuple(sorted({number for pattern in patterns for number in _matching(graph, nodes, pattern)}))


def _matching(graph: Graph, nodes: list[Node], pattern: TapPattern) -> list[int]:
    if isinstance(pattern, str):
        found = [one.number for one in nodes if fnmatchcase(one.name, pattern)]
    elif callable(pattern):
        found = [one.number for one in nodes if pattern(one)]
    else:
        raise InvalidArgumentError(
            f"taps are by pattern, not by {pattern!r:.80}",
            advice="names as in fnmatch, 'layer0/*', or a function of a node",
        )
    if not found:
        advice = _advice(graph, nodes, pattern) if isinstance(pattern, str) else ""
        raise InvalidArgumentError(
            f"no node matches {pattern_words(pattern)}, which is tapped", advice=advice
        )
    return found


def _advice(graph: Graph, nodes: list[Node], pattern: str) -> str:
    if any(fnmatchcase(leaf.name, pattern) for leaf in graph.leaves):
        return "it matches leaves alone, which are known without a run; tap the nodes that read them"
    return near_names(pattern, dict.fromkeys(one.name for one in nodes))


# The plans that observe


@dataclass(eq=False, slots=True)
class Variant:
    """A plan that observes nodes."""

    spec: PlanSpec
    #: How many sendings of runs name it just now.
    users: int = 0


@dataclass(eq=False, slots=True)
class Variants:
    """The plans of one graph that observe nodes, each compiled once, by the numbers of the nodes.

    Touched where the core is, `free` aside: that is safe in destructors.
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
        """The plan that observes these nodes, compiled now unless it was before."""
        while (found := self._known.pop(nodes, None)) is None:
            if (coming := self._coming.get(nodes)) is not None:
                yield Wait(coming)
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
        """As the one that was used last. Raises UnknownHandleError if all were freed meanwhile."""
        self._known[nodes] = one
        if self._freed:
            self.free()
            raise UnknownHandleError("the plan was freed or updated before the run was sent")
        idle = [key for key, other in list(self._known.items()) if not other.users and key != nodes]
        for key in idle[: max(0, len(self._known) - MOST_VARIANTS)]:
            if (oldest := self._known.pop(key, None)) is not None:
                self.release(oldest.spec.handle)

    def free(self) -> None:
        """Frees all of them. Idempotent."""
        self._freed = True
        for key in list(self._known):
            if (one := self._known.pop(key, None)) is not None:
                self.release(one.spec.handle)


# What they tell


def not_observed() -> InvalidArgumentError:
    """The error of asking a run for what it does not tell."""
    return InvalidArgumentError(
        "nothing of the run is observed", advice="name nodes: plan.submit(..., taps=['layer0/*'])"
    )


def next_tap(core: ClientCore, run: Run) -> Procedure[Tap | None]:
    """The next value of a run; None when it has ended well and nothing is left. Raises as `next_raw`."""
    found = yield from next_raw(core, run)
    if found is None:
        return None
    node, raw = found
    # Of other types the raw elements are the elements.
    value = raw.view(node.dtype.numpy) if node.dtype.name == "bf16" else raw
    return Tap(node.number, node.name, node.op, node.type, value)


def next_raw(core: ClientCore, run: Run) -> Procedure[tuple[Node, np.ndarray[Any, Any]] | None]:
    """The next observed node and its raw elements (`DType.storage`); None when the run has ended well and
    nothing is left.

    Raises the run's error. Breaking the waiting off, except by a deadline, cancels the run.
    """
    pending, observed = run.pending, run.observed
    feed = pending.feed
    assert observed is not None and feed is not None
    try:
        while not feed.ready:
            if pending.done:
                core.raise_error(pending)
                if feed.error is not None:
                    raise feed.error.at(feed.error.origin)
                return None
            core.proceed(pending)
            yield Wait(feed.changed)
    except BaseException as error:
        if not isinstance(error, Exception):
            core.cancel(pending)
        raise
    number, raw = feed.ready.popleft()
    return node_of(observed.graph, number), raw
