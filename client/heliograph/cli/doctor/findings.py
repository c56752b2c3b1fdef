"""Findings of `heliograph doctor`, made from its measurements. Pure: measurements in, texts out.

`_HINTS` and `_WARNINGS` have the cost and the advice of each finding; the functions decide which
apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from heliograph.cli.common.text import age_text, plain, time_text, usable
from heliograph.cli.doctor.expectations import expected_rate
from heliograph.cli.doctor.measurements import (
    Direction,
    MemberSeen,
    PoolSeen,
    SideFacts,
    TransportKind,
    TransportMeasurements,
)
from heliograph_proto.addresses import parse_address
from heliograph_proto.devices import Link
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import size_text

#: A round trip above which clients must not wait for each answer; and the limit for sockets of one
#: host.
SLOW_ROUND_TRIP = 5e-3
SLOW_ON_ONE_HOST = 2e-3
#: How much later than the median the slowest tenth of the answers may be, and above which time that
#: matters.
JITTER_TIMES = 4.0
JITTER_SECONDS = 5e-3
#: How long connecting may take, in seconds, in addition to round trips.
SLOW_CONNECTING = 1.0
#: Line rates of common networks, in bits a second, slowest first; and the part of them that is
#: measured. TCP reaches nearly all of it, and short transfers may exceed it where a rate is an
#: average.
NETWORKS = {"10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "2.5 Gbit/s": 2.5e9, "10 Gbit/s": 1e10}
NETWORK_PART = (0.75, 1.05)
#: The rate that gRPC reaches on any processor, in bytes a second: a lower rate on one host is a
#: problem; at a higher one the processors are the limit, not the network.
FAST_GRPC = 150e6
#: Below this rate, uploading a model of 1 GiB takes minutes.
SLOW_TRANSPORT = 10e6
#: The smallest chunk for which the cost of a message is small beside its bytes.
SMALL_CHUNK = 256 * 2**10
#: How often each side may copy a byte.
MOST_COPIES = 1.25
#: The free part of a device that is almost full.
LITTLE_FREE = 0.05
#: Keeps glibc from returning the memory of messages to the system at once.
MALLOC_ADVICE = "MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824"
#: The most names in a sentence.
_NAMES = 4


class Level(Enum):
    """The weight of a finding."""

    #: Something is slow without need, or is about to fail.
    WARNING = "warning"
    #: It works as it can; another setup is faster.
    HINT = "hint"


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation, its cost, and what to do about it."""

    #: A name for programs.
    name: str
    level: Level
    seen: str
    cost: str
    advice: str


_WAITING = "a client that waits for each answer gets {runs:.3g} runs a second"
_REFERENCE = "it computes with NumPy alone, which is several times slower"
_SLOW_TENSORS = "tensors above some hundred kilobytes take long, or fail"
_GIBIBYTE = "1 GiB takes {gibibyte}"
_RELAYED = "values from {member} go through the head, over two links instead of one"
_TRIMMED = "the memory of messages goes back to the system each time: up to {part} of the processor time"
_UNUSED = "features that only one side supports are not used"
_BUSY = "check what else uses the processor, on both sides"

