"""The output of `heliograph top` and `sessions` as lines of text for a screen of a given size.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from heliograph.cli.common.text import age_text, plain
from heliograph.explain.tables import align
from heliograph_proto.devices import MemberInfo, MemberState
from heliograph_proto.sessions import DeviceStatus, DrainState, SessionStatus, Snapshot, TenantUsage
from heliograph_proto.types import size_text

Style: TypeAlias = Literal["title", "header", "warning", ""]
#: A line and its style.
Line: TypeAlias = tuple[str, Style]
Row: TypeAlias = Sequence[str]

#: The cells of a bar.
BAR = 10
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
    Column("in/s", 2),
    Column("out/s", 2),
)
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


def frame(
    found: Snapshot, where: str, width: int, height: int | None = None, note: str = ""
) -> tuple[Line, ...]:
    """Show a snapshot of the daemon at `where` in lines of at most `width` characters.

    There are at most `height` lines, if that is enough for the least. `note`: the current problem,
    if any.
    """
    shown: list[Line] = [(title(found, where), "title")]
    if note:
        shown.append((plain(note), "warning"))
    warnings: list[Line] = [(text, "warning") for text in _warnings(found)]
    devices = _table(DEVICES, map(_device_row, found.devices), width)
    rest = _table(TENANTS, map(_tenant_row, _named(found.tenants)), width)
    rest += _table(MEMBERS, map(_member_row, found.members), width)
    used = len(shown) + len(warnings) + len(devices) + len(rest) + 3
    room = None if height is None else max(LEAST_SESSIONS, height - used)
    lines: list[Line] = [*shown, *warnings, *devices, *_sessions(found.sessions, width, room), *rest]
    return tuple((_cut(text, width), style) for text, style in lines)


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


def _sessions(sessions: Sequence[SessionStatus], width: int, room: int | None) -> list[Line]:
    """The busiest sessions, as many as there is room for."""
    busiest = sorted(sessions, key=lambda one: (-one.commands_per_second, one.number))
    shown = busiest if room is None or len(busiest) <= room else busiest[: room - 1]
    lines = _table(SESSIONS, map(_session_row, shown), width)
    if hidden := len(busiest) - len(shown):
        lines.append((f"and {hidden:,} more", ""))
    return lines


# Tables


def _table(columns: Sequence[Column], rows: Iterator[Row], width: int) -> list[Line]:
    """An empty line, a header and the rows; nothing without rows."""
    cells = [[column.title for column in columns], *(list(map(plain, row)) for row in rows)]
    if len(cells) == 1:
        return []
    kept = _fitting(columns, cells, width)
    header, *lines = align([[row[place] for place in kept] for row in cells])
    return [("", ""), (header, "header"), *((line, "") for line in lines)]


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
    return [[column.title for column in SESSIONS], *map(_session_row, sessions)]


def _device_row(one: DeviceStatus) -> Row:
    total, used = one.memory.total_bytes, one.memory.total_bytes - one.memory.free_bytes
    sizes = (bar(used / total), size_text(used), size_text(total)) if total else ("", "", "")
    return [one.name, *sizes, "lost" if one.lost else f"{one.busy_share:.0%}", one.description]


def _session_row(one: SessionStatus) -> Row:
    return [
        str(one.number),
        plain(one.tenant),
        plain(one.credential),
        plain(one.client),
        age_text(one.age_seconds),
        f"{one.commands:,}",
        f"{one.commands_per_second:,.0f}" if one.attached else "not attached",
        f"{one.commands_in_flight:,}",
        f"{one.runs_in_flight:,}",
        f"{one.plans:,}",
        size_text(one.device_bytes),
        size_text(one.received_bytes_per_second),
        size_text(one.sent_bytes_per_second),
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
