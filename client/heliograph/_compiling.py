"""Compiling over the wire: contents first, then one call; and what compiling would take.

Generators as in `_procedures`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from heliograph._arrays import byte_view
from heliograph._common import Handle
from heliograph._effects import Compile, Compute, Estimate, FindMissing, Procedure, Upload
from heliograph._gates import Gate
from heliograph._journal import placed_on
from heliograph._outcome import Transfer
from heliograph._procedures import arrive, stop, wait_for
from heliograph._progress import Meter, Progress
from heliograph._running import PlanSpec, Recipe
from heliograph._tensors import TensorBase
from heliograph.builder import Graph
from heliograph.protocol import ClientCore
from heliograph_proto import graph as contract
from heliograph_proto.description import PlanEstimate, PlanInfo
from heliograph_proto.errors import (
    CancelledError,
    ConnectionError,
    ContentMismatchError,
    DeadlineExceededError,
    HeliographError,
    MissingContentError,
    UnavailableError,
    UnknownHandleError,
)
from heliograph_proto.graph import LeafKind
from heliograph_proto.portions import Portion
from heliograph_proto.rows import RowSplit

#: How many contents are uploaded at once.
_WINDOW = 3
#: How often what is missing is asked for and sent before an upload's error is the caller's.
_TRIES = 3
#: What a call ends with that the server has not answered, though it may have done it.
_UNANSWERED = (CancelledError, ConnectionError, DeadlineExceededError)

Contents = Mapping[bytes, "np.ndarray[Any, Any]"]
#: Digests, and how many bytes of each the server has.
Missing = tuple[tuple[bytes, int], ...]


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
    yield from upload_missing(core, contents, progress)
    handle = core.handle()
    try:
        try:
            info = yield from _compile(core, handle, graph, options, gate)
        except MissingContentError:
            # Another plan's contents may just have been dropped: ask and send once more.
            yield from upload_missing(core, contents, progress)
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
    if how.bindings or how.updates:
        weights = [tensor for leaf, tensor in how.bindings if graph.leaves[leaf].kind is LeafKind.WEIGHT]
        yield from arrive(core, weights, gate)
    request = Compile(
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
    try:
        return (yield request)  # type: ignore[no-any-return]
    except BaseException as error:
        if how.updates and (isinstance(error, _UNANSWERED) or not isinstance(error, HeliographError)):
            how.doubt()
        raise


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


def upload_missing(core: ClientCore, contents: Contents, progress: Progress | None) -> Procedure[None]:
    """Sends the contents that the session does not hold, a few at a time."""
    if not contents:
        return
    for tries_left in reversed(range(_TRIES)):
        missing: Missing = yield FindMissing(tuple(contents))
        try:
            yield from _upload(core, contents, missing, progress)
            return
        except (UnavailableError, ContentMismatchError) as error:
            # Bulk has a connection of its own, which may have broken alone; or the beginning of a content,
            # where an upload was to go on, is gone or not what it should be.
            core.check()
            went_on = any(start for _, start in missing)
            if not tries_left or not (went_on or isinstance(error, UnavailableError)):
                raise


def _upload(
    core: ClientCore, contents: Contents, missing: Missing, progress: Progress | None
) -> Procedure[None]:
    """Sends contents, each from the byte where an earlier upload broke off."""
    views = [(digest, byte_view(contents[digest]), start) for digest, start in missing]
    meter = Meter("uploading weights", sum(view.nbytes - start for _, view, start in views), progress)
    window: deque[Transfer] = deque()
    try:
        for digest, view, start in views:
            window.append((yield Upload(digest, view, min(start, view.nbytes), progress=meter)))
            if len(window) == _WINDOW:
                yield from _ended(core, window)
        while window:
            yield from _ended(core, window)
    except BaseException:
        stop(core, [], list(window))
        raise
    finally:
        meter.end()


def _ended(core: ClientCore, window: deque[Transfer]) -> Procedure[None]:
    yield from wait_for(core, window[0].ended)
    window.popleft()