#: Cost and advice of the findings that are hints, and of those that are warnings unless a function
#: decides otherwise. The part of a key before ":" is the finding's name.
_HINTS = {
    "round_trip": (
        _WAITING,
        "send loops, whose steps need no answers (`plan.loop`), or submit runs ahead of their answers "
        "(`plan.submit`); keep values on the server with fetch=False; put more into one graph",
    ),
    "round_trip:local": (
        _WAITING,
        f"{_BUSY}; behind a tunnel, send loops (`plan.loop`), or submit runs ahead (`plan.submit`)",
    ),
    "jitter": ("short runs wait behind other work", f"{_BUSY}, and what else uses the network"),
    "connecting": (
        "every session starts with that delay",
        "check that the host's name resolves fast (a numeric address does) and that the server was not just "
        "starting; keep sessions open",
    ),
    "uvloop": (
        "none was measured with one client; many clients were not measured",
        "on the server: pip install 'heliograph[server]'",
    ),
    "kernels:asked": (_REFERENCE, "start it without reference=1"),
    "blas": (
        "matrix products without a native kernel may be slow",
        "install NumPy from PyPI or conda-forge, which include a BLAS",
    ),
    "network": (
        _GIBIBYTE,
        "use a faster network, or send less: weights once (they are kept by content; `serve --cache`, "
        "`serve --models`), f16, bf16 or quantized types, values that stay on the server",
    ),
    "slow_transport": (
        _GIBIBYTE,
        "look for Wi-Fi, a VPN, a proxy or other traffic between the two, and for busy processors",
    ),
    "slow_transport:local": (
        _GIBIBYTE,
        f"{_BUSY}, and whether a tunnel, a proxy or the network of a container lies between; connect by "
        "unix:///PATH, which also allows shared memory, or by grpc:// where TLS is not needed",
    ),
    "slow_transport:beside": (
        "nothing as long as shared memory is on; without it, 1 GiB takes {gibibyte}",
        f"{_BUSY}, and whether a tunnel, a proxy or the network of a container lies between",
    ),
    "slow_transport:memory": (
        _GIBIBYTE,
        f"{_BUSY}; look for swapping, for a container's limits of memory and processors, and for processes "
        "on different NUMA nodes (numactl --hardware)",
    ),
    "allocator:client": (
        _TRIMMED.format(part="a third") + " of downloads",
        f"call hg.tune_allocator() in it, or start it with {MALLOC_ADVICE} in its environment",
    ),
    "allocator:server": (
        _TRIMMED.format(part="half") + " of uploads",
        f"upgrade it (newer ones tune it), or start it with {MALLOC_ADVICE} in its environment",
    ),
    "chunks": (
        "each message costs both sides a tenth of a millisecond, whatever its size",
        "set chunk_bytes in [limits] of the server's configuration to 1 MiB: 1048576",
    ),
    "copies": ("one copy suffices", "write contiguous tensors; upgrade the older side"),
    "versions": (_UNUSED, "upgrade the older side; this client is {client}"),
    "versions:alike": ("none was seen", "upgrade the older side; this client is {client}"),
    "rich": ("long uploads show no bars, and tables are plain", "pip install 'heliograph[cli]'"),
    "slow_link:round_trip": (
        "every value from one to the other takes at least half of that, and every run takes one to start",
        "keep consecutive splits on one of them (devices=, pins=), and more runs in flight (pipeline=)",
    ),
    "member_version": (_UNUSED, "upgrade the older ones"),
    "through_head": (
        "its weights go through the head, which forwards them; values of runs do not",
        "open {port} at {member} to this client, or list it by an address that client and head reach",
    ),
}
_WARNINGS = {
    "kernels": (_REFERENCE, "where its daemon runs: pip install 'heliograph[server]', which includes numba"),
    "memory": (
        "requests that do not fit are refused with OutOfMemoryError",
        "free tensors and plans, end unused sessions, or give it more with --device NAME:memory=SIZE",
    ),
    "shared_memory": (
        "tensors go through sockets, which is several times slower",
        "run both as one user, with shared_memory = true in the server's configuration; a tunnel to another "
        "host needs no change",
    ),
    "broken_transport": (
        _SLOW_TENSORS,
        "check the network and its load; --timeout SECONDS gives each transfer more time",
    ),
    "broken_transport:quota": (
        _SLOW_TENSORS,
        "the transport is not at fault: raise the quota, or use the token of a tenant with a larger one",
    ),
    "pool": (
        "only the head's own devices are available",
        "check what its source lists: the name that dns: resolves, or the names in static: or ray:",
    ),
    "member": (
        "its devices cannot be used; plans that need them fail, or are placed elsewhere",
        "{advice}; {port} there must be open to the head, which retries by itself",
    ),
    "member:draining": (
        "new plans avoid its devices, and it is gone once its work has ended",
        "{advice}",
    ),
    "unreachable": (
        _RELAYED,
        "open {port} at {member} to {readers}, or list it by an address that they reach too; the head "
        "looks again every ten seconds, and at once when a graph is compiled",
    ),
    "unreachable:old": (_RELAYED, "upgrade the older daemon of these"),
    "slow_link:bandwidth": (
        "a value of 1 MiB takes {mebibyte}",
        "look for Wi-Fi, a VPN or other traffic there, and for busy processors; keep consecutive splits on "
        "one of them (devices=, pins=)",
    ),
}


