"""Sessions, for both APIs: properties, counts, and the arguments of compilations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, NoReturn, TypeAlias

from heliograph._base.device import device_name, device_names
from heliograph._base.placement import (
    Bindings,
    PlanArguments,
    bound_leaves,
    checked_options,
)
from heliograph._base.plan import PlanBase
from heliograph._base.reopening import Reopening
from heliograph._base.reservation import Reservation, reserve_graph
from heliograph._base.streams import StreamBase, make_stream
from heliograph.core.connection_state import ConnectionState
from heliograph.core.effects import Procedure
from heliograph.core.progress.bars import Progress, ProgressBars
from heliograph.core.shell import Shell
from heliograph.core.tracing import COMPILE_SPAN, traced
from heliograph.graph.arguments import refuse_pickle
from heliograph.graph.builder import Graph
from heliograph.procedures.compile import (
    Compilation,
    compile_graph,
    estimate_graph,
)
from heliograph.procedures.rebuild import RebuildGroups
from heliograph.procedures.run import PlanSpec
from heliograph.procedures.transfer import free_variable
from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_proto.plans import PlanEstimate
from heliograph_proto.sessions import SessionInfo, Traffic

#: How a plan reacts to the loss of a device.
OnLoss: TypeAlias = Literal["raise", "rebuild"]


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Counts of a session, at one moment."""

    #: Commands that were sent, those of them that are done, and those that wait for credit.
    sent_commands: int
    completed_commands: int
    queued_commands: int
    #: Bytes that count against Limits.in_flight_bytes.
    in_flight_bytes: int
    #: The bytes that `set` and `get` of tensors have carried, and how often they were copied on
    #: this side.
    traffic: Traffic


