"""Compilation over the wire: contents first, then one call; and estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from heliograph.core.credit import OrderGate
from heliograph.core.effects import Call, Compute, Procedure, ask, do_nothing
from heliograph.core.future import Pending
from heliograph.core.methods import COMPILE, ESTIMATE, PLACE_CONTENTS
from heliograph.core.progress.bars import Progress, Waiting
from heliograph.core.protocol import ClientCore
from heliograph.core.replay.journal import MadePlan
from heliograph.core.shell import BoundTensor
from heliograph.graph.arguments import counted
from heliograph.graph.builder import Graph
from heliograph.procedures.checkpoint import write_variable
from heliograph.procedures.journal import placed_on
from heliograph.procedures.run import CompileRecipe, PlanSpec
from heliograph.procedures.transfer import arrive, wait_for
from heliograph.procedures.upload import Contents, upload_missing
from heliograph_proto import commands as c
from heliograph_proto import graph as contract
from heliograph_proto.errors import (
    CancelledError,
    ConnectionError,
    DeadlineExceededError,
    HeliographError,
    MissingContentError,
    UnknownHandleError,
)
from heliograph_proto.graph import LeafKind
from heliograph_proto.plans import (
    CompileRequest,
    ContentOffer,
    EstimateRequest,
    PlaceContentsRequest,
    PlanEstimate,
    PlanInfo,
    PlanOptions,
)

#: The errors of a call without an answer, which the server may have executed.
_UNANSWERED = (CancelledError, ConnectionError, DeadlineExceededError)


@dataclass(frozen=True, slots=True)
class Compilation:
    """The arguments of a compilation in a session."""

    options: PlanOptions
    #: Tensors of the session for leaves, by the leaves' numbers. They must not be freed before the
    #: graph is compiled again.
    bound: Mapping[int, BoundTensor] = field(default_factory=dict)
    #: The handle of a plan whose memory is taken over; 0 without one.
    updates: int = 0
    #: The handle of the reservation for its memory; 0 without one.
    reservation: int = 0
    #: True if variables of a lost device are created again.
    renews_lost: bool = False
    #: Called if no answer came, and the state of the updated plan is unknown.
    doubt: Callable[[], None] = lambda: None

    def request(self, plan: int, graph: contract.Graph) -> CompileRequest:
        """Return the request to the server."""
        bindings = {leaf: tensor._handle for leaf, tensor in self.bound.items()}
        return CompileRequest(
            plan, graph, self.options, bindings, self.updates, self.reservation, self.renews_lost
        )


@dataclass(frozen=True, slots=True)
class FrozenGraph:
    """A graph of the contract with the data to compile it."""

    graph: contract.Graph
    #: The arrays of weights, by digest.
    contents: Contents
    #: Returns the line of user code that built a node, by its number.
    source_of: Callable[[int], str]
    #: The progress display of uploads.
    progress: Progress | None
    #: The first elements of variables, by name; zeros for others.
    initial: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def compile_graph(
    core: ClientCore, graph: Graph, how: Compilation, progress: Progress | None
) -> Procedure[PlanSpec]:
    """Compile a graph under a new handle; errors name the user's lines."""
    bound = frozenset(how.bound)
    frozen = yield Compute(lambda: graph._freeze(bound))
    initial = graph._initial_by_name()
    source = FrozenGraph(frozen, graph._contents(bound), graph._source_of, progress, initial)
    return (yield from compile_frozen(core, source, how))


@dataclass(frozen=True, slots=True)
class FirstCompilation:
    """The compilation before devices were lost, and the devices that were missing at some time."""

    how: Compilation
    missed: set[str] = field(default_factory=set)

    def without(self, graph: contract.Graph, left: tuple[str, ...]) -> Compilation:
        """Return how to compile for the devices that are left.

        A device that was missing may be there again, but its variables are elsewhere by now. Nodes
        that assign them run where the variables are.
        """
        options = self.how.options
        self.missed.update(set(options.devices).difference(left))
        pins = [
            (name, tuple(one for one in nodes if name not in self.missed or graph.nodes[one].op != "assign"))
            for name, nodes in options.pins
        ]
        return replace(self.how, options=replace(options, pins=tuple(pins)))


def compile_frozen(
    core: ClientCore,
    source: FrozenGraph,
    how: Compilation,
    gate: OrderGate | None = None,
    first: FirstCompilation | None = None,
) -> Procedure[PlanSpec]:
    """Upload the contents that the session lacks, and compile under a new handle.

    Everything sent before, or before the gate, has arrived then. `first` is the compilation before
    devices were lost.
    """
    graph, contents, progress = source.graph, source.contents, source.progress
    request = how.request(core.handle(), graph)
    # With several devices the server decides first, so that each content goes to its device at once.
    places = core.places_contents or len(how.options.devices) > 1
    place = partial(_place, core, request, gate) if places else None
    try:
        yield from upload_missing(core, contents, progress, place)
        try:
            info = yield from _compile(core, request, contents, how.doubt, gate)
        except MissingContentError:
            # The server may just have dropped contents of another plan: upload and compile once more.
            yield from upload_missing(core, contents, progress, place)
            info = yield from _compile(core, request, contents, how.doubt, gate)
    except HeliographError as error:
        raise with_source(error, source.source_of) from None
    options = how.options
    recipe = CompileRecipe(
        graph, contents, options.fusion, options.threads, bool(how.bound), options.devices, source.initial
    )
    yield from _initialize(core, request.plan, info, source.initial)

    def observing(taps: tuple[int, ...], gate: OrderGate | None) -> Procedure[PlanSpec]:
        _check_bound(how)
        again = replace(how, options=replace(options, taps=taps), updates=0, doubt=lambda: None)
        return compile_frozen(core, source, again, gate)

    original = first or FirstCompilation(how)

    def placing(left: tuple[str, ...]) -> Procedure[PlanSpec]:
        _check_bound(original.how)
        _check_left(graph, original.how, left)
        again = placed_on(original.without(graph, left), left)
        return compile_frozen(core, source, again, first=original)

    return PlanSpec(
        request.plan,
        info,
        source.source_of,
        recipe,
        observing,
        placing,
        original.how.options.devices,
        _weights(request),
    )


