"""Sessions and plans on the members of a pool, as their head uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from heliograph._base import reservation as reservations
from heliograph._base.buffer import place_of
from heliograph._base.device import DeviceArgument, device_name
from heliograph._base.placement import check_handles
from heliograph._base.reservation import Reservation
from heliograph._base.streams import StreamBase, stream_handle
from heliograph.core.effects import ask
from heliograph.core.methods import ESTIMATE, TAKE_UP, TELL_HANDOVER, TakeUpRequest
from heliograph.plan import Plan
from heliograph.procedures import compile as procedures
from heliograph.procedures.compile import Compilation, FrozenGraph
from heliograph.procedures.run import RunOutput, Submission, choose_outputs, submit
from heliograph.procedures.transfer import Sending, arrive
from heliograph.run_future import InlineFuture, RunFuture
from heliograph.session import Session
from heliograph.tensor import Buffer, Tensor
from heliograph.transport.blocking_grpc import GrpcShell, HeadLink
from heliograph.transport.bulk.tickets import Announcement, Tell, TicketUpload
from heliograph.transport.channels import credentials_of
from heliograph.transport.handshake import Wish
from heliograph_proto import EXCHANGE, HAND_OVER
from heliograph_proto import graph as contract
from heliograph_proto.addresses import Credentials, parse_address
from heliograph_proto.devices import DeviceChange, Usage
from heliograph_proto.errors import HeliographError, ProtocolError, UnsupportedError
from heliograph_proto.plans import ContentOffer, EstimateRequest, PlanEstimate, PlanOptions, PlanReport
from heliograph_proto.sessions import StayingSession, TakenBytes, WantedBytes

#: The time for a member to end an earlier session and to find wanted bytes in its memory.
TAKE_UP_SECONDS = 300.0
#: The time for a member to take a message about what stays there.
TELL_SECONDS = 5.0


def connect_as_head(
    url: str,
    timeout: float,
    silence_seconds: float,
    credentials: Credentials | None = None,
    lease_seconds: float = 0.0,
    kept_seconds: float = 0.0,
) -> Session:
    """Connect like `hg.connect`, to a server whose connection breaks after this much silence.

    `credentials` defaults to those of the URL and the environment. `lease_seconds`: the time for
    which it connects again after a break; `kept_seconds`: that for which the server keeps the
    session if it does not, if longer. A port that refuses connections ends the session at once.
    """
    address = parse_address(url)
    shown = credentials_of(address) if credentials is None else credentials
    shown = replace(shown, in_clear=shown.in_clear or address.insecure)
    wish = Wish(round(max(lease_seconds, kept_seconds) * 1e3) if lease_seconds else 0)
    how = HeadLink(lease_seconds)
    return Session(GrpcShell(address, timeout, "auto", silence_seconds, shown, wish=wish, head=how))


def compile_frozen(
    session: Session,
    graph: contract.Graph,
    options: PlanOptions,
    *,
    bindings: Mapping[int, Tensor],
    updates: Plan | None = None,
    reservation: Reservation | None = None,
    timeout: float | None = None,
) -> Plan:
    """Compile a graph of the contract.

    Args:
        bindings: Tensors for leaves, by the leaves' numbers. The server must have the contents of
            other weights.
        updates: A plan whose memory the new one takes over. It is freed then; if the server
            refuses, it is unchanged.
        reservation: The reservation for the plan's memory.

    Raises UnsupportedError for a partition if the server exchanges no values.
    """
    shell = session._shell
    if options.partition is not None and EXCHANGE not in session.info.features:
        raise UnsupportedError(
            f"the server {session.info.server} does not exchange values with others", advice="upgrade it"
        )
    check_handles(shell, bindings)
    handle = 0 if reservation is None else reservation._used_in(shell)
    how = Compilation(options, bindings, reservation=handle)
    if updates is not None:
        how = updates._hand_over(how)
    source = FrozenGraph(graph, {}, lambda _: "", session._progress)
    spec = shell.drive(
        procedures.compile_frozen(shell.core, source, how), timeout, lambda: f"compiling {graph!r}"
    )
    if updates is not None:
        updates._give_up()
    return Plan(shell, spec)


def estimate_frozen(session: Session, graph: contract.Graph, options: PlanOptions) -> PlanEstimate:
    """Estimate the memory for a graph of the contract."""
    procedure = ask(ESTIMATE, EstimateRequest(graph, options))
    return session._shell.drive(procedure, None, lambda: f"estimating {graph!r}")


def reserve_blocks(session: Session, block_bytes: Sequence[int], device: DeviceArgument) -> Reservation:
    """Reserve memory, in blocks of these sizes, for compilations that name it."""
    options = PlanOptions((device_name(session._shell, device),))
    procedure = reservations.reserve_blocks(session._shell, options, block_bytes)
    return session._shell.drive(procedure, None, "reserving memory")


def await_arrival(session: Session, timeout: float | None = None) -> None:
    """Wait until the server has received everything sent so far, frees included."""
    session._shell.drive(arrive(session._shell.core), timeout, "what was sent")


def when_lost(session: Session, callback: Callable[[HeliographError], None]) -> None:
    """Call a function once, with the reason, when the session has ended."""
    session._shell.when_lost(callback)


def take_up(
    session: Session, earlier: bytes, wanted: Sequence[WantedBytes]
) -> dict[int, tuple[Buffer, TakenBytes]]:
    """End an earlier session with the same server, and take the memory of it that has wanted bytes.

    Returns the buffers by their place in `wanted`, whose handles are ignored. Raises the errors of
    SessionService.TakeUp, and ProtocolError for a server that knows no such call or answers
    something else.
    """
    shell = session._shell
    handles = shell.advance(lambda: [shell.core.handle() for _ in wanted])
    numbered = tuple(replace(one, buffer=handle) for one, handle in zip(wanted, handles, strict=True))
    request = TakeUpRequest(earlier, numbered)
    taken = shell.drive(ask(TAKE_UP, request), TAKE_UP_SECONDS, "taking up an earlier session")
    places = {handle: place for place, handle in enumerate(handles)}
    found: dict[int, tuple[Buffer, TakenBytes]] = {}
    for one in taken:
        if (place := places.get(one.buffer)) is None or place in found:
            raise ProtocolError(f"{session.address} took up a buffer that was not wanted")
        where = place_of(shell, one.device, one.buffer_type, Usage.ANY)
        size_bytes = wanted[place].size_bytes
        found[place] = Buffer(shell, one.buffer, where, size_bytes, is_list=False), one
    return found


def tell_handover(session: Session, staying: Sequence[StayingSession]) -> None:
    """Tell a server that drains which of this head's sessions keep values there; none: it may end.

    A server that does not hand over is told nothing.
    """
    if HAND_OVER in session.info.features:
        asking = ask(TELL_HANDOVER, tuple(staying))
        session._shell.drive(asking, TELL_SECONDS, "telling what stays on the server")


def end_earlier(session: Session, earlier: bytes) -> None:
    """End an earlier session with the same server, by its secret, unless it has ended."""
    shell = session._shell
    if isinstance(shell, GrpcShell):
        shell.end_earlier(earlier)


def leave(session: Session) -> None:
    """Let go of a session, which the server keeps for its lease."""
    shell = session._shell
    if isinstance(shell, GrpcShell):
        shell.leave()


def why_away(session: Session) -> HeliographError | None:
    """Return the error with which the connection broke, while the session has none."""
    shell = session._shell
    return shell.why_down if isinstance(shell, GrpcShell) else None


def when_changed(session: Session, callback: Callable[[DeviceChange], None]) -> None:
    """Call a function with each change of the server's devices. It replaces an earlier one."""
    session._shell.watchers.tell = callback