class SessionBase:
    """The properties and counts of a session."""

    def __init__(
        self, shell: Shell, progress: Progress | None = None, reopening: Reopening | None = None
    ) -> None:
        self._shell = shell
        self._progress = progress
        #: Opens another session with the arguments of this one; None: there is no other.
        self._reopening = reopening
        #: Those that took its place after it was lost. They end with it.
        self._successors: list[Any] = []
        #: True once its user has closed it.
        self._is_left = False
        #: The plans that are placed again when a device is lost.
        self._groups = RebuildGroups(shell.core)
        if isinstance(progress, ProgressBars):
            shell.core.bars = progress
        # Commands go to the default stream, here one of the URL's device.
        device = device_name(shell, None)
        if device != shell.info.devices[0].name:
            self._stream = make_stream(shell, device, StreamBase)
            shell.core.default_stream = self._stream._handle

    @property
    def shared_memory(self) -> bool:
        """True if tensors go through memory that server and client both map."""
        return self._shell.core.shared is not None

    @property
    def why_not_shared(self) -> str:
        """The reason why they do not; empty if they do."""
        return self._shell.core.why_not_shared

    @property
    def command_socket(self) -> bool:
        """True if commands and completions go over a unix socket, and not by gRPC."""
        return not self._shell.core.why_no_socket

    @property
    def why_no_command_socket(self) -> str:
        """The reason why they go by gRPC, or nowhere; empty if they do not."""
        return self._shell.core.why_no_socket

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle("session", "connect there: hg.connect(session.address)")

    def _admitting(self, plan: PlanBase, on_loss: OnLoss, journal_bytes: int) -> Procedure[None]:
        """Register a compiled plan, which is rebuilt after a device loss if that was requested.

        Raises InvalidArgumentError if it cannot share its variables; the plan is freed then.
        """
        try:
            if on_loss == "rebuild":
                yield from self._groups.admit(plan, journal_bytes)
            else:
                self._groups.admit_other(plan)
        except BaseException:
            plan.free()
            raise

    def _compiling(self, graph: Graph, given: PlanArguments) -> Procedure[PlanSpec]:
        """Compile a graph under a new handle."""
        check_graph(graph, "compile")
        how = compilation(self._shell, graph, given, device_names(self._shell, given.devices))
        return traced(COMPILE_SPAN, compile_graph(self._shell.core, graph, how, self._progress))

    def _reserving(self, graph: Graph, given: PlanArguments) -> Procedure[Reservation]:
        """Reserve memory for the plans that are compiled from then on."""
        check_graph(graph, "reserve")
        names = device_names(self._shell, given.devices)
        return reserve_graph(self._shell, graph, checked_options(self._shell, graph, given, names))

    def _estimating(self, graph: Graph, given: PlanArguments) -> Procedure[PlanEstimate]:
        check_graph(graph, "estimate")
        names = device_names(self._shell, given.devices)
        return estimate_graph(graph, checked_options(self._shell, graph, given, names))

    def _freeing(self, name: str) -> Procedure[None]:
        """Free a variable, which no plan uses any more."""
        if not isinstance(name, str):
            raise InvalidArgumentError(
                f"the name of a variable is a text, not {name!r:.80}", advice="plan.variables has the names"
            )
        yield from free_variable(self._shell.core, name)
        self._groups.forget_variable(name)

    def _all_streams(self) -> tuple[int, ...]:
        return (c.DEFAULT_STREAM, *sorted(self._shell.core.streams))

    @property
    def address(self) -> str:
        """The URL of the daemon."""
        return str(self._shell.address)

    @property
    def info(self) -> SessionInfo:
        """The result of the handshake: version, features, limits, the daemon's incarnation."""
        return self._shell.info

    @property
    def closed(self) -> bool:
        """True if the session has ended."""
        return self._shell.core.lost is not None

    @property
    def _lost(self) -> HeliographError | None:
        """The reason why it has ended."""
        return self._shell.core.lost

    @property
    def connection(self) -> ConnectionState:
        """The state of the connection: CONNECTED, DISCONNECTED, ATTACHING or LOST."""
        return self._shell.connection_state

    def on_disconnect(self, callback: Callable[[HeliographError], None]) -> Callable[[], None]:
        """Call a function with the error whenever the connection breaks and will be made again.

        Calls go on and wait meanwhile, each for its own `timeout`. The function is called from any
        thread, and must not block. Return a function that undoes this.
        """
        listening = self._shell.when_disconnected
        listening.append(callback)

        def undo() -> None:
            if callback in listening:
                listening.remove(callback)

        return undo

    def statistics(self) -> SessionStatistics:
        """Return the session's counts at this moment."""
        core = self._shell.core
        found, traffic = self._shell.advance(lambda: (core.statistics(), core.traffic))
        return SessionStatistics(
            found.sent_commands,
            found.completed_commands,
            found.queued_commands,
            found.in_flight_bytes,
            traffic,
        )

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph._base.views.objects import session_view

        return session_view(self)

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self._shell.info.devices)
        return f"<Session {self.address} {'closed' if self.closed else 'open'}: {devices}>"


# Checks of arguments


def check_on_loss(on_loss: OnLoss, journal_bytes: int, variables: Bindings) -> None:
    """Raise InvalidArgumentError for arguments that do not fit."""
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
    """Raise InvalidArgumentError unless it is a graph."""
    if not isinstance(graph, Graph):
        raise InvalidArgumentError(
            f"{method} takes a graph, not {graph!r:.200}",
            advice=f"name the value as an output, g.output('y', y), and {method} its graph: {method}(g)",
        )


def compilation(shell: Shell, graph: Graph, given: PlanArguments, devices: tuple[str, ...]) -> Compilation:
    """Return the compilation of a graph on these devices.

    Raises InvalidArgumentError, UnknownDeviceError and UnknownHandleError.
    """
    bound = bound_leaves(shell, graph, given)
    options = checked_options(shell, graph, given, devices, bound)
    return Compilation(options, bound, reservation=shell.core.reservation)


def updating(
    shell: Shell, plan: PlanBase, graph: Graph, given: PlanArguments, progress: Progress | None
) -> Procedure[None]:
    """Replace a plan's graph by another one, on the same devices."""
    check_graph(graph, "update")
    if plan._group is not None:
        raise InvalidArgumentError(
            "a plan that is rebuilt when a device is lost cannot become the plan of another graph",
            advice="compile the other graph, with on_loss='rebuild' as well",
        )
    recipe = plan._spec.recipe
    devices = recipe.devices if recipe is not None else plan.devices
    how = plan._hand_over(compilation(shell, graph, given, devices))
    return plan._replace(traced(COMPILE_SPAN, compile_graph(shell.core, graph, how, progress)))
