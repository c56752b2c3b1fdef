"""The state of a host as tables of a message, for a caller with certain rights.

Operators see everything. Others see the devices, hosts and links, as clients do, and of sessions,
runs, uploads and memory those of their tenant. Called on a thread: it may block for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from heliograph_proto.devices import Memory
from heliograph_proto.sessions import DrainStatus, SessionStatus, Snapshot
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.runtime.host import SERVER, Host
from heliograph_server.runtime.status import session_status, with_rates
from heliograph_server.session.session import Session
from heliograph_server.telemetry.device_memory import MemoryWatch

#: The most rows of a table in a message; the page says how many there are.
MOST_SESSIONS, MOST_UPLOADS, MOST_OPEN_RUNS = 500, 100, 64
#: The longest text of a client or a device in a message.
MOST_TEXT = 200
#: The longest wait for devices of other hosts; their last answer is shown meanwhile.
MEMORY_SECONDS = 0.25
#: A run that has been under way for longer is shown before it ends.
OPEN_SECONDS = 0.25
#: The columns of the table of sessions.
SESSION_COLUMNS = (
    "number", "tenant", "credential", "client", "age", "attached", "commands", "runs", "waiting", "running",
    "plans", "tensors", "memory", "staged", "received", "sent",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """The tenants that a caller may see: all, or one."""

    is_operator: bool
    tenant: str = ""

    @classmethod
    def of(cls, principal: Principal) -> View:
        """The view of a principal."""
        return cls(True) if principal.may(Right.ADMIN) else cls(False, principal.tenant)

    def may_see(self, tenant: str) -> bool:
        """True if it has the sessions of a tenant."""
        return self.is_operator or tenant == self.tenant


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The state of a host at one moment, for all views."""

    snapshot: Snapshot
    sessions: tuple[Session, ...]
    devices: tuple[dict[str, Any], ...]
    #: By `time.monotonic()` and `time.time()`.
    monotonic: float
    wall: float
    #: The longest lag of the event loop lately, in seconds.
    lag: float = 0.0
    models: tuple[dict[str, Any], ...] = ()
    language_models: tuple[dict[str, Any], ...] = ()
    links: tuple[dict[str, Any], ...] = ()
    busy: dict[str, float] = field(default_factory=dict)
    edges: int = 0


