"""Sessions: names, counts, and what is compiled with which arguments, for both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from operator import index
from typing import Literal, NoReturn, TypeAlias

from heliograph._arguments import refuse_pickle
from heliograph._common import Shell
from heliograph._compiling import CompileOptions, compile_frozen, compile_graph, estimate_graph
from heliograph._devices import DevicesArgument, device_name, device_names
from heliograph._effects import Estimate, GetStatistics, ListDevices, ListWays, Procedure
from heliograph._groups import Groups
from heliograph._placing import Placing, placed
from heliograph._plans import PlanBase
from heliograph._progress import Progress, UploadBars
from heliograph._reserving import Reservation, reserve_graph
from heliograph._running import PlanSpec
from heliograph._sharing import Sharing
from heliograph._streams import StreamBase, make_stream
from heliograph._tensors import TensorBase
from heliograph._tracing import COMPILE_SPAN, traced
from heliograph.builder import Graph
from heliograph_proto import STATISTICS, WAYS
from heliograph_proto import commands as c
from heliograph_proto import graph as contract
from heliograph_proto.description import BackendInfo, DeviceList, PlanEstimate, SessionInfo, Traffic
from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.graph import LeafKind
from heliograph_proto.membership import MemberInfo, Way
from heliograph_proto.types import TensorType

#: What becomes of a plan when a device is lost.
OnLoss: TypeAlias = Literal["raise", "rebuild"]

#: Tensors of the session that leaves of a graph are, by the leaves' names.
Bindings = Mapping[str, TensorBase] | None


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """What a session has done so far, at one moment."""

    #: Commands that were sent, those of them that are done, and those that wait for credit.
    sent_commands: int
    completed_commands: int
    queued_commands: int
    #: Bytes that count against Limits.in_flight_bytes.
    in_flight_bytes: int
    #: What `set` and `get` of tensors have carried, and how often it was copied on this side.
    traffic: Traffic


class SessionBase:
    """A session's names and counts."""

    def __init__(self, shell: Shell, progress: Progress | None = None) -> None:
        self._shell = shell
        self._progress = progress
        #: Of plans that are placed again when a device is lost.
        self._groups = Groups(shell.core)
        if isinstance(progress, UploadBars):
            shell.core.bars = progress
        # Work goes in the order of the default stream, which is one of the URL's device.
        device = device_name(shell, None)
        if device != shell.info.devices[0].name:
            self._stream = make_stream(shell, device, StreamBase)
            shell.core.default_stream = self._stream._handle

    @property
    def shared_memory(self) -> bool:
        """Whether tensors go through memory that server and client map both."""
        return self._shell.core.shared is not None

    @property
    def why_not_shared(self) -> str:
        """Why they do not; empty if they do."""
        return self._shell.core.why_not_shared

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle("session", "connect anew there: hg.connect(session.address)")

    def _admitting(self, plan: PlanBase, on_loss: OnLoss, journal_bytes: int) -> Procedure[None]:
        """A plan was compiled, which becomes one that is rebuilt if that was asked for. Raises
        InvalidArgumentError where it cannot share its variables; the plan is freed then."""
        try:
            if on_loss == "rebuild":
                yield from self._groups.admit(plan, journal_bytes)
            else:
                self._groups.admit_other(plan)
        except BaseException:
            plan.free()
            raise

    def _compiling(
        self,
        graph: Graph,
        devices: DevicesArgument,
        fusion: bool,
        threads: int,
        weights: Bindings,
        variables: Bindings,
        placing: Placing,
        pipeline: int,
    ) -> Procedure[PlanSpec]:
        """Compiles a graph under a new handle."""
        check_graph(graph, "compile")
        names = device_names(self._shell, devices)
        options = options_of(self._shell, graph, names, fusion, threads, weights, variables)
        options = placed(self._shell, graph, options, placing)
        options = replace(options, pipeline=checked_pipeline(pipeline))
        return traced(COMPILE_SPAN, compile_graph(self._shell.core, graph, options, self._progress))

    def _compiling_frozen(
        self,
        graph: contract.Graph,
        devices: DevicesArgument,
        fusion: bool,
        threads: int,
        bindings: Mapping[int, TensorBase],
        updates: PlanBase | None,
        reservation: Reservation | None,
        sharing: Sharing | None,
    ) -> Procedure[PlanSpec]:
        """Compiles a graph of the contract, whose contents the session holds."""
        names = device_names(self._shell, devices)
        handles = handles_of(self._shell, bindings)
        lies_in = 0 if reservation is None else reservation._used_in(self._shell)
        options = CompileOptions(names, fusion, checked_threads(threads), handles, reservation=lies_in)
        if sharing is not None:
            options = sharing.asked(self._shell.info, options)
        if updates is not None:
            options = updates._hand_over(options)
        return compile_frozen(self._shell.core, graph, {}, options, lambda _: "", self._progress)

    def _reserving(
        self,
        graph: Graph,
        devices: DevicesArgument,
        fusion: bool,
        threads: int,
        placing: Placing,
    ) -> Procedure[Reservation]:
        """Takes memory for plans that are compiled from then on."""
        check_graph(graph, "reserve")
        names = device_names(self._shell, devices)
        options = CompileOptions(names, fusion, checked_threads(threads))
        return reserve_graph(self._shell, graph, placed(self._shell, graph, options, placing))

    def _estimating(
        self, graph: Graph, devices: DevicesArgument, fusion: bool, placing: Placing, pipeline: int
    ) -> Procedure[PlanEstimate]:
        check_graph(graph, "estimate")
        options = CompileOptions(device_names(self._shell, devices), fusion)
        options = placed(self._shell, graph, options, placing)
        return estimate_graph(graph, replace(options, pipeline=checked_pipeline(pipeline)))

    def _estimating_frozen(
        self, graph: contract.Graph, devices: DevicesArgument, fusion: bool
    ) -> Procedure[PlanEstimate]:
        """What a graph of the contract would take."""
        found: PlanEstimate = yield Estimate(graph, device_names(self._shell, devices), fusion)
        return found

    def _all_streams(self) -> tuple[int, ...]:
        return (c.DEFAULT_STREAM, *sorted(self._shell.core.streams))

    @property
    def address(self) -> str:
        """The URL of the daemon."""
        return str(self._shell.address)

    @property
    def info(self) -> SessionInfo:
        """What the handshake agreed on: version, features, limits, the daemon's incarnation."""
        return self._shell.info

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._shell.core.lost is not None

    def statistics(self) -> SessionStatistics:
        """Counts, now."""
        core = self._shell.core
        found, traffic = self._shell.advance(lambda: (core.statistics(), core.traffic))
        return SessionStatistics(
            found.sent_commands,
            found.completed_commands,
            found.queued_commands,
            found.in_flight_bytes,
            traffic,
        )

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self._shell.info.devices)
        return f"<Session {self.address} {'closed' if self.closed else 'open'}: {devices}>"


