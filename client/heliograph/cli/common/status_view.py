"""The output of `heliograph top` and `sessions` as lines of text for a screen of a given size.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from heliograph.cli.common.columns import SPARKS, Column, Line, Row, bar, cut, sparks, table
from heliograph.cli.common.plan_view import PlanLooks, plan_rows, plan_view
from heliograph.cli.common.text import age_text, plain
from heliograph_proto.devices import MemberInfo, MemberState
from heliograph_proto.sessions import (
    DeviceStatus,
    DrainState,
    KeptStateStatus,
    SessionStatus,
    Snapshot,
    TenantUsage,
)
from heliograph_proto.types import size_text

#: The least lines for sessions, however low the screen.
LEAST_SESSIONS = 3


DEVICES = (
    Column("device"),
    Column("memory", 3),
    Column("used", 1),
    Column("of", 4),
    Column("busy"),
    Column("lately", 2),
    Column("description", 5),
)
SESSIONS = (
    Column("id"),
    Column("tenant", 3),
    Column("token", 8),
    Column("client", 5),
    Column("age", 4),
    Column("commands", 7),
    Column("a second"),
    Column("in flight", 6),
    Column("runs", 1),
    Column("plans", 9),
    Column("holds"),
    Column("snapshot", 2),
    Column("in/s", 2),
    Column("out/s", 2),
    Column("lately", 1),
)
#: How sessions may be sorted: by the title of a column, the largest first, and by id.
ORDERS: Mapping[str, Callable[[SessionStatus], float]] = {
    "a second": lambda one: -one.commands_per_second,
    "runs": lambda one: -one.runs_in_flight,
    "holds": lambda one: -one.device_bytes,
    "in/s": lambda one: -one.received_bytes_per_second,
    "out/s": lambda one: -one.sent_bytes_per_second,
    "age": lambda one: -one.age_seconds,
    "id": lambda one: one.number,
}
#: The usual order.
BUSIEST = "a second"
TENANTS = (
    Column("tenant"),
    Column("sessions", 1),
    Column("plans", 4),
    Column("runs", 2),
    Column("device memory"),
    Column("host memory", 5),
    Column("device time", 3),
    Column("weight", 7),
    Column("refused", 6),
)
KEPT = (
    Column("state of"),
    Column("tenant", 1),
    Column("host memory"),
    Column("files", 3),
    Column("owner", 2),
)
MEMBERS = (Column("member"), Column("state"), Column("address", 2), Column("devices", 3), Column("why", 1))


@dataclass(slots=True)
class History:
    """The last snapshots' numbers, by which sparklines are drawn; one for each snapshot."""

    devices: dict[str, list[float]] = field(default_factory=dict)
    sessions: dict[int, list[float]] = field(default_factory=dict)

    def add(self, found: Snapshot) -> None:
        """Take in a snapshot. Devices and sessions that are gone from it are forgotten."""
        shares = {one.name: one.busy_share for one in found.devices}
        rates = {one.number: one.commands_per_second for one in found.sessions}
        self.devices = {name: [*self.devices.get(name, ()), one][-SPARKS:] for name, one in shares.items()}
        self.sessions = {name: [*self.sessions.get(name, ()), one][-SPARKS:] for name, one in rates.items()}


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of a snapshot that is shown, and its order."""

    #: One of ORDERS.
    order: str = BUSIEST
    #: The number of the one session that is shown; 0: all.
    session: int = 0
    #: The number of the session that is marked; 0: none.
    marked: int = 0
    #: The handle of the one plan of that session that is shown; 0: none.
    plan: int = 0
    #: The session and handle of the plan that is marked.
    marked_plan: tuple[int, int] = (0, 0)
    #: True if the daemon tells of the plans of the caller's tenant alone.
    is_own: bool = False
    history: History = field(default_factory=History)
    looks: PlanLooks = field(default_factory=PlanLooks)
    #: A line at the end, such as the keys.
    hint: str = ""

    @property
    def asks(self) -> tuple[int, int] | None:
        """The session and the plan whose plans are needed, 0 for all; None: no plans are needed."""
        return (self.session, self.plan) if self.session or self.is_own else None


def frame(
    found: Snapshot,
    where: str,
    width: int,
    height: int | None = None,
    note: str = "",
    shown: Shown | None = None,
) -> tuple[Line, ...]:
    """Show a snapshot of the daemon at `where` in lines of at most `width` characters.

    There are at most `height` lines, if that is enough for the least. `note`: the current problem,
    if any.
    """
    how = shown or Shown()
    head: list[Line] = [(_own_title(found, where) if how.is_own else title(found, where), "title")]
    if note:
        head.append((plain(note), "warning"))
    room = None if height is None else height - len(head) - 2 * bool(how.hint)
    if how.plan:
        lines = [*head, *plan_view(how.looks, how.session, how.plan, width, room)]
    elif how.session or how.is_own:
        about = session_view(found, how) if how.session and not how.is_own else []
        least = None if room is None else max(LEAST_SESSIONS, room - len(about) - 2)
        lines = [*head, *about, *plan_rows(how.looks, how.marked_plan, width, least)]
    else:
        lines = _overview(found, head, width, height, how)
    if how.hint and (height is None or len(lines) + 2 <= height):
        lines = [*lines, ("", ""), (how.hint, "quiet")]
    return tuple((cut(text, width), style) for text, style in lines)


def _overview(found: Snapshot, head: list[Line], width: int, height: int | None, how: Shown) -> list[Line]:
    """Devices, sessions, tenants, members and states of other daemons."""
    warnings: list[Line] = [(text, "warning") for text in _warnings(found)]
    lately = how.history.devices
    devices = table(DEVICES, (_device_row(one, lately.get(one.name, ())) for one in found.devices), width)
    rest = table(TENANTS, map(_tenant_row, _named(found.tenants)), width)
    rest += table(MEMBERS, map(_member_row, found.members), width)
    rest += table(KEPT, map(_kept_row, found.kept_states), width)
    used = len(head) + len(warnings) + len(devices) + len(rest) + 3 + 2 * bool(how.hint)
    room = None if height is None else max(LEAST_SESSIONS, height - used)
    return [*head, *warnings, *devices, *_sessions(found.sessions, width, room, how), *rest]


def session_view(found: Snapshot, how: Shown) -> list[Line]:
    """Everything about one session, a line each, with its rates lately."""
    one = next((one for one in found.sessions if one.number == how.session), None)
    if one is None:
        return [("", ""), (f"session {how.session} is gone", "warning")]
    rates = how.history.sessions.get(one.number, ())
    rows = [
        ("client", plain(one.client)),
        ("tenant", plain(one.tenant)),
        ("token", plain(one.credential)),
        ("age", f"{age_text(one.age_seconds)}{'' if one.attached else ', not attached'}"),
        ("commands", f"{one.commands:,}, {one.commands_per_second:,.0f} a second  {sparks(rates)}".rstrip()),
        ("in flight", f"{one.commands_in_flight:,} commands, {one.runs_in_flight:,} of them runs"),
        ("plans", f"{one.plans:,}"),
        ("tensors", f"{one.tensors:,}"),
        ("holds", f"{size_text(one.device_bytes)} on devices, {size_text(one.staged_bytes)} staged"),
        ("received", _moved(one.received_bytes, one.received_bytes_per_second)),
        ("sent", _moved(one.sent_bytes, one.sent_bytes_per_second)),
    ]
    header: Line = (f"session {one.number}", "header")
    return [("", ""), header, *((f"{name:10} {value}", "") for name, value in rows if value)]


def _moved(total: int, rate: float) -> str:
    return f"{size_text(total)}, {size_text(round(rate))}/s"


def title(found: Snapshot, where: str) -> str:
    """A line about the whole daemon."""
    count = len(found.sessions)
    parts = (
        f"{plain(found.server)} at {plain(where)}",
        f"up {age_text(found.uptime_seconds)}",
        _drain_text(found),
        f"{count} session{'s'[: count != 1]}",
        f"log {plain(found.log_level)}",
    )
    return " · ".join(parts)


def _own_title(found: Snapshot, where: str) -> str:
    """A line about the daemon for a caller that sees its own plans alone."""
    up = age_text(found.uptime_seconds)
    return f"{plain(found.server)} at {plain(where)} · up {up} · the plans of your tenant"


def _drain_text(found: Snapshot) -> str:
    drain = found.drain
    if drain.state is not DrainState.DRAINING:
        return drain.state.name.lower()
    after = "stays" if drain.stay else "stops"
    return f"draining: {drain.busy_sessions} at work, {drain.remaining_seconds:.0f} s left, then it {after}"


def _warnings(found: Snapshot) -> Iterator[str]:
    for device in found.devices:
        if device.lost:
            yield f"{plain(device.name)} is lost: {plain(device.lost)}"


def ordered(sessions: Sequence[SessionStatus], order: str) -> list[SessionStatus]:
    """The sessions in one of ORDERS."""
    key = ORDERS[order]
    return sorted(sessions, key=lambda one: (key(one), one.number))


def _sessions(sessions: Sequence[SessionStatus], width: int, room: int | None, how: Shown) -> list[Line]:
    """The first sessions in their order, as many as there is room for, and the marked one."""
    found = ordered(sessions, how.order)
    place = next((place for place, one in enumerate(found) if one.number == how.marked), 0)
    count = len(found) if room is None or len(found) <= room else room - 1
    first = max(0, place - count + 1)
    part = found[first : first + count]
    lately = how.history.sessions
    rows = (session_row(one, lately.get(one.number, ())) for one in part)
    lines = table(SESSIONS, rows, width, marked=place - first if how.marked else None)
    if hidden := len(found) - len(part):
        lines.append((f"and {hidden:,} more", ""))
    return lines


def session_rows(sessions: Sequence[SessionStatus]) -> list[Row]:
    """A header, and a row with all columns for each session."""
    header = [column.title for column in SESSIONS][:-1]
    return [header, *(session_row(one, ())[:-1] for one in sessions)]


def _device_row(one: DeviceStatus, lately: Sequence[float]) -> Row:
    total, used = one.memory.total_bytes, one.memory.total_bytes - one.memory.free_bytes
    sizes = (bar(used / total), size_text(used), size_text(total)) if total else ("", "", "")
    busy = "lost" if one.lost else f"{one.busy_share:.0%}"
    return [one.name, *sizes, busy, sparks(lately, 1.0), one.description]


def _rate_or_state(one: SessionStatus) -> str:
    if one.lease_left_seconds is not None:
        return f"detached, {one.lease_left_seconds:.0f} s left"
    return f"{one.commands_per_second:,.0f}" if one.attached else "not attached"


def session_row(one: SessionStatus, lately: Sequence[float]) -> Row:
    """The cells of a session; the last one is a sparkline."""
    return [
        str(one.number),
        plain(one.tenant),
        plain(one.credential),
        plain(one.client),
        age_text(one.age_seconds),
        f"{one.commands:,}",
        _rate_or_state(one),
        f"{one.commands_in_flight:,}",
        f"{one.runs_in_flight:,}",
        f"{one.plans:,}",
        size_text(one.device_bytes),
        "" if one.snapshot_age_seconds is None else f"{age_text(one.snapshot_age_seconds)} ago",
        size_text(one.received_bytes_per_second),
        size_text(one.sent_bytes_per_second),
        sparks(lately),
    ]


def _named(tenants: Sequence[TenantUsage]) -> Sequence[TenantUsage]:
    """The tenants with a name or a quota: others tell no more than the sessions do."""
    return [one for one in tenants if one.tenant or one.quota.sessions or one.quota.device_memory_bytes]


def _tenant_row(one: TenantUsage) -> Row:
    quota = one.quota
    return [
        one.tenant or "(all)",
        _of(str(one.sessions), quota.sessions and str(quota.sessions)),
        _of(str(one.plans), quota.plans and str(quota.plans)),
        _of(str(one.runs_in_flight), quota.runs_in_flight and str(quota.runs_in_flight)),
        _of(
            size_text(one.device_memory_bytes),
            quota.device_memory_bytes and size_text(quota.device_memory_bytes),
        ),
        _of(size_text(one.staging_bytes), quota.staging_bytes and size_text(quota.staging_bytes)),
        f"{one.device_seconds:,.1f} s",
        f"{quota.weight:g}",
        f"{one.refused:,}",
    ]


def _of(used: str, quota: str | int) -> str:
    return f"{used} of {quota}" if quota else used


def _kept_row(one: KeptStateStatus) -> Row:
    owner = "there" if one.held else f"away for {one.away_seconds:,.0f} s"
    return [plain(one.name), plain(one.tenant), size_text(one.size_bytes), f"{one.files:,}", owner]


def _member_row(one: MemberInfo) -> Row:
    state = one.state.name.lower()
    why = "" if one.state is MemberState.READY else one.why
    return [one.name, state, one.address, ", ".join(one.devices), why]