def _finding(key: str, seen: str, level: Level | None = None, **facts: object) -> Finding:
    """A row of the tables with its facts filled in."""
    usual = Level.WARNING if key in _WARNINGS else Level.HINT
    cost, advice = (_HINTS | _WARNINGS)[key]
    name = key.partition(":")[0]
    return Finding(name, level or usual, seen, cost.format(**facts), advice.format(**facts))


def find(found: TransportMeasurements) -> tuple[Finding, ...]:
    """All findings on the connection and the devices, most important first; none if all is well."""
    parts = (
        _round_trip, _jitter, _connecting, _event_loop, _kernels, _shared, _broken, _transport, _below_usual,
        _allocator,
        _chunks, _copies, _memory, _versions, _blas, _rich,
    )  # fmt: skip
    return by_weight(one for part in parts for one in part(found))


def find_in_pool(found: TransportMeasurements) -> tuple[Finding, ...]:
    """All findings on the server's pool; none without a pool, or if all is well."""
    pool = found.pool
    if pool is None:
        return ()
    head = found.server.program
    parts = (
        _empty(pool), _missing(pool), _apart(pool, head), _slow(pool), _others(pool, head), _unreached(pool),
    )  # fmt: skip
    return tuple(one for part in parts for one in part)


def by_weight(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, warnings first."""
    return tuple(sorted(findings, key=lambda one: one.level is not Level.WARNING))


# The command stream


def _round_trip(found: TransportMeasurements) -> Iterator[Finding]:
    seconds = found.run.median_seconds
    if not usable(seconds):
        return
    seen, runs = f"a run's round trip takes {time_text(seconds)}", max(1 / seconds, 0.01)
    is_slow = seconds > SLOW_ROUND_TRIP
    if found.local_address and seconds > SLOW_ON_ONE_HOST and not found.in_process:
        level = Level.WARNING if is_slow else Level.HINT
        yield _finding("round_trip:local", f"{seen}, on this host", level, runs=runs)
    elif is_slow:
        yield _finding("round_trip", seen, runs=runs)


def _connecting(found: TransportMeasurements) -> Iterator[Finding]:
    """A session takes a handful of round trips; in this process, also the start of devices."""
    seconds, trip = found.connect_seconds, found.empty.median_seconds
    usual = 20 * trip if usable(trip) else 0.0
    if usable(seconds) and seconds > SLOW_CONNECTING + usual and not found.in_process:
        yield _finding("connecting", f"connecting took {time_text(seconds)}")


def _jitter(found: TransportMeasurements) -> Iterator[Finding]:
    median, p90 = found.run.median_seconds, found.run.p90_seconds
    if usable(median) and usable(p90) and p90 > max(JITTER_TIMES * median, JITTER_SECONDS):
        yield _finding(
            "jitter",
            f"a tenth of the runs takes {time_text(p90)} or more, half of them {time_text(median)} or less",
        )


def _event_loop(found: TransportMeasurements) -> Iterator[Finding]:
    if found.server.facts.get("event_loop") == "asyncio":
        yield _finding("uvloop", "uvloop is not installed on the server")


# Devices


def _kernels(found: TransportMeasurements) -> Iterator[Finding]:
    for device in found.devices:
        if why := device.missing.get("native_kernels", ""):
            key = "kernels:asked" if "asked for" in why else "kernels"
            yield _finding(key, f"{plain(device.name)} computes without native kernels: {plain(why)}")


def _blas(found: TransportMeasurements) -> Iterator[Finding]:
    for device in found.devices:
        if device.type == "cpu" and device.features and not device.features.get("blas"):
            yield _finding("blas", f"{plain(device.name)} reports no BLAS")


def _memory(found: TransportMeasurements) -> Iterator[Finding]:
    for device in found.devices:
        free, total = device.free_bytes, device.total_bytes
        if usable(total) and free < LITTLE_FREE * total:
            sizes = f"{size_text(max(0, free))} free of {size_text(total)}"
            yield _finding("memory", f"{plain(device.name)} has {sizes}")


# Transports


def _shared(found: TransportMeasurements) -> Iterator[Finding]:
    if found.in_process or found.shared_memory or not found.local_address:
        return
    why = found.why_not_shared or "no reason was given"
    reason = found.server.facts.get("shared_memory", "on")
    if reason != "on":
        why = f"{why} ({reason})"
    seen = f"client and server seem to be on one host, but shared memory is off: {plain(why)}"
    yield _finding("shared_memory", seen)


def _broken(found: TransportMeasurements) -> Iterator[Finding]:
    for transport in found.transports:
        if transport.why_not and transport.kind is not TransportKind.MAPPED:
            key = "broken_transport:quota" if "quota" in transport.why_not else "broken_transport"
            yield _finding(key, f"{transport.kind.value} could not be measured: {plain(transport.why_not)}")


def _transport(found: TransportMeasurements) -> Iterator[Finding]:
    directly = found.transport(TransportKind.DIRECT)
    is_direct = directly is not None and usable(directly.best)
    transport = directly if is_direct else found.transport(TransportKind.GRPC)
    best = transport.best if transport is not None else 0.0
    if transport is None or not usable(best):
        return
    rate, gibibyte = f"{size_text(best)}/s", time_text(2**30 / best)
    trip = found.empty.median_seconds
    name = network_of(max(_without_trip(transport.up, trip), _without_trip(transport.down, trip)))
    if found.local_address:
        # Where shared memory is in use, gRPC carries commands alone.
        if found.machine is None and best < FAST_GRPC and not found.shared_memory:
            yield _finding("slow_transport:local", f"gRPC gives {rate} on this host", gibibyte=gibibyte)
    elif name:
        seen = f"the connection gives {rate}: that is a {name} network"
        yield _finding("network", seen, gibibyte=gibibyte)
    elif best < FAST_GRPC:
        seen = f"the connection gives {rate}, which is no common network's full rate"
        level = Level.WARNING if best < SLOW_TRANSPORT else Level.HINT
        yield _finding("slow_transport", seen, level, gibibyte=gibibyte)


def _below_usual(found: TransportMeasurements) -> Iterator[Finding]:
    """Findings on transports of this host that are slow for this machine."""
    for one in found.transports:
        expected = expected_rate(found, one.kind)
        if expected is None or not found.local_address:
            continue
        for way, direction in (("up", one.up), ("down", one.down)):
            rate = direction.rate.bytes_per_second if direction is not None else 0.0
            if not usable(rate) or rate >= expected.least:
                continue
            seen = (
                f"{one.kind.value} gives {size_text(rate)}/s {way}; {expected.raw_way} gives "
                f"{size_text(expected.raw)}/s on this machine, so {size_text(expected.least)}/s and more "
                "is usual"
            )
            is_network = one.kind in (TransportKind.GRPC, TransportKind.DIRECT)
            is_beside = is_network and found.shared_memory
            key = "beside" if is_beside else "local" if is_network else "memory"
            level = Level.HINT if is_beside else Level.WARNING
            yield _finding(f"slow_transport:{key}", seen, level, gibibyte=time_text(2**30 / rate))


def network_of(bytes_per_second: float) -> str:
    """The common network with this full rate; empty if there is none."""
    least, most = NETWORK_PART
    for name, bits in NETWORKS.items():
        if least * bits / 8 <= bytes_per_second <= most * bits / 8:
            return name
    return ""


def _without_trip(direction: Direction | None, trip: float) -> float:
    """The rate from the arrival of the first byte on; `trip` is the round trip in seconds."""
    if direction is None:
        return 0.0
    rate = direction.rate
    seconds = rate.seconds - trip if usable(trip) and trip < rate.seconds / 2 else rate.seconds
    return replace(rate, seconds=seconds).bytes_per_second


def _allocator(found: TransportMeasurements) -> Iterator[Finding]:
    """Findings for gRPC at rates above a network's limit: other transports allocate no messages."""
    transport = found.transport(TransportKind.GRPC)
    if transport is None or found.shared_memory or transport.best < FAST_GRPC:
        return
    for name, side in (("client", found.client), ("server", found.server)):
        if is_untuned(side.facts):
            allocator = plain(side.facts["allocator"])
            yield _finding(f"allocator:{name}", f"the {name} uses {allocator}'s allocator with its defaults")


def is_untuned(facts: Mapping[str, str]) -> bool:
    """True if a process uses glibc's allocator without a setting that keeps large blocks."""
    settings = facts.get("allocator_settings", "")
    tuned = "MMAP_THRESHOLD" in settings or "mmap_threshold" in settings or "MMAP_MAX" in settings
    return facts.get("allocator", "").startswith("glibc") and not tuned


def _chunks(found: TransportMeasurements) -> Iterator[Finding]:
    if found.transport(TransportKind.GRPC) is not None and 0 < found.chunk_bytes < SMALL_CHUNK:
        yield _finding("chunks", f"a message of a transfer has at most {size_text(found.chunk_bytes)}")


def _copies(found: TransportMeasurements) -> Iterator[Finding]:
    # In this process the caller's array is copied before it is written, as it may change.
    if found.in_process:
        return
    for transport in found.transports:
        for way, direction in (("up", transport.up), ("down", transport.down)):
            if direction is None:
                continue
            for side, times in (("client", direction.copies.client), ("server", direction.copies.server)):
                if times is not None and usable(times) and times > MOST_COPIES:
                    seen = f"by {transport.kind.value}, {way}, the {side} copies each byte {times:.3g} times"
                    yield _finding("copies", seen)


# Versions


def _versions(found: TransportMeasurements) -> Iterator[Finding]:
    lacks = [] if found.server.facts else ["it does not report its event loop, allocator and versions"]
    if found.missing_features:
        lacks.append(f"it does not support {', '.join(found.missing_features)}")
    if not lacks and _version(found.server) == _version(found.client):
        return
    seen = "; ".join([f"the server is {plain(found.server.program) or 'unnamed'}", *lacks])
    yield _finding("versions" if lacks else "versions:alike", seen, client=found.client.program)


def _version(side: SideFacts) -> str:
    return side.program.rpartition("/")[2]


def _rich(found: TransportMeasurements) -> Iterator[Finding]:
    if found.client.facts and "rich" not in found.client.facts:
        yield _finding("rich", "rich is not installed here")


# The pool


def _empty(pool: PoolSeen) -> Iterator[Finding]:
    if not pool.members:
        yield _finding("pool", "the pool has no member, and none is expected")


_STATES = {"lost": "is lost", "draining": "drains", "away": "is away"}


def _missing(pool: PoolSeen) -> Iterator[Finding]:
    for one in pool.members:
        if one.state == "ready":
            continue
        state = _STATES.get(one.state, "has not joined")
        where = "" if one.address in one.why else f" at {plain(one.address)}"
        yield _finding(
            "member:draining" if one.state == "draining" else "member",
            f"member {plain(one.name)}{where} {state}: {plain(one.why)}",
            advice=plain(one.advice) or "check that the daemon runs there, or start it (`heliograph serve`)",
            port=_port(one.address),
        )


def _apart(pool: PoolSeen, head: str) -> Iterator[Finding]:
    """Members that cannot fetch values from another: one finding for each of the others."""
    members = {one.name: one for one in pool.members}
    cut = [link for link in pool.links if link.reachable is False]
    for b in dict.fromkeys(link.b for link in cut):
        links = [link for link in cut if link.b == b]
        names = [link.a for link in links]
        is_old = any(_is_other(members.get(name), head) for name in (b, *names))
        yield _finding(
            "unreachable:old" if is_old else "unreachable",
            f"{_names(names)} cannot fetch values from {plain(b)}{_since(links)}: {plain(links[0].why)}",
            member=plain(b),
            readers=_names(names),
            port=_port(members[b].address if b in members else ""),
        )


def _since(links: Iterable[Link]) -> str:
    """The longest time for which the links have been unreachable, where it is known."""
    seconds = max(link.unreachable_seconds for link in links)
    return f", for {age_text(seconds)}" if usable(seconds) else ""


def _slow(pool: PoolSeen) -> Iterator[Finding]:
    """Findings on slow links, each pair of daemons once."""
    for link in (one for one in pool.links if one.a < one.b):
        trip, speed = link.round_trip_seconds, link.bytes_per_second
        ends = f"between {plain(link.a or 'the head')} and {plain(link.b)}"
        if link.round_trip_measured and usable(trip) and trip > SLOW_ROUND_TRIP:
            yield _finding("slow_link:round_trip", f"a round trip {ends} takes {time_text(trip)}")
        if link.bandwidth_measured and usable(speed) and speed < SLOW_TRANSPORT:
            seen = f"the link {ends} gives {size_text(speed)}/s"
            yield _finding("slow_link:bandwidth", seen, mebibyte=time_text(2**20 / speed))


def _others(pool: PoolSeen, head: str) -> Iterator[Finding]:
    others: dict[str, list[str]] = {}
    for one in pool.members:
        if _is_other(one, head):
            others.setdefault(one.server, []).append(one.name)
    for program, names in others.items():
        verb = "runs" if len(names) == 1 else "run"
        seen = f"{_names(names)} {verb} {plain(program)}, the head {plain(head)}"
        yield _finding("member_version", seen)


def _is_other(member: MemberSeen | None, head: str) -> bool:
    """True if a member runs another program or version than the head, as far as that is known."""
    return member is not None and member.server not in ("", head)


def _unreached(pool: PoolSeen) -> Iterator[Finding]:
    for one in pool.members:
        if one.reached is False:
            name, why = plain(one.name), plain(one.why_not_reached)
            seen = f"this client does not reach {name} at {plain(one.address)}: {why}"
            yield _finding("through_head", seen, member=name, port=_port(one.address))


def _port(address: str) -> str:
    """The port of a daemon's address, as a text."""
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


def first_change(findings: Iterable[Finding]) -> str:
    """The one thing to change first: the advice of the most important finding that is a warning,
    else hint.

    Findings come most important first. Those that cost nothing are no reason to change anything.
    """
    for one in findings:
        if not one.cost.startswith(("none", "nothing")):
            return f"change first: {one.advice} ({one.seen})"
    return "change first: nothing"


def said(findings: Iterable[Finding]) -> list[str]:
    """The findings as lines of text."""
    lines: list[str] = []
    for number, one in enumerate(findings, 1):
        lines += [
            f"{number}. {one.level.value}: {one.seen}",
            f"   costs: {one.cost}",
            f"   to do: {one.advice}",
        ]
    return lines or ["nothing to change: the rates are usual for these transports"]