def announce(session: Session, contents: Sequence[tuple[bytes, Tensor]], tell: Tell) -> Announcement:
    """Announce contents by digest, which other clients will send directly into these tensors.

    Raises the errors of BulkService.Admit, and UnsupportedError.
    """
    return session._shell.announce([(digest, one._live_handle, one.nbytes) for digest, one in contents], tell)


def bring(session: Session, offer: ContentOffer, size_bytes: int) -> TicketUpload:
    """Return an upload to the session's server by a ticket that it gave.

    The caller must begin it.
    """
    return session._shell.bring(offer, size_bytes)


def submit_bytes(plan: Plan, inputs: Sequence[bytes]) -> InlineFuture | None:
    """Send a run with one small message each way that fetches all outputs; inputs are bytes.

    Returns None if the plan must take the general path.
    """
    inline = plan._inline_plan()
    if inline is None or (run := inline.run_of(inputs)) is None:
        return None
    pending = plan._send_small(run, inline, waits=True)
    return None if pending is None else InlineFuture(plan._shell, inline, pending)


def submit_partition(
    plan: Plan,
    number: int,
    inputs: Sequence[Tensor | np.ndarray[Any, Any]],
    fetched: Sequence[int],
    into: Mapping[int, Tensor],
    stream: StreamBase | None = None,
) -> RunFuture:
    """Send the plan's part of a run of the whole graph.

    Args:
        number: The number of the whole run; 0 if the plan is all of it.
        inputs: The inputs in order, as tensors or bytes, which must not change until the run is
            done.
        fetched: The numbers of the outputs to return as arrays.
        into: Tensors by the number of the output to write to them.
        stream: The stream of the run (default: the session's own).
    """
    shell, spec = plan._shell, plan._spec
    submission = submission_of(plan, number, inputs, fetched, into, stream_handle(shell, stream))
    run = shell.drive(submit(shell.core, submission), None, spec.what)
    return RunFuture(shell, run, {}, spec.what)


def submission_of(
    plan: Plan,
    number: int,
    inputs: Sequence[Tensor | np.ndarray[Any, Any]],
    fetched: Sequence[int],
    into: Mapping[int, Tensor],
    stream: int | None,
) -> Submission:
    """Return a run to send, given as to `submit_partition`."""
    plan._live_handle  # noqa: B018 - raises when it was freed
    shell, spec = plan._shell, plan._spec
    bound = [one._used_in(shell) if isinstance(one, Tensor) else one for one in inputs]
    ports = spec.info.outputs
    names = [ports[place].name for place in fetched]
    # A step of the core: several device threads share the session of a member.
    made = shell.advance(lambda: choose_outputs(shell.core, spec.info, names, fetch=True)) if names else []
    kept = [RunOutput(place, ports[place], into=one._used_in(shell)) for place, one in into.items()]
    how = Sending(stream, observed=True, keep=True)
    return Submission(spec, bound, made, kept, how, shell.release, exchange_run=number)


def report(plan: Plan, timeout: float | None = None, *, measure: bool | None = None) -> PlanReport:
    """Return the server's report on the plan, in numbers. `measure`: begin or end to measure
    steps."""
    return plan._shell.drive(plan._reporting(measure), timeout, lambda: f"explaining {plan!r}")
