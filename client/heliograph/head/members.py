"""Sessions and plans on the members of a pool: what their head does with them, and users do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from heliograph._base import reservation as reservations
from heliograph._base.device import DeviceArgument, device_name
from heliograph._base.reservation import Reservation
from heliograph._base.streams import StreamBase, stream_handle
from heliograph.plan import Plan
from heliograph.procedures.partitions import submit_part
from heliograph.procedures.transfer import arrive
from heliograph.run_future import InlineFuture, RunFuture
from heliograph.session import Session
from heliograph.tensor import Tensor
from heliograph.transport.blocking import GrpcShell
from heliograph.transport.channels import credentials_of
from heliograph.transport.direct_upload import Announcement, Tell, TicketUpload
from heliograph_proto import graph as contract
from heliograph_proto.addresses import Credentials, parse_address
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import ContentOffer, PlanEstimate, PlanOptions, PlanReport


def connect_as_head(
    url: str, timeout: float, silence_seconds: float, credentials: Credentials | None = None
) -> Session:
    """As `hg.connect`, to a server that is gone after so much silence. `credentials`: what is shown there;
    None: what the URL and the environment say."""
    address = parse_address(url)
    shown = credentials_of(address) if credentials is None else credentials
    return Session(GrpcShell(address, timeout, "auto", silence_seconds, shown))


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
    """A plan for a graph of the contract.

    `bindings`: tensors by the numbers of the leaves that they are; contents of other weights must be on
    the server. `updates`: a plan whose memory the new one takes over; it is freed then. When the server
    refuses, it is what it was. `reservation`: in whose memory it is to lie.
    """
    procedure = session._compiling_frozen(graph, options, bindings, updates, reservation)
    spec = session._shell.drive(procedure, timeout, lambda: f"compiling {graph!r}")
    if updates is not None:
        updates._give_up()
    return Plan(session._shell, spec)


def estimate_frozen(session: Session, graph: contract.Graph, options: PlanOptions) -> PlanEstimate:
    """What a graph of the contract would take."""
    procedure = session._estimating_frozen(graph, options)
    return session._shell.drive(procedure, None, lambda: f"estimating {graph!r}")


def reserve_blocks(session: Session, block_bytes: Sequence[int], device: DeviceArgument) -> Reservation:
    """Memory that a compile names."""
    options = PlanOptions((device_name(session._shell, device),))
    procedure = reservations.reserve_blocks(session._shell, options, block_bytes)
    return session._shell.drive(procedure, None, "reserving memory")


def await_arrival(session: Session, timeout: float | None = None) -> None:
    """Waits until everything sent so far has come there, frees included."""
    session._shell.drive(arrive(session._shell.core), timeout, "what was sent")


def when_lost(session: Session, told: Callable[[HeliographError], None]) -> None:
    """Calls back once, with the reason, when the session has ended."""
    session._shell.when_lost(told)


def when_changed(session: Session, told: Callable[[DeviceChange], None]) -> None:
    """Calls back with each change of the server's devices. One alone is told."""
    session._shell.watchers.tell = told


def announce(session: Session, contents: Sequence[tuple[bytes, Tensor]], tell: Tell) -> Announcement:
    """Announces contents by digest, which others will bring straight into those tensors. Raises what
    BulkService.Admit is refused with, UnsupportedError."""
    return session._shell.announce([(digest, one._live_handle, one.nbytes) for digest, one in contents], tell)


def bring(session: Session, offer: ContentOffer, size_bytes: int) -> TicketUpload:
    """An upload to the session's server by a ticket that it gave, to be begun."""
    return session._shell.bring(offer, size_bytes)


def submit_bytes(plan: Plan, inputs: Sequence[bytes]) -> InlineFuture | None:
    """A run that is one small message each way, with its inputs as their bytes, which fetches all outputs.
    None where it must go another way."""
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
    """Sends the plan's part of a run of the whole, by its number; 0: it is all of it.

    Inputs in order, as tensors or as their bytes; they stay as they are until it is done. Outputs by
    their places: `fetched` come as arrays, the others are written `into` tensors.
    """
    plan._live_handle  # noqa: B018 - raises when it was freed
    bound = [one._used_in(plan._shell) if isinstance(one, Tensor) else one for one in inputs]
    handles = {place: tensor._used_in(plan._shell) for place, tensor in into.items()}
    lane = stream_handle(plan._shell, stream)
    procedure = submit_part(plan._shell, plan._spec, number, bound, fetched, handles, lane)
    run = plan._shell.drive(procedure, None, plan._spec.what)
    return RunFuture(plan._shell, run, {}, plan._spec.what)


def report(plan: Plan, timeout: float | None = None) -> PlanReport:
    """What the server says of the plan, in numbers."""
    return plan._shell.drive(plan._reporting(), timeout, lambda: f"explaining {plan!r}")
