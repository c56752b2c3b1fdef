"""The output of `heliograph top` and `sessions` as lines of text for a screen of a given size.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from heliograph.cli.common.text import age_text, plain
from heliograph.explain.tables import align
from heliograph_proto.devices import MemberInfo, MemberState
from heliograph_proto.sessions import DeviceStatus, DrainState, SessionStatus, Snapshot, TenantUsage
from heliograph_proto.types import size_text

Style: TypeAlias = Literal["title", "header", "warning", "quiet", "marked", ""]
#: A line and its style.
Line: TypeAlias = tuple[str, Style]
Row: TypeAlias = Sequence[str]

#: The cells of a bar, and of a sparkline.
BAR = 10
SPARKS = 12
GAP = 2
#: The least lines for sessions, however low the screen.
LEAST_SESSIONS = 3


@dataclass(frozen=True, slots=True)
class Column:
    """A column. On a narrow screen, columns of the highest rank are dropped first; 0 stays."""

    title: str
    rank: int = 0


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
    history: History = field(default_factory=History)
    #: A line at the end, such as the keys.
    hint: str = ""


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
    head: list[Line] = [(title(found, where), "title")]
    if note:
        head.append((plain(note), "warning"))
    one = bool(how.session)
    lines = [*head, *session_view(found, how)] if one else _overview(found, head, width, height, how)
    if how.hint and (height is None or len(lines) + 2 <= height):
        lines = [*lines, ("", ""), (how.hint, "quiet")]
    return tuple((_cut(text, width), style) for text, style in lines)


def _overview(found: Snapshot, head: list[Line], width: int, height: int | None, how: Shown) -> list[Line]:
    """Devices, sessions, tenants and members."""
    warnings: list[Line] = [(text, "warning") for text in _warnings(found)]
    lately = how.history.devices
    devices = _table(DEVICES, (_device_row(one, lately.get(one.name, ())) for one in found.devices), width)
    rest = _table(TENANTS, map(_tenant_row, _named(found.tenants)), width)
    rest += _table(MEMBERS, map(_member_row, found.members), width)
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
    lines = _table(SESSIONS, rows, width, marked=place - first if how.marked else None)
    if hidden := len(found) - len(part):
        lines.append((f"and {hidden:,} more", ""))
    return lines


# Tables


def _table(
    columns: Sequence[Column], rows: Iterator[Row], width: int, marked: int | None = None
) -> list[Line]:
    """An empty line, a header and the rows, of which one may be marked; nothing without rows."""
    cells = [[column.title for column in columns], *(list(map(plain, row)) for row in rows)]
    if len(cells) == 1:
        return []
    kept = _fitting(columns, cells, width)
    header, *lines = align([[row[place] for place in kept] for row in cells])
    styled: list[Line] = [(line, "marked" if place == marked else "") for place, line in enumerate(lines)]
    return [("", ""), (header, "header"), *styled]


def _fitting(columns: Sequence[Column], cells: Sequence[Row], width: int) -> list[int]:
    """The indices of the columns that are shown."""
    # Empty columns are dropped.
    kept = [place for place in range(len(columns)) if any(row[place] for row in cells[1:])]
    sizes = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    while sum(sizes[place] + GAP for place in kept) - GAP > width:
        least = max(kept, key=lambda place: (columns[place].rank, place))
        if columns[least].rank == 0:
            break
        kept.remove(least)
    return kept


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


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


def _member_row(one: MemberInfo) -> Row:
    state = one.state.name.lower()
    why = "" if one.state is MemberState.READY else one.why
    return [one.name, state, one.address, ", ".join(one.devices), why]


# Texts


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar."""
    full = round(min(1.0, max(0.0, share)) * BAR)
    return "█" * full + "░" * (BAR - full)


#: Parts of a cell, from its eighth to all of it.
_SPARKS = "▁▂▃▄▅▆▇█"


def sparks(values: Sequence[float], most: float = 0.0) -> str:
    """Numbers of 0 and more as columns in their order, a cell each; fewer than two are nothing.

    A column is full at `most`, or at the largest of them.
    """
    if len(values) < 2:
        return ""
    full = max(most, *values)
    steps = len(_SPARKS) - 1
    shares = (max(0.0, one) / full if full > 0 else 0.0 for one in values)
    return "".join(_SPARKS[min(steps, round(share * steps))] for share in shares)
