"""Sessions: names, counts, and what is compiled with which arguments, for both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Literal, NoReturn, TypeAlias

from heliograph._base.device import device_name, device_names
from heliograph._base.placement import (
    Bindings,
    PlanArguments,
    bound_leaves,
    check_handles,
    checked_options,
)
from heliograph._base.plan import PlanBase
from heliograph._base.reservation import Reservation, reserve_graph
from heliograph._base.streams import StreamBase, make_stream
from heliograph._base.tensor import TensorBase
from heliograph.core.effects import Procedure, ask
from heliograph.core.methods import ESTIMATE, LIST_DEVICES
from heliograph.core.progress import Progress, UploadBars
from heliograph.core.shell import Shell
from heliograph.core.tracing import COMPILE_SPAN, traced
from heliograph.graph.arguments import refuse_pickle
from heliograph.graph.builder import Graph
from heliograph.procedures.compile import Compilation, compile_frozen, compile_graph, estimate_graph
from heliograph.procedures.rebuild import RebuildGroups
from heliograph.procedures.run import PlanSpec
from heliograph_proto import EXCHANGE
from heliograph_proto import commands as c
from heliograph_proto import graph as contract
from heliograph_proto.devices import BackendInfo, MemberInfo
from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.plans import EstimateRequest, PlanEstimate, PlanOptions
from heliograph_proto.sessions import SessionInfo, Traffic

#: What becomes of a plan when a device is lost.
OnLoss: TypeAlias = Literal["raise", "rebuild"]


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
        self._groups = RebuildGroups(shell.core)
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

    def _compiling(self, graph: Graph, given: PlanArguments) -> Procedure[PlanSpec]:
        """Compiles a graph under a new handle."""
        check_graph(graph, "compile")
        how = compilation(self._shell, graph, given, device_names(self._shell, given.devices))
        return traced(COMPILE_SPAN, compile_graph(self._shell.core, graph, how, self._progress))

    def _compiling_frozen(
        self,
        graph: contract.Graph,
        options: PlanOptions,
        bindings: Mapping[int, TensorBase],
        updates: PlanBase | None,
        reservation: Reservation | None,
    ) -> Procedure[PlanSpec]:
        """Compiles a graph of the contract, whose contents the session holds. Raises UnsupportedError for a
        partition where the server exchanges nothing."""
        if options.partition is not None and EXCHANGE not in self.info.features:
            raise UnsupportedError(
                f"the server {self.info.server} does not exchange values with others", advice="upgrade it"
            )
        check_handles(self._shell, bindings)
        lies_in = 0 if reservation is None else reservation._used_in(self._shell)
        how = Compilation(options, bindings, reservation=lies_in)
        if updates is not None:
            how = updates._hand_over(how)
        return compile_frozen(self._shell.core, graph, {}, how, lambda _: "", self._progress)

    def _reserving(self, graph: Graph, given: PlanArguments) -> Procedure[Reservation]:
        """Takes memory for plans that are compiled from then on."""
        check_graph(graph, "reserve")
        names = device_names(self._shell, given.devices)
        return reserve_graph(self._shell, graph, checked_options(self._shell, graph, given, names))

    def _estimating(self, graph: Graph, given: PlanArguments) -> Procedure[PlanEstimate]:
        check_graph(graph, "estimate")
        names = device_names(self._shell, given.devices)
        return estimate_graph(graph, checked_options(self._shell, graph, given, names))

    def _estimating_frozen(self, graph: contract.Graph, options: PlanOptions) -> Procedure[PlanEstimate]:
        """What a graph of the contract would take."""
        return ask(ESTIMATE, EstimateRequest(graph, options))

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
    found = yield from ask(LIST_DEVICES, None)
    return found.backends


def ask_members() -> Procedure[tuple[MemberInfo, ...]]:
    """The members of the server's pool."""
    found = yield from ask(LIST_DEVICES, None)
    return found.members


def ask_facts() -> Procedure[Mapping[str, str]]:
    """What the server tells of its process."""
    found = yield from ask(LIST_DEVICES, None)
    return found.facts


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


def compilation(shell: Shell, graph: Graph, given: PlanArguments, devices: tuple[str, ...]) -> Compilation:
    """How a graph is compiled on these devices. Raises InvalidArgumentError, UnknownDeviceError,
    UnknownHandleError."""
    bound = bound_leaves(shell, graph, given)
    options = checked_options(shell, graph, given, devices, bound)
    return Compilation(options, bound, reservation=shell.core.reservation)


def updating(
    shell: Shell, plan: PlanBase, graph: Graph, given: PlanArguments, progress: Progress | None
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
    how = plan._hand_over(compilation(shell, graph, given, devices))
    return plan._replace(traced(COMPILE_SPAN, compile_graph(shell.core, graph, how, progress)))