class HostWatch:
    """Looks at a host again and again, and computes rates. Used by one thread at a time."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._memory = MemoryWatch(host.memory, MEMORY_SECONDS)
        self._before: Snapshot | None = None
        self._busy: dict[str, float] = {}
        self._looked = time.monotonic()

    def __repr__(self) -> str:
        return f"<HostWatch of {self._host}>"

    def look(self, drain: DrainStatus, log_level: str, lag: float) -> HostFacts:
        """Return the state now, with rates since the last call."""
        host, now = self._host, time.monotonic()
        sessions = tuple(host.sessions)
        taken = Snapshot(
            SERVER,
            host.incarnation,
            host.uptime_seconds,
            drain,
            sessions=tuple(map(session_status, sessions)),
            tenants=host.tenants(),
            members=host.members,
            log_level=log_level,
        )
        snapshot = self._before = with_rates(taken, self._before)
        devices, busy = self._devices(now)
        return HostFacts(
            snapshot,
            sessions,
            devices,
            now,
            time.time(),
            lag,
            links=tuple(map(_link, host.links())),
            busy=busy,
            edges=host.exchange.open_edges,
        )

    def _devices(self, now: float) -> tuple[tuple[dict[str, Any], ...], dict[str, float]]:
        host, seconds = self._host, max(now - self._looked, 1e-3)
        before, self._busy, self._looked = self._busy, host.busy_seconds(), now
        memory, silent = self._memory.look([one.name for one in host.devices if one.lost is None])
        found, busy = [], {}
        for one in host.devices:
            spent = self._busy.get(one.name, 0.0) - before.get(one.name, self._busy.get(one.name, 0.0))
            busy[one.name] = min(1.0, max(0.0, spent / seconds))
            size = memory.get(one.name, Memory())
            row = {
                "name": one.name,
                "about": one.description[:MOST_TEXT],
                "backend": one.backend,
                "type": one.type.name.lower(),
                "host": one.name.rpartition("/")[0],
                "free": size.free_bytes,
                "total": size.total_bytes,
                "lost": one.lost.message if one.lost is not None else "",
                "silent": one.name in silent,
                "draining": one.is_draining,
            }
            found.append(row)
        return tuple(found), busy

    def close(self) -> None:
        """End without waiting for pending questions to devices."""
        self._memory.close()


def table_of(facts: HostFacts, view: View, runs: dict[int, float]) -> dict[str, Any]:
    """The state for a view. `runs`: runs a second by session."""
    snapshot = facts.snapshot
    sessions = [one for one in snapshot.sessions if view.may_see(one.tenant)]
    shown = _most_active(sessions, runs)
    rows = [_session(one, runs.get(one.number, 0.0), counts) for one, counts in _with_counts(shown, facts)]
    found: dict[str, Any] = {
        "at": round(facts.wall * 1e3),
        "up": round(snapshot.uptime_seconds, 1),
        "life": snapshot.incarnation.hex()[:16],
        "server": snapshot.server,
        "drain": {
            "state": snapshot.drain.state.name.lower(),
            "remaining": round(snapshot.drain.remaining_seconds, 1),
            "stay": snapshot.drain.stay,
            "busy": snapshot.drain.busy_sessions if view.is_operator else 0,
        },
        "devices": [_device(one, facts.busy, view) for one in facts.devices],
        "members": [
            {
                "name": one.name,
                "address": one.address,
                "state": one.state.name.lower(),
                "why": one.why,
                "server": one.server,
                "devices": list(one.devices),
            }
            for one in snapshot.members
        ],
        "links": facts.links,
        "session_columns": SESSION_COLUMNS,
        "sessions": rows,
        "session_count": len(sessions),
        "tenants": [_tenant(one) for one in snapshot.tenants if view.may_see(one.tenant)],
        "queues": _queues(sessions, facts, view),
        "models": facts.models,
    }
    if view.is_operator:
        found |= {"level": snapshot.log_level, "lag": facts.lag, "language_models": facts.language_models}
    return found


def _queues(sessions: Sequence[SessionStatus], facts: HostFacts, view: View) -> dict[str, int]:
    numbers = {one.number for one in sessions}
    waiting = running = 0
    for one in facts.sessions:
        if one.number in numbers:
            counts = one.run_counts
            waiting, running = waiting + counts[0], running + counts[1]
    found = {
        "waiting": waiting,
        "running": running,
        "commands": sum(one.commands_in_flight for one in sessions),
        "staged": sum(one.staged_bytes for one in sessions),
    }
    return found | ({"edges": facts.edges} if view.is_operator else {})


def _most_active(sessions: list[SessionStatus], runs: dict[int, float]) -> list[SessionStatus]:
    """At most MOST_SESSIONS of them, by number; if there are more, those that do the most."""
    if len(sessions) <= MOST_SESSIONS:
        return sessions
    ranked = sorted(
        sessions,
        key=lambda one: (-runs.get(one.number, 0.0), -one.commands_per_second, -one.device_bytes, one.number),
    )
    return sorted(ranked[:MOST_SESSIONS], key=lambda one: one.number)


def _with_counts(
    sessions: Iterable[SessionStatus], facts: HostFacts
) -> Iterable[tuple[SessionStatus, tuple[int, int]]]:
    # A session may have ended since its status was taken.
    counts = {one.number: one.run_counts for one in facts.sessions}
    return ((one, counts.get(one.number, (0, 0))) for one in sessions)


def _session(one: SessionStatus, runs: float, counts: tuple[int, int]) -> list[Any]:
    """A row of the table of sessions: SESSION_COLUMNS."""
    return [
        one.number,
        one.tenant,
        one.credential,
        one.client[:MOST_TEXT],
        round(one.age_seconds),
        one.attached,
        round(one.commands_per_second, 1),
        round(runs, 1),
        *counts,
        one.plans,
        one.tensors,
        one.device_bytes,
        one.staged_bytes,
        round(one.received_bytes_per_second),
        round(one.sent_bytes_per_second),
    ]


def _device(row: dict[str, Any], busy: dict[str, float], view: View) -> dict[str, Any]:
    """A device; the share of its time that others have is for operators."""
    return {**row, "busy": round(busy.get(row["name"], 0.0), 3)} if view.is_operator else row


def _tenant(one: Any) -> dict[str, Any]:
    return {
        "name": one.tenant,
        "sessions": one.sessions,
        "plans": one.plans,
        "running": one.runs_in_flight,
        "memory": one.device_memory_bytes,
        "staged": one.staging_bytes,
        "seconds": round(one.device_seconds, 3),
        "refused": one.refused,
        "most_memory": one.quota.device_memory_bytes,
        "most_sessions": one.quota.sessions,
        "weight": one.quota.weight,
    }


def _link(one: Any) -> dict[str, Any]:
    return {
        "a": one.a,
        "b": one.b,
        "trip": one.round_trip_seconds,
        "rate": one.bytes_per_second,
        "measured": one.round_trip_measured and one.bandwidth_measured,
        "reachable": one.reachable,
        "why": one.why,
    }


def uploads_of(host: Host, sessions: Iterable[Session], view: View) -> list[dict[str, Any]]:
    """The uploads under way, at most MOST_UPLOADS."""
    found: list[dict[str, Any]] = []
    for session in sessions:
        if view.may_see(session.principal.tenant):
            for one in session.uploads_now:
                kind = "weights" if one.is_content else "tensor"
                found.append(
                    _upload(session.number, kind, one.received_bytes, one.size_bytes, one.is_relayed)
                )
    for admission in host.admissions.now(MOST_UPLOADS):
        session = admission.session
        if view.may_see(session.principal.tenant):
            sizes = admission.received_bytes, admission.size_bytes
            found.append(_upload(session.number, "announced", *sizes, False))
    return found[:MOST_UPLOADS]


def _upload(session: int, kind: str, received: int, size: int, is_relayed: bool) -> dict[str, Any]:
    return {"session": session, "kind": kind, "received": received, "size": size, "relayed": is_relayed}


def open_runs(facts: HostFacts, view: View) -> list[dict[str, Any]]:
    """The runs that have been under way for some time, the oldest first, at most MOST_OPEN_RUNS."""
    found = []
    for session in facts.sessions:
        if view.may_see(session.principal.tenant):
            for run in session.runs_under_way:
                if facts.monotonic - run.came > OPEN_SECONDS:
                    phase = "compute" if run.had_inputs else "copy" if run.began else "turn"
                    began = run.had_inputs or run.began or run.came
                    found.append((began, session.number, phase, run.devices))
    found.sort(key=lambda one: one[0])
    return [
        {
            "at": round((facts.wall - facts.monotonic + began) * 1e3),
            "session": number,
            "phase": phase,
            "devices": list(devices),
        }
        for began, number, phase, devices in found[:MOST_OPEN_RUNS]
    ]
