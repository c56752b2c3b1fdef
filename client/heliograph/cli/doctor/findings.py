"""What `heliograph doctor` makes of its measurements. Pure: measurements in, findings in words out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from heliograph.cli.common.text import plain, rate_text, time_text, usable
from heliograph.cli.doctor.measurements import (
    Direction,
    MemberSeen,
    PoolSeen,
    SideFacts,
    TransportKind,
    TransportMeasurements,
)
from heliograph_proto.addresses import parse_address
from heliograph_proto.errors import InvalidArgumentError

#: A round trip from which on one cannot wait for each answer, and one that a host's own sockets do not need.
SLOW_ROUND_TRIP = 5e-3
SLOW_ON_ONE_HOST = 2e-3
#: How much later than the median a tenth of the answers may come, and from when on that matters.
JITTER_TIMES = 4.0
JITTER_SECONDS = 5e-3
#: What connecting may take, in seconds, beside round trips.
SLOW_CONNECTING = 1.0
#: Line rates of usual networks, in bits a second, the slowest first, and which part of it is seen: TCP gets
#: nearly all through, and short transfers may be a little faster where a rate is an average.
NETWORKS = {"10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "2.5 Gbit/s": 2.5e9, "10 Gbit/s": 1e10}
NETWORK_PART = (0.75, 1.05)
#: What gRPC reaches on any processor, in bytes a second: below it on one host something is wrong; above it
#: the processors are the limit, and no network.
FAST_GRPC = 150e6
#: Below this, uploading a model of a gigabyte takes minutes.
SLOW_TRANSPORT = 10e6
#: The smallest chunk whose message costs little beside its bytes.
SMALL_CHUNK = 256 * 2**10
#: So often may each side copy a byte.
MOST_COPIES = 1.25
#: What is free of a device that is almost full.
LITTLE_FREE = 0.05
#: What keeps glibc from giving the memory of messages back to the system at once.
MALLOC_ADVICE = "MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824"
NOT_TOLD = "not told"
#: How many names a sentence has.
_NAMES = 4


class Level(Enum):
    """How much it matters."""

    #: Something is slow that need not be, or is about to fail.
    WARNING = "warning"
    #: It works as it can; something else would be faster.
    HINT = "hint"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen, what it costs, and what to do."""

    #: A name for programs.
    name: str
    level: Level
    seen: str
    cost: str
    advice: str


def find(found: TransportMeasurements) -> tuple[Finding, ...]:
    """All findings, those first that matter most; none if all is well."""
    parts = (
        _round_trip, _jitter, _connecting, _event_loop, _kernels, _shared, _broken, _transport, _allocator,
        _chunks, _copies, _memory, _age, _blas, _progress,
    )  # fmt: skip
    findings = [one for part in parts for one in part(found)]
    return by_weight(findings)