def ask_backends() -> Procedure[tuple[BackendInfo, ...]]:
    """The backends of the server."""
    found: DeviceList = yield ListDevices()
    return found.backends


def ask_members() -> Procedure[tuple[MemberInfo, ...]]:
    """The members of the server's pool."""
    found: DeviceList = yield ListDevices()
    return found.members


def ask_ways(info: SessionInfo) -> Procedure[tuple[Way, ...]]:
    """The ways of the server's pool. Raises UnsupportedError where it does not tell."""
    if WAYS not in info.features:
        raise UnsupportedError(
            "the server does not tell of the ways of its pool", advice="upgrade the server"
        )
    found: tuple[Way, ...] = yield ListWays()
    return found


def ask_facts() -> Procedure[Mapping[str, str]]:
    """What the server tells of its process."""
    found: DeviceList = yield ListDevices()
    return found.facts


def ask_traffic(info: SessionInfo) -> Procedure[Traffic]:
    """What the server has carried. Raises UnsupportedError where it does not count."""
    if STATISTICS not in info.features:
        raise UnsupportedError("the server does not count what it carries", advice="upgrade the server")
    found: Traffic = yield GetStatistics()
    return found


# Checks of arguments


def check_on_loss(on_loss: OnLoss, journal_bytes: int, variables: Bindings) -> None:
    """Raises InvalidArgumentError."""
    if on_loss not in ("raise", "rebuild"):
        raise InvalidArgumentError(f"on_loss is {on_loss!r:.80}", advice='"raise" or "rebuild"')
    if not hasattr(journal_bytes, "__index__") or index(journal_bytes) < 0:
        raise InvalidArgumentError(
            f"journal_bytes is {journal_bytes!r:.80}", advice="the most bytes that are kept to replay runs"
        )
    if on_loss == "rebuild" and variables:
        raise InvalidArgumentError(
            "variables that are tensors of the session cannot be restored when a device is lost",
            advice="leave out variables=: the session has them under their names, plan.variables",
        )


