"""Status of a host for operators: sessions, tenants and devices at one moment, and rates between
two moments.

Any thread may call these functions.
"""

from __future__ import annotations

import time
from dataclasses import replace

from heliograph_proto.sessions import DeviceStatus, DrainStatus, KeptStateStatus, SessionStatus, Snapshot
from heliograph_server.runtime.host import SERVER, Host
from heliograph_server.session.session import Session

#: Below this interval two snapshots give no rate.
LEAST_SECONDS = 1e-3


def take_snapshot(
    host: Host,
    drain: DrainStatus,
    log_level: str,
    before: Snapshot | None = None,
    kept_states: tuple[KeptStateStatus, ...] = (),
) -> Snapshot:
    """The state of a host now, with rates since the snapshot `before` of the same stream.

    Blocks while devices of other hosts report their memory.
    """
    taken = Snapshot(
        server=SERVER,
        incarnation=host.incarnation,
        uptime_seconds=host.uptime_seconds,
        drain=drain,
        devices=host.devices_now(),
        sessions=list_sessions(host),
        tenants=host.tenants(),
        members=tuple(host.members),
        log_level=log_level,
        kept_states=kept_states,
    )
    return with_rates(taken, before)


def list_sessions(host: Host) -> tuple[SessionStatus, ...]:
    """The open sessions, with average rates since each was opened."""
    snapshots = host.snapshots
    found = [(one, None if snapshots is None else snapshots.age_seconds(one)) for one in host.sessions]
    return tuple(_with_session_rates(session_status(one, age), None) for one, age in found)


def session_status(session: Session, snapshot_age_seconds: float | None = None) -> SessionStatus:
    """The state and totals of a session, without rates; of a durable one also the time since its
    last snapshot."""
    found, traffic = session.statistics(), session.traffic
    return SessionStatus(
        number=session.number,
        tenant=session.principal.tenant,
        credential=session.principal.shown,
        client=session.client,
        age_seconds=time.monotonic() - session.opened,
        attached=session.is_attached and not session.is_detached,
        commands=session.commands,
        commands_in_flight=found.commands_in_flight,
        runs_in_flight=found.runs_in_flight,
        plans=found.plans,
        tensors=found.tensors,
        device_bytes=found.tensor_bytes + found.content_bytes + found.idle_bytes + session.plan_bytes,
        staged_bytes=found.staged_bytes,
        received_bytes=traffic.written_bytes + traffic.content_bytes,
        sent_bytes=traffic.read_bytes,
        lease_seconds=session.lease_seconds,
        lease_left_seconds=session.lease_left_seconds,
        snapshot_age_seconds=snapshot_age_seconds,
    )


# Rates


def with_rates(now: Snapshot, before: Snapshot | None) -> Snapshot:
    """Add rates and shares since the snapshot before, if it is of the same incarnation of the
    daemon.

    Otherwise, and for sessions and devices that are new, they are averages since the start.
    """
    if before is None or before.incarnation != now.incarnation:
        before = Snapshot(now.server)
    seconds = now.uptime_seconds - before.uptime_seconds
    devices = {one.name: one for one in before.devices}
    sessions = {one.number: one for one in before.sessions}
    return replace(
        now,
        devices=tuple(_with_share(one, devices.get(one.name), seconds) for one in now.devices),
        sessions=tuple(_with_session_rates(one, sessions.get(one.number)) for one in now.sessions),
    )


def _with_share(now: DeviceStatus, before: DeviceStatus | None, seconds: float) -> DeviceStatus:
    busy_seconds = now.busy_seconds - (before.busy_seconds if before is not None else 0.0)
    return replace(now, busy_share=min(1.0, max(0.0, busy_seconds / max(seconds, LEAST_SECONDS))))


def _with_session_rates(now: SessionStatus, before: SessionStatus | None) -> SessionStatus:
    before = before or SessionStatus(now.number)
    seconds = max(now.age_seconds - before.age_seconds, LEAST_SECONDS)
    return replace(
        now,
        commands_per_second=(now.commands - before.commands) / seconds,
        received_bytes_per_second=(now.received_bytes - before.received_bytes) / seconds,
        sent_bytes_per_second=(now.sent_bytes - before.sent_bytes) / seconds,
    )
