"""Compiling over the wire: contents first, then one call; and what compiling would take.

Generators as in `_procedures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from heliograph._common import Handle
from heliograph._effects import Compile, Compute, Estimate, PlaceContents, Procedure
from heliograph._gates import Gate
from heliograph._journal import placed_on
from heliograph._procedures import arrive
from heliograph._progress import Progress
from heliograph._running import PlanSpec, Recipe
from heliograph._tensors import TensorBase
from heliograph._uploading import Contents, upload_missing
from heliograph.builder import Graph
from heliograph.protocol import ClientCore
from heliograph_proto import graph as contract
from heliograph_proto.description import ContentOffer, PlanEstimate, PlanInfo
from heliograph_proto.errors import (
    CancelledError,
    ConnectionError,
    DeadlineExceededError,
    HeliographError,
    MissingContentError,
    UnknownHandleError,
)
from heliograph_proto.graph import LeafKind
from heliograph_proto.portions import Portion
from heliograph_proto.rows import RowSplit

#: What a call ends with that the server has not answered, though it may have done it.
_UNANSWERED = (CancelledError, ConnectionError, DeadlineExceededError)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How a graph is compiled."""

    #: By priority.
    devices: tuple[str, ...]
    fusion: bool = True
    #: The most that a run uses; 0: all.
    threads: int = 0
    #: Numbers of leaves and the handles of the tensors that they are.
    bindings: tuple[tuple[int, int], ...] = ()
    #: The handle of a plan whose memory is taken over; 0: none.
    updates: int = 0
    #: Devices and the numbers of the nodes that must run there.
    pins: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Devices and the most bytes of each.
    memory: tuple[tuple[str, int], ...] = ()
    #: How many runs may be under way at once.
    pipeline: int = 1
    #: How the rows of weights lie over devices, and the numbers of these weights.
    splits: tuple[tuple[RowSplit, tuple[int, ...]], ...] = ()
    #: Devices and the names of their buffer types.
    buffer_types: tuple[tuple[str, str], ...] = ()
    #: The objects of the tensors in `bindings`: to compile once more they must not have been freed.
    bound: tuple[Handle, ...] = ()
    #: Numbers of the nodes that are observed.
    taps: tuple[int, ...] = ()
    #: The handle of the reservation in whose memory it is to lie; 0: none.
    reservation: int = 0
    #: Whether variables that lay on a device that is lost begin anew.
    renews_lost: bool = False
    #: How it exchanges values with other parts of a graph, if it is one.
    portion: Portion | None = None
    #: Called when the answer did not come, and nobody knows what became of the plan that is updated.
    doubt: Callable[[], None] = lambda: None


def compile_graph(
    core: ClientCore, graph: Graph, options: CompileOptions, progress: Progress | None
) -> Procedure[PlanSpec]:
    """Compiles a graph under a new handle; errors name the user's lines."""
    bound = frozenset(leaf for leaf, _ in options.bindings)
    frozen = yield Compute(lambda: graph.freeze(bound))
    contents = graph.weights(bound)
    return (yield from compile_frozen(core, frozen, contents, options, graph.source_of, progress))


@dataclass(frozen=True, slots=True)
class First:
    """What was asked for before devices were lost, and the devices that the plan once had to do without."""

    options: CompileOptions
    missed: set[str] = field(default_factory=set)

    def without(self, graph: contract.Graph, left: tuple[str, ...]) -> CompileOptions:
        """The options, when these devices are left. A device that was missed may be there again, but the
        variables that lay there lie elsewhere by now: what assigns them goes where they are."""
        self.missed.update(set(self.options.devices).difference(left))
        pins = [
            (name, tuple(one for one in nodes if name not in self.missed or graph.nodes[one].op != "assign"))
            for name, nodes in self.options.pins
        ]
        return replace(self.options, pins=tuple(pins))