def check_graph(graph: Graph, method: str) -> None:
    """Raises InvalidArgumentError unless it is a graph."""
    if not isinstance(graph, Graph):
        raise InvalidArgumentError(
            f"{method} takes a graph, not {graph!r:.200}",
            advice=f"name the value as an output, g.output('y', y), and {method} its graph: {method}(g)",
        )


def checked_threads(threads: int) -> int:
    """A number of threads; 0 is all. Raises InvalidArgumentError."""
    if not hasattr(threads, "__index__") or not 0 <= index(threads) < 2**32:
        raise InvalidArgumentError(f"threads is {threads!r:.80}", advice="a number of threads, or 0 for all")
    return index(threads)


def checked_pipeline(pipeline: int) -> int:
    """How many runs may be under way at once. Raises InvalidArgumentError."""
    if not hasattr(pipeline, "__index__") or not 1 <= index(pipeline) < 2**32:
        raise InvalidArgumentError(
            f"pipeline is {pipeline!r:.80}", advice="how many runs may be under way at once: 1 or more"
        )
    return index(pipeline)


def options_of(
    shell: Shell,
    graph: Graph,
    devices: tuple[str, ...],
    fusion: bool,
    threads: int,
    weights: Bindings,
    variables: Bindings,
) -> CompileOptions:
    """How a graph is compiled, with every weight accounted for. Raises InvalidArgumentError."""
    bound = {
        **_bound(graph, LeafKind.WEIGHT, "weights", weights),
        **_bound(graph, LeafKind.VARIABLE, "variables", variables),
    }
    if missing := [name for name, number in graph.without_content.items() if number not in bound]:
        raise InvalidArgumentError(
            f"the weight {missing[0]!r} has no content and is bound to no tensor"
            + (f"; {len(missing) - 1} more are not" if len(missing) > 1 else ""),
            advice=f"name its tensor: compile(g, weights={{{missing[0]!r}: tensor}})",
        )
    handles = handles_of(shell, bound)
    return CompileOptions(
        devices,
        fusion,
        checked_threads(threads),
        handles,
        bound=tuple(bound.values()),
        reservation=shell.core.reservation,
    )


def _bound(graph: Graph, kind: LeafKind, argument: str, given: Bindings) -> dict[int, TensorBase]:
    """The tensors that leaves of a kind are, by the leaves' numbers. Raises InvalidArgumentError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"{argument} is {type(given).__name__}", advice=f"tensors by name: {argument}={{'w': tensor}}"
        )
    leaves, found = graph.leaves(kind), {}
    for name, tensor in given.items():
        if name not in leaves:
            raise InvalidArgumentError(
                f"the graph has no {kind.value} {name!r:.80}", advice=_near(str(name), list(leaves))
            )
        number, type_ = leaves[name]
        _check_bound(f"{argument}[{name!r}]", type_, tensor)
        found[number] = tensor
    return found


def _near(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known[:8]) or 'none'}"


def _check_bound(what: str, type_: TensorType, tensor: TensorBase) -> None:
    if not isinstance(tensor, TensorBase):
        raise InvalidArgumentError(
            f"{what} is {type(tensor).__name__}", advice="a tensor of the session: session.put(array)"
        )
    if tensor.type != type_:
        raise InvalidArgumentError(f"{what} is {tensor.type}; the graph says {type_}")
    if not tensor.is_contiguous:
        raise InvalidArgumentError(f"{what} is a view with gaps", advice="copy it: tensor.copy_to(another)")


def handles_of(shell: Shell, bound: Mapping[int, TensorBase]) -> tuple[tuple[int, int], ...]:
    """Numbers of leaves and the handles of their tensors. Raises UnknownHandleError."""
    return tuple((number, tensor._used_in(shell)) for number, tensor in bound.items())


def updating(
    shell: Shell,
    plan: PlanBase,
    graph: Graph,
    fusion: bool,
    threads: int,
    weights: Bindings,
    variables: Bindings,
    placing: Placing,
    progress: Progress | None,
) -> Procedure[None]:
    """Makes a plan that of another graph, on the same devices."""
    check_graph(graph, "update")
    if plan._group is not None:
        raise InvalidArgumentError(
            "a plan that is rebuilt when a device is lost does not become that of another graph",
            advice="compile the other graph, with on_loss='rebuild' as well",
        )
    recipe = plan._spec.recipe
    devices = recipe.devices if recipe is not None else plan.devices
    options = options_of(shell, graph, devices, fusion, threads, weights, variables)
    options = plan._hand_over(placed(shell, graph, options, placing))
    return plan._replace(traced(COMPILE_SPAN, compile_graph(shell.core, graph, options, progress)))