def _initialize(
    core: ClientCore, plan: int, info: PlanInfo, initial: Mapping[str, np.ndarray[Any, Any]]
) -> Procedure[None]:
    """Write the first elements of the variables that the compile created.

    If that fails the plan and these variables are freed, so that the next compile writes them.
    """
    created = [one for one in info.variables if one.is_new and one.port.name in initial]
    try:
        pendings: list[Pending] = []
        for one in created:
            pendings += yield from write_variable(core, one, initial[one.port.name])
        for pending in pendings:
            yield from wait_for(core, pending)
    except BaseException:
        core.release(plan)
        core.collect()
        for one in created:
            core.send(c.FreeVariable(one.port.name))
        raise


def _weights(request: CompileRequest) -> tuple[int, ...]:
    """Return the handles of the tensors that are weights."""
    assert isinstance(request.graph, contract.Graph)
    leaves = request.graph.leaves
    return tuple(one for leaf, one in request.bindings.items() if leaves[leaf].kind is LeafKind.WEIGHT)


def _check_bound(how: Compilation) -> None:
    """Raise UnknownHandleError if a tensor of a leaf was freed."""
    if any(one.freed for one in how.bound.values()):
        raise UnknownHandleError(
            "the plan must be compiled once more, and a tensor that is one of its leaves was freed",
            advice="free it after the plan",
        )


def _check_left(graph: contract.Graph, how: Compilation, left: tuple[str, ...]) -> None:
    """Raise MissingContentError for a weight that was a tensor on a lost device."""
    lost = set(how.options.devices).difference(left)
    for leaf, tensor in how.bound.items():
        if tensor.device in lost:
            raise MissingContentError(
                f"the weight {graph.leaves[leaf].name!r} was a tensor on device {tensor.device}, which is "
                "lost, and this process has no array of it",
                advice="give the graph its array, g.weight(name, array), or compile with another tensor",
            )


def _compile(
    core: ClientCore,
    request: CompileRequest,
    contents: Contents,
    doubt: Callable[[], None],
    gate: OrderGate | None,
) -> Procedure[PlanInfo]:
    yield from _arrive(core, request, gate)
    after = core.last_sent
    waiting = Waiting(f"compiling {_size(request)}", core.bars)
    meanwhile, core.meanwhile = core.meanwhile, do_nothing
    try:
        info: PlanInfo = yield Call(COMPILE, request, meanwhile)
        if core.journal is not None:
            core.journal.has_variables(request.plan, tuple(one.tensor for one in info.variables))
            core.journal.made(MadePlan(request, contents, after, core.last_sent))
        return info
    except BaseException as error:
        if request.updates and (isinstance(error, _UNANSWERED) or not isinstance(error, HeliographError)):
            doubt()
        raise
    finally:
        waiting.end()


def _size(request: CompileRequest) -> str:
    """The size of the graph of a request, in words."""
    graph = request.graph
    return counted(len(graph.nodes), "node") if isinstance(graph, contract.Graph) else "a graph"


def _place(
    core: ClientCore, request: CompileRequest, gate: OrderGate | None, missing: tuple[bytes, ...]
) -> Procedure[tuple[ContentOffer, ...]]:
    """Ask the server which daemons take missing contents."""
    yield from _arrive(core, request, gate)
    return (yield from ask(PLACE_CONTENTS, PlaceContentsRequest(request, missing)))


def _arrive(core: ClientCore, request: CompileRequest, gate: OrderGate | None) -> Procedure[None]:
    """Wait until the server knows the handles that a compile names."""
    if request.bindings or request.updates:
        yield from arrive(core, list(_weights(request)), gate)


def estimate_graph(graph: Graph, options: PlanOptions) -> Procedure[PlanEstimate]:
    """Estimate the memory for a graph; errors name the user's lines."""
    try:
        return (yield from ask(ESTIMATE, EstimateRequest(graph._outline(), options)))
    except HeliographError as error:
        raise with_source(error, graph._source_of) from None


def with_source(error: HeliographError, source_of: Callable[[int], str]) -> HeliographError:
    """Return the error with the line of user code that built its node."""
    if not error.origin.op or error.origin.source:
        return error
    return error.at(replace(error.origin, source=source_of(error.origin.node)))