def by_weight(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those first that matter most."""
    return tuple(sorted(findings, key=lambda one: one.level is not Level.WARNING))


# The command stream


def _round_trip(found: TransportMeasurements) -> Iterator[Finding]:
    seconds = found.run.median_seconds
    if not usable(seconds):
        return
    if found.local_address and seconds > SLOW_ON_ONE_HOST and not found.in_process:
        yield Finding(
            "round_trip",
            Level.WARNING if seconds > SLOW_ROUND_TRIP else Level.HINT,
            f"a run's round trip takes {time_text(seconds)}, on this host",
            _serial(seconds),
            "look what else uses the processor (`top`), on both sides; if the address is a tunnel's, send "
            "loops (`plan.loop`), or runs ahead of their answers (`plan.submit`)",
        )
    elif seconds > SLOW_ROUND_TRIP:
        yield Finding(
            "round_trip",
            Level.HINT,
            f"a run's round trip takes {time_text(seconds)}",
            _serial(seconds),
            "send loops, whose steps need no answers (`plan.loop`), or runs ahead of their answers "
            "(`plan.submit`); keep values over there with fetch=False; put more into one graph",
        )


def _connecting(found: TransportMeasurements) -> Iterator[Finding]:
    """A session takes a handful of round trips; in this process, the start of devices."""
    seconds, trip = found.connect_seconds, found.empty.median_seconds
    usual = 20 * trip if usable(trip) else 0.0
    if usable(seconds) and seconds > SLOW_CONNECTING + usual and not found.in_process:
        yield Finding(
            "connecting",
            Level.HINT,
            f"connecting took {time_text(seconds)}",
            "every session begins with that",
            "look whether the host's name resolves fast (a numeric address does), and whether the server was "
            "just starting; keep sessions open",
        )


def _serial(seconds: float) -> str:
    return f"who waits for each answer gets {max(1 / seconds, 0.01):.3g} runs a second"


def _jitter(found: TransportMeasurements) -> Iterator[Finding]:
    median, p90 = found.run.median_seconds, found.run.p90_seconds
    if usable(median) and usable(p90) and p90 > max(JITTER_TIMES * median, JITTER_SECONDS):
        yield Finding(
            "jitter",
            Level.HINT,
            f"a tenth of the runs takes {time_text(p90)} or more, half of them {time_text(median)} or less",
            "short runs wait behind something else",
            "look what else uses the processor or the network, on both sides",
        )


def _event_loop(found: TransportMeasurements) -> Iterator[Finding]:
    if found.server.facts.get("event_loop") == "asyncio":
        yield Finding(
            "uvloop",
            Level.HINT,
            "uvloop is not installed on the server",
            "one client's runs took as long without it where that was measured; many clients were not",
            "on the server: pip install 'heliograph[server]'",
        )


# What computes


def _kernels(found: TransportMeasurements) -> Iterator[Finding]:
    for device in found.devices:
        why = device.missing.get("native_kernels", "")
        if not why:
            continue
        asked = "asked for" in why
        yield Finding(
            "kernels",
            Level.HINT if asked else Level.WARNING,
            f"{plain(device.name)} computes without native kernels: {plain(why)}",
            "it computes with NumPy alone, which is several times slower",
            "start it without reference=1"
            if asked
            else "where its daemon runs: pip install 'heliograph[server]', which has numba",
        )


def _blas(found: TransportMeasurements) -> Iterator[Finding]:
    for device in found.devices:
        if device.type == "cpu" and device.features and not device.features.get("blas"):
            yield Finding(
                "blas",
                Level.HINT,
                f"{plain(device.name)} names no BLAS",
                "matrix products without a native kernel may be slow",
                "install NumPy from PyPI or conda-forge, which bring one",
            )


def _memory(found: TransportMeasurements) -> Iterator[Finding]:
    for device in found.devices:
        free, total = device.free_bytes, device.total_bytes
        if usable(total) and free < LITTLE_FREE * total:
            yield Finding(
                "memory",
                Level.WARNING,
                f"{plain(device.name)} has {rate_text(max(0, free))} free of {rate_text(total)}",
                "what does not fit is refused with OutOfMemoryError",
                "free tensors and plans, end sessions that nobody uses, or give it more with "
                "--device NAME:memory=SIZE",
            )


# Transports


def _shared(found: TransportMeasurements) -> Iterator[Finding]:
    if found.in_process or found.shared_memory or not found.local_address:
        return
    why = found.why_not_shared or "no reason was given"
    told = found.server.facts.get("shared_memory", "on")
    if told != "on":
        why = f"{why} ({told})"
    yield Finding(
        "shared_memory",
        Level.WARNING,
        f"client and server seem to be on one host, but shared memory is off: {plain(why)}",
        "tensors go through sockets, which is several times slower",
        "run both as one user, with shared_memory = true in the server's configuration; nothing need be "
        "done where a tunnel leads to another host",
    )


def _broken(found: TransportMeasurements) -> Iterator[Finding]:
    for transport in found.transports:
        if transport.why_not and transport.kind is not TransportKind.MAPPED:
            yield Finding(
                "broken_transport",
                Level.WARNING,
                f"{transport.kind.value} could not be measured: {plain(transport.why_not)}",
                "tensors above some hundred kilobytes take long, or fail",
                _mend(transport.why_not),
            )


def _mend(why_not: str) -> str:
    if "quota" in why_not:
        return (
            "the transport is not to blame: raise the quota, or show the token of a tenant that may have more"
        )
    return "look at the network, and what else uses it; --timeout SECONDS gives each transfer more time"


def _transport(found: TransportMeasurements) -> Iterator[Finding]:
    transport = found.transport(TransportKind.GRPC)
    best = max(_rate(transport.up), _rate(transport.down)) if transport is not None else 0.0
    if transport is None or not usable(best):
        return
    cost = _gigabyte(best)
    name = network_of(
        max(_without_round_trip(found, transport.up), _without_round_trip(found, transport.down))
    )
    if found.local_address:
        # Where shared memory is in use, gRPC carries commands alone.
        if best < FAST_GRPC and not found.shared_memory:
            seen = f"gRPC gives {rate_text(best)}/s on this host"
            advice = "look what else uses the processor, on both sides; a tunnel gives what its network does"
            yield Finding("slow_transport", Level.HINT, seen, cost, advice)
    elif name:
        seen = f"the transport gives {rate_text(best)}/s: that is a {name} network"
        advice = (
            "a faster network helps, and so does sending less: weights once (they are kept by content; "
            "`serve --cache`, `serve --models`), f16, bf16 or quantized types, values that stay over there"
        )
        yield Finding("network", Level.HINT, seen, cost, advice)
    elif best < FAST_GRPC:
        seen = f"the transport gives {rate_text(best)}/s, which is no usual network's full rate"
        advice = "look for Wi-Fi, a VPN, a proxy or other traffic between the two, and for busy processors"
        yield Finding(
            "slow_transport", Level.WARNING if best < SLOW_TRANSPORT else Level.HINT, seen, cost, advice
        )


def network_of(bytes_per_second: float) -> str:
    """The usual network whose full rate this is; empty if it is none's."""
    least, most = NETWORK_PART
    for name, bits in NETWORKS.items():
        if least * bits / 8 <= bytes_per_second <= most * bits / 8:
            return name
    return ""


def _gigabyte(bytes_per_second: float) -> str:
    return f"a gigabyte takes {time_text(1e9 / bytes_per_second)}"


def _rate(direction: Direction | None) -> float:
    return direction.rate.bytes_per_second if direction is not None else 0.0


def _without_round_trip(found: TransportMeasurements, direction: Direction | None) -> float:
    """The rate at which bytes came, once the first one did."""
    if direction is None:
        return 0.0
    rate, trip = direction.rate, found.empty.median_seconds
    seconds = rate.seconds - trip if usable(trip) and trip < rate.seconds / 2 else rate.seconds
    return replace(rate, seconds=seconds).bytes_per_second


def _allocator(found: TransportMeasurements) -> Iterator[Finding]:
    """Where the network is not the limit, for gRPC alone: other transports take no memory for messages."""
    transport = found.transport(TransportKind.GRPC)
    if (
        transport is None
        or found.shared_memory
        or max(_rate(transport.up), _rate(transport.down)) < FAST_GRPC
    ):
        return
    sides = (
        ("client", found.client, "a third of the processor time of downloads", "hg.tune_allocator() in it"),
        ("server", found.server, "half of the processor time of uploads", "upgrade it: newer ones do so"),
    )
    for who, side, cost, advice in sides:
        if is_untuned(side.facts):
            yield Finding(
                "allocator",
                Level.HINT,
                f"the {who}'s memory is made by {plain(side.facts['allocator'])} with its defaults",
                f"messages' memory goes back to the system each time: that may be {cost}",
                f"{advice}, or {MALLOC_ADVICE} in the environment it starts with",
            )


def is_untuned(facts: Mapping[str, str]) -> bool:
    """Whether a process uses glibc's allocator, with nothing that keeps large memory."""
    settings = facts.get("allocator_settings", "")
    tuned = "MMAP_THRESHOLD" in settings or "mmap_threshold" in settings or "MMAP_MAX" in settings
    return facts.get("allocator", "").startswith("glibc") and not tuned


def _chunks(found: TransportMeasurements) -> Iterator[Finding]:
    if found.transport(TransportKind.GRPC) is not None and 0 < found.chunk_bytes < SMALL_CHUNK:
        yield Finding(
            "chunks",
            Level.HINT,
            f"a message of a transfer has at most {found.chunk_bytes:,} bytes",
            "each costs both sides a tenth of a millisecond, whatever its size",
            "set chunk_bytes in [limits] of the server's configuration to 1 MiB: 1048576",
        )


def _copies(found: TransportMeasurements) -> Iterator[Finding]:
    for transport in found.transports:
        # In this process the caller's array is copied before it is written, as it may change.
        for way, direction in (
            (("up", transport.up), ("down", transport.down)) if not found.in_process else ()
        ):
            if direction is None:
                continue
            for side in ("client", "server"):
                times = getattr(direction.copies, side)
                if usable(times) and times > MOST_COPIES:
                    yield Finding(
                        "copies",
                        Level.HINT,
                        f"by {transport.kind.value}, {way}, the {side} copies each byte {times:.3g} times",
                        "once would do",
                        "write tensors that are contiguous; upgrade the older side",
                    )


# Versions


def _age(found: TransportMeasurements) -> Iterator[Finding]:
    untold = [] if found.server.facts else ["it tells nothing of its event loop, allocator and versions"]
    lacks = [f"it does not know {', '.join(found.missing_features)}"] if found.missing_features else []
    version = _version(found.server) != _version(found.client)
    if not (untold or lacks or version):
        return
    seen = "; ".join([f"the server is {plain(found.server.program) or 'unnamed'}", *untold, *lacks])
    cost = "what only one side knows is not used" if untold or lacks else "nothing that was seen"
    advice = f"upgrade the older side; this is {found.client.program}"
    yield Finding("versions", Level.HINT, seen, cost, advice)


def _version(side: SideFacts) -> str:
    return side.program.rpartition("/")[2]


def _progress(found: TransportMeasurements) -> Iterator[Finding]:
    if found.client.facts and "rich" not in found.client.facts:
        yield Finding(
            "rich",
            Level.HINT,
            "rich is not installed here",
            "long uploads show no bars, and tables are plain",
            "pip install 'heliograph[cli]'",
        )


# The pool


def find_in_pool(found: TransportMeasurements) -> tuple[Finding, ...]:
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


def _apart(found: TransportMeasurements) -> Iterator[Finding]:
    """Members that cannot fetch values from others: one finding for each of those others."""
    pool = found.pool
    assert pool is not None
    programs = {one.name: one.server for one in pool.members}
    addresses = {one.name: one.address for one in pool.members}
    cut = [way for way in pool.links if way.reachable is False]
    for b in dict.fromkeys(way.b for way in cut):
        links = [way for way in cut if way.b == b]
        readers = _names(way.a for way in links)
        is_old = any(_is_other(found, programs.get(name, "")) for name in (b, *(way.a for way in links)))
        open_ = f"open {_port(addresses.get(b, ''))} at {plain(b)} to {readers}, or list it by an address "
        yield Finding(
            "unreachable",
            Level.WARNING,
            f"{readers} cannot fetch values from {plain(b)}: {plain(links[0].why)}",
            f"what they need of {plain(b)} goes through the head, over two ways instead of one",
            "upgrade the older daemon of these"
            if is_old
            else f"{open_}that they reach too; then restart {plain(b)}: ways are looked for as members join",
        )


def _slow(pool: PoolSeen) -> Iterator[Finding]:
    """Each pair once."""
    for way in (one for one in pool.links if one.a < one.b):
        trip, speed = way.round_trip_seconds, way.bytes_per_second
        ends = f"between {plain(way.a or 'the head')} and {plain(way.b)}"
        if way.round_trip_measured and usable(trip) and trip > SLOW_ROUND_TRIP:
            yield Finding(
                "slow_link",
                Level.HINT,
                f"a round trip {ends} takes {time_text(trip)}",
                "every value from one to the other takes at least half of that, and every run one to start",
                "keep splits that follow each other on one of them (devices=, pins=), and have more runs "
                "under way (pipeline=)",
            )
        if way.bandwidth_measured and usable(speed) and speed < SLOW_TRANSPORT:
            yield Finding(
                "slow_link",
                Level.WARNING,
                f"{ends} there are {rate_text(speed)}/s",
                f"a value of a megabyte takes {time_text(1e6 / speed)}",
                "look for Wi-Fi, a VPN or other traffic there, and for busy processors; keep splits that "
                "follow each other on one of them (devices=, pins=)",
            )


def _others(found: TransportMeasurements) -> Iterator[Finding]:
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


def _is_other(found: TransportMeasurements, program: str) -> bool:
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


# Words


def said(findings: Iterable[Finding]) -> list[str]:
    """Findings as lines."""
    lines: list[str] = []
    for number, one in enumerate(findings, 1):
        lines += [
            f"{number}. {one.level.value}: {one.seen}",
            f"   costs: {one.cost}",
            f"   to do: {one.advice}",
        ]
    return lines or ["nothing to change: the transport is as good as it can be"]
