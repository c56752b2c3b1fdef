"""A pool as tables: its members, and the ways between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heliograph.cli.findings import plain, rate_text, time_text
from heliograph.cli.measurements import MemberSeen, PoolSeen
from heliograph_proto.membership import Way

#: The most ways that are shown; those first with which something is the matter.
MOST_WAYS = 40
_HEAD = "(head)"


def member_rows(pool: PoolSeen) -> list[Sequence[str]]:
    """A header, and a line for each member."""
    header = ["member", "state", "address", "runs", "devices", "weights from here"]
    return [header, *map(_member, pool.members)]


def _member(one: MemberSeen) -> Sequence[str]:
    devices = ", ".join(name.removeprefix(f"{one.name}/") for name in one.devices)
    cells = one.name, one.state, one.address, one.server or "-", devices or "-", _from_here(one)
    return [plain(cell) for cell in cells]


def _from_here(one: MemberSeen) -> str:
    match one.reached:
        case True:
            return f"straight, {time_text(one.round_trip_seconds)}"
        case False:
            return f"through the head: {one.why_not_reached}"
    return "-" if one.state != "ready" else "straight"


def way_rows(pool: PoolSeen) -> list[Sequence[str]]:
    """A header, and a line for each two that a way is between."""
    header = ["way between", "and", "round trip", "bandwidth", "values"]
    return [header, *(_way(*pair) for pair in _shown(_pairs(pool)))]


def more_ways(pool: PoolSeen) -> str:
    """What is said of the ways that are not shown; empty if all are."""
    left = len(_pairs(pool)) - MOST_WAYS
    return f"and {left} more; --json has all" if left > 0 else ""


def _pairs(pool: PoolSeen) -> list[tuple[Way, Way | None]]:
    """Each way with the one back; the head fetches and brings, so that it has one alone."""
    back = {(one.b, one.a): one for one in pool.ways}
    found: dict[frozenset[str], tuple[Way, Way | None]] = {}
    for one in pool.ways:
        found.setdefault(frozenset((one.a, one.b)), (one, back.get((one.a, one.b))))
    return list(found.values())


def _shown(pairs: list[tuple[Way, Way | None]]) -> Iterator[tuple[Way, Way | None]]:
    chosen = sorted(pairs, key=_is_well)[:MOST_WAYS]
    return (one for one in pairs if one in chosen)


def _is_well(pair: tuple[Way, Way | None]) -> bool:
    return all(one is None or one.reachable is True for one in pair)


def _way(one: Way, back: Way | None) -> Sequence[str]:
    trip, speed = time_text(one.round_trip_seconds), f"{rate_text(one.bytes_per_second)}/s"
    cells = [
        one.a or _HEAD,
        one.b,
        trip if one.round_trip_measured else f"{trip} (assumed)",
        speed if one.bandwidth_measured else f"{speed} (assumed)",
        _values(one, back),
    ]
    return [plain(cell) for cell in cells]


def _values(one: Way, back: Way | None) -> str:
    ways = (one,) if back is None else (one, back)
    cut = [way for way in ways if way.reachable is False]
    if not cut:
        return "direct" if all(way.reachable for way in ways) else "not looked for yet"
    if len(cut) == len(ways):
        return "relayed by the head"
    return f"direct to {cut[0].b}, relayed by the head to {cut[0].a}"