def compile_frozen(
    core: ClientCore,
    graph: contract.Graph,
    contents: Contents,
    options: CompileOptions,
    source_of: Callable[[int], str],
    progress: Progress | None,
    gate: Gate | None = None,
    first: First | None = None,
) -> Procedure[PlanSpec]:
    """Uploads the contents that the session lacks, and compiles under a new handle: what was sent before, or
    before the gate, has come there then. `first`: what was asked for before devices were lost."""
    handle = core.handle()
    place = partial(_place, core, handle, graph, options, gate)
    yield from upload_missing(core, contents, progress, place)
    try:
        try:
            info = yield from _compile(core, handle, graph, options, gate)
        except MissingContentError:
            # Another plan's contents may just have been dropped: ask and send once more.
            yield from upload_missing(core, contents, progress, place)
            info = yield from _compile(core, handle, graph, options, gate)
    except HeliographError as error:
        raise with_source(error, source_of) from None
    is_bound = bool(options.bindings)
    recipe = Recipe(graph, contents, options.fusion, options.threads, is_bound, options.devices)

    def observing(taps: tuple[int, ...], gate: Gate | None) -> Procedure[PlanSpec]:
        _check_bound(options.bound)
        again = replace(options, updates=0, doubt=lambda: None, taps=taps)
        return compile_frozen(core, graph, contents, again, source_of, progress, gate)

    wish = first or First(options)

    def placing(left: tuple[str, ...]) -> Procedure[PlanSpec]:
        _check_bound(wish.options.bound)
        _check_left(graph, wish.options, left)
        again = placed_on(wish.without(graph, left), left)
        return compile_frozen(core, graph, contents, again, source_of, progress, None, wish)

    return PlanSpec(handle, info, source_of, recipe, observing, placing, wish.options.devices)


def _check_bound(bound: Iterable[Handle]) -> None:
    """Raises UnknownHandleError."""
    if any(one.freed for one in bound):
        raise UnknownHandleError(
            "the plan is to be compiled once more, and a tensor that is a leaf of it was freed",
            advice="free it when the plan is done with",
        )


def _check_left(graph: contract.Graph, options: CompileOptions, left: tuple[str, ...]) -> None:
    """Raises MissingContentError for a weight that was a tensor on a device which is not left."""
    for (leaf, _), tensor in zip(options.bindings, options.bound, strict=False):
        if isinstance(tensor, TensorBase) and tensor.device in options.devices and tensor.device not in left:
            raise MissingContentError(
                f"the weight {graph.leaves[leaf].name!r} was a tensor on device {tensor.device}, which is "
                "lost, and this process has no array of it",
                advice="give the graph its array, g.weight(name, array), or compile anew with another tensor",
            )


def _compile(
    core: ClientCore, handle: int, graph: contract.Graph, how: CompileOptions, gate: Gate | None
) -> Procedure[PlanInfo]:
    yield from _arrive(core, graph, how, gate)
    try:
        return (yield _request(handle, graph, how))  # type: ignore[no-any-return]
    except BaseException as error:
        if how.updates and (isinstance(error, _UNANSWERED) or not isinstance(error, HeliographError)):
            how.doubt()
        raise


def _place(
    core: ClientCore,
    handle: int,
    graph: contract.Graph,
    how: CompileOptions,
    gate: Gate | None,
    missing: tuple[bytes, ...],
) -> Procedure[tuple[ContentOffer, ...]]:
    """Who takes missing contents besides the server."""
    yield from _arrive(core, graph, how, gate)
    return (yield PlaceContents(_request(handle, graph, how), missing))  # type: ignore[no-any-return]


def _arrive(
    core: ClientCore, graph: contract.Graph, how: CompileOptions, gate: Gate | None
) -> Procedure[None]:
    """Until the handles that a compile names are known to the server."""
    if how.bindings or how.updates:
        weights = [tensor for leaf, tensor in how.bindings if graph.leaves[leaf].kind is LeafKind.WEIGHT]
        yield from arrive(core, weights, gate)


def _request(handle: int, graph: contract.Graph, how: CompileOptions) -> Compile:
    return Compile(
        plan=handle,
        graph=graph,
        devices=how.devices,
        fusion=how.fusion,
        threads=how.threads,
        bindings=how.bindings,
        updates=how.updates,
        pins=how.pins,
        memory=how.memory,
        pipeline=how.pipeline,
        splits=how.splits,
        buffer_types=how.buffer_types,
        taps=how.taps,
        reservation=how.reservation,
        renews_lost=how.renews_lost,
        portion=how.portion,
    )


def estimate_graph(graph: Graph, how: CompileOptions) -> Procedure[PlanEstimate]:
    """What compiling would take; errors name the user's lines."""
    call = Estimate(graph.outline(), how.devices, how.fusion, how.pins, how.memory, how.pipeline)
    try:
        return (yield call)  # type: ignore[no-any-return]
    except HeliographError as error:
        raise with_source(error, graph.source_of) from None


def with_source(error: HeliographError, source_of: Callable[[int], str]) -> HeliographError:
    """The error with the line of user code that built its node."""
    if not error.origin.op or error.origin.source:
        return error
    return error.at(replace(error.origin, source=source_of(error.origin.node)))
