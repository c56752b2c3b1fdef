"""Compiling over the wire: contents first, then one call; and what compiling would take.

Generators as in `_procedures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from heliograph.core.effects import Compute, Procedure, ask
from heliograph.core.gates import OrderGate
from heliograph.core.methods import COMPILE, ESTIMATE, PLACE_CONTENTS
from heliograph.core.progress import Progress
from heliograph.core.protocol import ClientCore
from heliograph.core.shell import BoundTensor
from heliograph.graph.builder import Graph
from heliograph.procedures.journal import placed_on
from heliograph.procedures.run import CompileRecipe, PlanSpec
from heliograph.procedures.transfer import arrive
from heliograph.procedures.upload import Contents, upload_missing
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

#: What a call ends with that the server has not answered, though it may have done it.
_UNANSWERED = (CancelledError, ConnectionError, DeadlineExceededError)


@dataclass(frozen=True, slots=True)
class Compilation:
    """How a graph is compiled in a session."""

    options: PlanOptions
    #: Tensors of the session by the numbers of the leaves that they are. To compile once more they must not
    #: have been freed.
    bound: Mapping[int, BoundTensor] = field(default_factory=dict)
    #: The handle of a plan whose memory is taken over; 0: none.
    updates: int = 0
    #: The handle of the reservation in whose memory it is to lie; 0: none.
    reservation: int = 0
    #: Whether variables that lay on a device that is lost begin anew.
    renews_lost: bool = False
    #: Called when the answer did not come, and nobody knows what became of the plan that is updated.
    doubt: Callable[[], None] = lambda: None

    def request(self, plan: int, graph: contract.Graph) -> CompileRequest:
        """What is asked of the server."""
        bindings = {leaf: tensor._handle for leaf, tensor in self.bound.items()}
        return CompileRequest(
            plan, graph, self.options, bindings, self.updates, self.reservation, self.renews_lost
        )


def compile_graph(
    core: ClientCore, graph: Graph, how: Compilation, progress: Progress | None
) -> Procedure[PlanSpec]:
    """Compiles a graph under a new handle; errors name the user's lines."""
    bound = frozenset(how.bound)
    frozen = yield Compute(lambda: graph._freeze(bound))
    contents = graph._contents(bound)
    return (yield from compile_frozen(core, frozen, contents, how, graph._source_of, progress))


@dataclass(frozen=True, slots=True)
class First:
    """What was asked for before devices were lost, and the devices that the plan once had to do without."""

    how: Compilation
    missed: set[str] = field(default_factory=set)

    def without(self, graph: contract.Graph, left: tuple[str, ...]) -> Compilation:
        """How to compile when these devices are left. A device that was missed may be there again, but the
        variables that lay there lie elsewhere by now: what assigns them goes where they are."""
        options = self.how.options
        self.missed.update(set(options.devices).difference(left))
        pins = [
            (name, tuple(one for one in nodes if name not in self.missed or graph.nodes[one].op != "assign"))
            for name, nodes in options.pins
        ]
        return replace(self.how, options=replace(options, pins=tuple(pins)))


def compile_frozen(
    core: ClientCore,
    graph: contract.Graph,
    contents: Contents,
    how: Compilation,
    source_of: Callable[[int], str],
    progress: Progress | None,
    gate: OrderGate | None = None,
    first: First | None = None,
) -> Procedure[PlanSpec]:
    """Uploads the contents that the session lacks, and compiles under a new handle: what was sent before, or
    before the gate, has come there then. `first`: what was asked for before devices were lost."""
    request = how.request(core.handle(), graph)
    place = partial(_place, core, request, gate)
    yield from upload_missing(core, contents, progress, place)
    try:
        try:
            info = yield from _compile(core, request, how.doubt, gate)
        except MissingContentError:
            # Another plan's contents may just have been dropped: ask and send once more.
            yield from upload_missing(core, contents, progress, place)
            info = yield from _compile(core, request, how.doubt, gate)
    except HeliographError as error:
        raise with_source(error, source_of) from None
    options = how.options
    recipe = CompileRecipe(graph, contents, options.fusion, options.threads, bool(how.bound), options.devices)

    def observing(taps: tuple[int, ...], gate: OrderGate | None) -> Procedure[PlanSpec]:
        _check_bound(how)
        again = replace(how, options=replace(options, taps=taps), updates=0, doubt=lambda: None)
        return compile_frozen(core, graph, contents, again, source_of, progress, gate)

    asked = first or First(how)

    def placing(left: tuple[str, ...]) -> Procedure[PlanSpec]:
        _check_bound(asked.how)
        _check_left(graph, asked.how, left)
        again = placed_on(asked.without(graph, left), left)
        return compile_frozen(core, graph, contents, again, source_of, progress, None, asked)

    devices = asked.how.options.devices
    return PlanSpec(request.plan, info, source_of, recipe, observing, placing, devices)


def _check_bound(how: Compilation) -> None:
    """Raises UnknownHandleError."""
    if any(one.freed for one in how.bound.values()):
        raise UnknownHandleError(
            "the plan is to be compiled once more, and a tensor that is a leaf of it was freed",
            advice="free it when the plan is done with",
        )


def _check_left(graph: contract.Graph, how: Compilation, left: tuple[str, ...]) -> None:
    """Raises MissingContentError for a weight that was a tensor on a device which is not left."""
    lost = set(how.options.devices).difference(left)
    for leaf, tensor in how.bound.items():
        if tensor.device in lost:
            raise MissingContentError(
                f"the weight {graph.leaves[leaf].name!r} was a tensor on device {tensor.device}, which is "
                "lost, and this process has no array of it",
                advice="give the graph its array, g.weight(name, array), or compile anew with another tensor",
            )


def _compile(
    core: ClientCore, request: CompileRequest, doubt: Callable[[], None], gate: OrderGate | None
) -> Procedure[PlanInfo]:
    yield from _arrive(core, request, gate)
    try:
        return (yield from ask(COMPILE, request))
    except BaseException as error:
        if request.updates and (isinstance(error, _UNANSWERED) or not isinstance(error, HeliographError)):
            doubt()
        raise


def _place(
    core: ClientCore, request: CompileRequest, gate: OrderGate | None, missing: tuple[bytes, ...]
) -> Procedure[tuple[ContentOffer, ...]]:
    """Who takes missing contents besides the server."""
    yield from _arrive(core, request, gate)
    return (yield from ask(PLACE_CONTENTS, PlaceContentsRequest(request, missing)))


def _arrive(core: ClientCore, request: CompileRequest, gate: OrderGate | None) -> Procedure[None]:
    """Until the handles that a compile names are known to the server."""
    if request.bindings or request.updates:
        assert isinstance(request.graph, contract.Graph)
        leaves = request.graph.leaves
        weights = [one for leaf, one in request.bindings.items() if leaves[leaf].kind is LeafKind.WEIGHT]
        yield from arrive(core, weights, gate)


def estimate_graph(graph: Graph, options: PlanOptions) -> Procedure[PlanEstimate]:
    """What compiling would take; errors name the user's lines."""
    try:
        return (yield from ask(ESTIMATE, EstimateRequest(graph._outline(), options)))
    except HeliographError as error:
        raise with_source(error, graph._source_of) from None


def with_source(error: HeliographError, source_of: Callable[[int], str]) -> HeliographError:
    """The error with the line of user code that built its node."""
    if not error.origin.op or error.origin.source:
        return error
    return error.at(replace(error.origin, source=source_of(error.origin.node)))
