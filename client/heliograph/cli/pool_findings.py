"""What `heliograph doctor` makes of a pool: members that are missing, ways that do not exist or are slow.
Pure: measurements in, findings in words out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from heliograph.cli.findings import (
    SLOW_ROAD,
    SLOW_ROUND_TRIP,
    Finding,
    Level,
    plain,
    rate_text,
    time_text,
)
from heliograph.cli.measurements import Measurements, MemberSeen, PoolSeen, usable
from heliograph_proto.addresses import parse_address
from heliograph_proto.errors import InvalidArgumentError

#: How many names a sentence has.
_NAMES = 4


def find_in_pool(found: Measurements) -> tuple[Finding, ...]:
    """All findings about the server's pool; none where it has none, or all is well."""
    if found.pool is None:
        return ()
    parts = (_empty(found.pool), _missing(found.pool), _apart(found), _slow(found.pool), _others(found))
    return tuple(one for part in (*parts, _unreached(found.pool)) for one in part)


def _empty(pool: PoolSeen) -> Iterator[Finding]:
    if not pool.members:
        yield Finding(
            "pool",
            Level.WARNING,
            "the pool has no member, and none is expected",
            "there are the head's own devices alone",
            "look at what its source lists: the name that dns: resolves, or what static: and ray: name",
        )


def _missing(pool: PoolSeen) -> Iterator[Finding]:
    for one in pool.members:
        if one.state == "ready":
            continue
        state = "is lost" if one.state == "lost" else "has not joined"
        where = "" if one.address in one.why else f" at {plain(one.address)}"
        yield Finding(
            "member",
            Level.WARNING,
            f"member {plain(one.name)}{where} {state}: {plain(one.why)}",
            "its devices cannot be used; plans that need them fail, or are placed elsewhere",
            _how_to_bring(one),
        )


def _how_to_bring(one: MemberSeen) -> str:
    advice = plain(one.advice) or "look whether the daemon runs there, and start it (`heliograph serve`)"
    return f"{advice}; the head needs {_port(one.address)} there to be open, and tries again by itself"


def _apart(found: Measurements) -> Iterator[Finding]:
    """Members that cannot fetch values from others: one finding for each of those others."""
    pool = found.pool
    assert pool is not None
    programs = {one.name: one.server for one in pool.members}
    addresses = {one.name: one.address for one in pool.members}
    cut = [way for way in pool.ways if way.reachable is False]
    for b in dict.fromkeys(way.b for way in cut):
        ways = [way for way in cut if way.b == b]
        readers = _names(way.a for way in ways)
        is_old = any(_is_other(found, programs.get(name, "")) for name in (b, *(way.a for way in ways)))
        open_ = f"open {_port(addresses.get(b, ''))} at {plain(b)} to {readers}, or list it by an address "
        yield Finding(
            "unreachable",
            Level.WARNING,
            f"{readers} cannot fetch values from {plain(b)}: {plain(ways[0].why)}",
            f"what they need of {plain(b)} goes through the head, over two ways instead of one",
            "upgrade the older daemon of these"
            if is_old
            else f"{open_}that they reach too; then restart {plain(b)}: ways are looked for as members join",
        )


def _slow(pool: PoolSeen) -> Iterator[Finding]:
    """Each pair once."""
    for way in (one for one in pool.ways if one.a < one.b):
        trip, speed = way.round_trip_seconds, way.bytes_per_second
        ends = f"between {plain(way.a or 'the head')} and {plain(way.b)}"
        if way.round_trip_measured and usable(trip) and trip > SLOW_ROUND_TRIP:
            yield Finding(
                "slow_way",
                Level.HINT,
                f"a round trip {ends} takes {time_text(trip)}",
                "every value from one to the other takes at least half of that, and every run one to start",
                "keep splits that follow each other on one of them (devices=, pins=), and have more runs "
                "under way (pipeline=)",
            )
        if way.bandwidth_measured and usable(speed) and speed < SLOW_ROAD:
            yield Finding(
                "slow_way",
                Level.WARNING,
                f"{ends} there are {rate_text(speed)}/s",
                f"a value of a megabyte takes {time_text(1e6 / speed)}",
                "look for Wi-Fi, a VPN or other traffic there, and for busy processors; keep splits that "
                "follow each other on one of them (devices=, pins=)",
            )


def _others(found: Measurements) -> Iterator[Finding]:
    assert found.pool is not None
    others: dict[str, list[str]] = {}
    for one in found.pool.members:
        if _is_other(found, one.server):
            others.setdefault(one.server, []).append(one.name)
    for program, names in others.items():
        verb = "runs" if len(names) == 1 else "run"
        yield Finding(
            "member_version",
            Level.HINT,
            f"{_names(names)} {verb} {plain(program)}, the head {plain(found.server.program)}",
            "what only one side knows is not used",
            "upgrade the older ones",
        )


def _is_other(found: Measurements, program: str) -> bool:
    return bool(program) and program != found.server.program


def _unreached(pool: PoolSeen) -> Iterator[Finding]:
    for one in pool.members:
        if one.reached is False:
            name, address = plain(one.name), plain(one.address)
            yield Finding(
                "through_head",
                Level.HINT,
                f"this client does not reach {name} at {address}: {plain(one.why_not_reached)}",
                "weights for it go through the head, which passes them on; values of runs do not",
                f"open {_port(one.address)} at {name} to this client, or list it by an address that both "
                "it and the head reach",
            )


def _port(address: str) -> str:
    """What to open of a daemon's address."""
    try:
        found = parse_address(address)
    except InvalidArgumentError:
        return "its port"
    return f"port {found.port}" if found.scheme == "grpc" else plain(address)


def _names(names: Iterable[str]) -> str:
    found = [plain(one) for one in dict.fromkeys(names)]
    more = [f"{len(found) - _NAMES} more"] if len(found) > _NAMES else []
    shown = [*found[:_NAMES], *more]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
