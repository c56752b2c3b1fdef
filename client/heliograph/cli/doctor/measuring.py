"""How `heliograph doctor` measures: round trips, and transfers that grow until they take long enough.

Everything is bounded: round trips by time, each transfer by what the rate so far promises of the time that
is left, and whatever does not end by the timeout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.cli.doctor.growth import FIRST_BYTES, LARGEST_BYTES, Growth, grow
from heliograph.cli.doctor.measurements import (
    Copies,
    DeviceSeen,
    Direction,
    MemberSeen,
    PathMeasurement,
    PoolSeen,
    RoundTrip,
    SideFacts,
    TransportKind,
    TransportMeasurements,
)
from heliograph.connection import Servers, address_of
from heliograph.transport.allocator import facts_here
from heliograph_proto import DIRECT_WEIGHTS, FEATURES, __version__
from heliograph_proto.addresses import Address
from heliograph_proto.devices import MemberInfo, MemberState
from heliograph_proto.sessions import Traffic

#: Features that every server of this version has, whatever its devices are.
EVERYBODYS = tuple(one for one in FEATURES if one != DIRECT_WEIGHTS)
#: How long round trips of one kind are measured, and how many at most.
ROUND_TRIP_SECONDS = 0.3
ROUND_TRIPS = 200
#: The first transfer by memory, which is never slow.
FIRST_BY_MEMORY = 2**20
#: Transfers take at most this part of what is free of a device.
MEMORY_PART = 8
#: How long this client may take to reach a member, and how many it tries at the same time.
REACH_SECONDS = 3.0
AT_ONCE = 8

Tell = Callable[[str], None]


def measure(url: Servers, timeout: float, tell: Tell) -> TransportMeasurements:
    """Measures the connection to a server, or to a pool of several in this process, and what is behind a head of
    a pool; `tell` hears what is measured next. Raises ConnectionError, and whatever a session that does
    nothing unusual may raise."""
    address = address_of(url)
    began = time.perf_counter()
    tell("connecting")
    with hg.connect(url, timeout=timeout, progress=None) as session:
        connected = time.perf_counter() - began
        facts = session.server_facts(timeout)
        device = session.device(address.device) if address.device else _first(session)
        seen = tuple(_all_seen(session, timeout))
        if session.info.is_head:
            tell("the pool")
        pool = see_pool(session, bool(address.members), timeout)
        tell("round trips")
        empty = round_trips(lambda: session.synchronize(timeout))
        run = round_trips(_run(session, device, timeout))
        transport = _Measuring(device, empty.median_seconds, timeout, tell)
        transports = tuple(_transports(session, address, transport))
        return TransportMeasurements(
            url=session.address,
            in_process=address.scheme == "local",
            local_address=address.is_loopback,
            client=SideFacts(f"heliograph/{__version__}", facts_here()),
            server=SideFacts(session.info.server, dict(facts)),
            connect_seconds=connected,
            empty=empty,
            run=run,
            transports=transports,
            chunk_bytes=session.info.limits.chunk_bytes,
            shared_memory=session.shared_memory,
            why_not_shared=session.why_not_shared,
            version=session.info.version,
            features=session.info.features,
            missing_features=tuple(one for one in EVERYBODYS if one not in session.info.features),
            devices=seen,
            pool=pool,
        )


def _first(session: hg.Session) -> hg.Device:
    """Of those that are there."""
    return next((one for one in session.devices if not one.lost), session.devices[0])


def _all_seen(session: hg.Session, timeout: float) -> Iterator[DeviceSeen]:
    """Without those of members that are lost, also meanwhile."""
    for one in session.devices:
        with suppress(hg.MemberLostError):
            if not one.lost:
                yield _seen(one, timeout)


def _seen(device: hg.Device, timeout: float) -> DeviceSeen:
    memory = device.memory(timeout=timeout)
    return DeviceSeen(
        device.name,
        device.type.name.lower(),
        device.backend,
        device.description,
        memory.free_bytes,
        memory.total_bytes,
        dict(device.features),
        dict(device.missing),
    )


# Round trips


def _run(session: hg.Session, device: hg.Device, timeout: float) -> Callable[[], object]:
    """One run of a plan of one op, with 64 bytes in and out."""
    graph = hg.Graph()
    graph.output("y", graph.input("x", (16,), "f32") + 1.0)
    plan, x = session.compile(graph, device.name, timeout=timeout), np.ones(16, np.float32)
    return lambda: plan.run(x=x, timeout=timeout)


def round_trips(step: Callable[[], object]) -> RoundTrip:
    """The times of a step, which runs once before: two at least, and no more than fit into the time."""
    step()
    times: list[float] = []
    while len(times) < 2 or (len(times) < ROUND_TRIPS and sum(times) < ROUND_TRIP_SECONDS):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    ordered = sorted(times)
    return RoundTrip(statistics.median(ordered), ordered[(len(ordered) * 9) // 10], len(ordered))


# Transports


@dataclass(frozen=True, slots=True)
class _Measuring:
    """What all transports are measured with."""

    device: hg.Device
    round_trip_seconds: float
    timeout: float
    tell: Tell

    def growth(self, kind: TransportKind) -> Growth:
        first = FIRST_BYTES if kind is TransportKind.GRPC else FIRST_BY_MEMORY
        return Growth(first, most_bytes(self.device, self.timeout), self.round_trip_seconds)


def _transports(session: hg.Session, address: Address, how: _Measuring) -> Iterator[PathMeasurement]:
    """Every transport that there is."""
    if address.members:
        # There is a transport to each; who names one alone sees it.
        return
    if address.scheme == "local":
        yield _measured(TransportKind.LOCAL, session, how)
    elif not session.shared_memory:
        yield _measured(TransportKind.GRPC, session, how)
        return
    else:
        yield _measured(TransportKind.SHARED, session, how)
        shown = address.token or None
        with hg.connect(
            str(address), timeout=how.timeout, progress=None, shared_memory=False, token=shown
        ) as other:
            yield _measured(TransportKind.GRPC, other, how)
    with _refusals(TransportKind.MAPPED) as refused:
        yield _mapped(session, how)
    yield from refused


def _measured(kind: TransportKind, session: hg.Session, how: _Measuring) -> PathMeasurement:
    """A transport by which tensors are set and got."""
    links: list[Direction] = []
    with _refusals(kind) as refused:
        how.tell(f"{kind.value}, up")
        links.append(_up(kind, session, how))
        how.tell(f"{kind.value}, down")
        links.append(_down(kind, session, how))
    up, down = [*links, None, None][:2]
    return PathMeasurement(kind, up, down, refused[0].why_not if refused else "")


@contextmanager
def _refusals(kind: TransportKind) -> Iterator[list[PathMeasurement]]:
    """Notes why a transport could not be measured; a connection that is gone ends everything."""
    refused: list[PathMeasurement] = []
    try:
        yield refused
    except hg.ConnectionError:
        raise
    except hg.HeliographError as error:
        refused.append(PathMeasurement(kind, why_not=error.message))


def _up(kind: TransportKind, session: hg.Session, how: _Measuring) -> Direction:
    timeout = how.timeout

    def transfer(size_bytes: int) -> float:
        tensor, array = session.empty(size_bytes, "u8", how.device.name), np.ones(size_bytes, np.uint8)
        session.synchronize(timeout)
        begun = time.perf_counter()
        tensor.set(array, timeout=timeout)
        session.synchronize(timeout)
        return time.perf_counter() - begun

    with _counted(session, timeout) as count:
        rate = grow(transfer, how.growth(kind))
    return Direction(rate, count(lambda one: (one.copied_in_bytes, one.written_bytes)))


def _down(kind: TransportKind, session: hg.Session, how: _Measuring) -> Direction:
    timeout = how.timeout

    def transfer(size_bytes: int) -> float:
        tensor = session.empty(size_bytes, "u8", how.device.name)
        # Else its pages might not be there, and reading them would cost nothing.
        tensor.memset(1)
        session.synchronize(timeout)
        begun = time.perf_counter()
        tensor.get(timeout=timeout)
        return time.perf_counter() - begun

    with _counted(session, timeout) as count:
        rate = grow(transfer, how.growth(kind))
    return Direction(rate, count(lambda one: (one.copied_out_bytes, one.read_bytes)))


def _mapped(session: hg.Session, how: _Measuring) -> PathMeasurement:
    """A tensor whose memory both have: the caller copies, nobody else."""
    how.tell(TransportKind.MAPPED.value)
    size_bytes = most_bytes(how.device, how.timeout)
    tensor = session.empty(size_bytes, "u8", how.device.name, buffer_type="shared")
    there, here = tensor.map(how.timeout), np.ones(size_bytes, np.uint8)

    def copy(destination: Any, source: Any) -> Callable[[int], float]:
        def transfer(size_bytes: int) -> float:
            begun = time.perf_counter()
            np.copyto(destination[:size_bytes], source[:size_bytes])
            return time.perf_counter() - begun

        return transfer

    growth = Growth(FIRST_BY_MEMORY, size_bytes)
    up, down = grow(copy(there, here), growth), grow(copy(here, there), growth)
    copies = Copies(1.0, 0.0)
    return PathMeasurement(TransportKind.MAPPED, Direction(up, copies), Direction(down, copies))


def most_bytes(device: hg.Device, timeout: float) -> int:
    """The largest transfer to a device: a small part of what is free there, and of what a buffer may be."""
    memory = device.memory(timeout=timeout)
    free = memory.free_bytes // MEMORY_PART if memory.total_bytes else LARGEST_BYTES
    kinds = device.buffer_types
    return max(1, min(LARGEST_BYTES, free, kinds[0].max_size_bytes if kinds else LARGEST_BYTES))


@contextmanager
def _counted(
    session: hg.Session, timeout: float
) -> Iterator[Callable[[Callable[[Traffic], tuple[int, int]]], Copies]]:
    """What both sides copy meanwhile: a function that tells, from how to read (copied, carried) bytes."""
    before = _traffic(session, timeout)

    def count(read: Callable[[Traffic], tuple[int, int]]) -> Copies:
        return Copies(*(_times(read, *pair) for pair in zip(before, _traffic(session, timeout), strict=True)))

    yield count


def _traffic(session: hg.Session, timeout: float) -> tuple[Traffic, Traffic]:
    """Of the client, and of the server."""
    return session.statistics().traffic, session.server_traffic(timeout)


def _times(read: Callable[[Traffic], tuple[int, int]], before: Traffic, after: Traffic) -> float | None:
    (copied, carried), (copied_now, carried_now) = read(before), read(after)
    return (copied_now - copied) / (carried_now - carried) if carried_now > carried else None


# The pool


def see_pool(session: hg.Session, is_here: bool, timeout: float) -> PoolSeen | None:
    """What the head of a pool has behind it; None for other servers. `is_here`: the head is this process.

    Raises what asking a server may.
    """
    if not session.info.is_head:
        return None
    members = session.members(timeout)
    links = session.links(timeout)

    def see(member: MemberInfo) -> MemberSeen:
        return _member_seen(session, member, is_here, min(timeout, REACH_SECONDS))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        seen = tuple(threads.map(see, members))
    return PoolSeen(seen, links, is_here)


def _member_seen(session: hg.Session, member: MemberInfo, is_here: bool, timeout: float) -> MemberSeen:
    told = (
        member.name,
        member.address,
        member.state.name.lower(),
        member.why,
        member.advice,
        member.devices,
        member.server,
    )
    if is_here or member.state is not MemberState.READY:
        return MemberSeen(*told)
    try:
        return MemberSeen(*told, *_reached(session, member.address, timeout))
    except hg.HeliographError as error:
        return MemberSeen(*told, reached=False, why_not_reached=error.message)


def _reached(session: hg.Session, address: str, timeout: float) -> tuple[bool, str, float]:
    """Whether this client finds the member itself where the head does; if not, why; and the time of an empty
    command. Raises what connecting does."""
    with hg.connect(address, timeout=timeout, progress=None, shared_memory=False) as member:
        # Such as one on this host, where the head says 127.0.0.1.
        if session.info.daemons and member.info.incarnation not in session.info.daemons:
            return False, "another daemon answers there", 0.0
        member.synchronize(timeout)
        begun = time.perf_counter()
        member.synchronize(timeout)
        return True, "", time.perf_counter() - begun
