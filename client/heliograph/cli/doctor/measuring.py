"""The measuring of `heliograph doctor`: round trips, and transfers that grow until they take long
enough.

All of it is bounded: round trips by time, each transfer by the time that is left at the rate so
far, and every wait by the timeout.
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
from heliograph.cli.doctor.machine import measure_machine
from heliograph.cli.doctor.measurements import (
    Copies,
    DeviceSeen,
    Direction,
    MachineRates,
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

#: Features of every server of this version, whatever its devices are.
COMMON_FEATURES = tuple(one for one in FEATURES if one != DIRECT_WEIGHTS)
#: How long round trips of one kind are measured, and the most that are made.
ROUND_TRIP_SECONDS = 0.3
ROUND_TRIPS = 200
#: The first transfer through memory, which is never slow.
FIRST_BY_MEMORY = 2**20
#: Transfers take at most one part in this many of a device's free memory.
MEMORY_PART = 8
#: The timeout for reaching a member, and how many are tried at the same time.
REACH_SECONDS = 3.0
AT_ONCE = 8

Report = Callable[[str], None]


def measure(url: Servers, timeout: float, report: Report) -> TransportMeasurements:
    """Measure the connection to a server, or to a pool of several in this process, and the members
    behind the head of a pool. `report` is called with the name of each step. Raises
    ConnectionError, and the other errors of a session."""
    address = address_of(url)
    began = time.perf_counter()
    report("connecting")
    with hg.connect(url, timeout=timeout, progress=None, compression="off") as session:
        connected = time.perf_counter() - began
        facts = session.server_facts(timeout)
        if address.device:
            device = session.device(address.device)
        else:
            device = next((one for one in session.devices if not one.lost), session.devices[0])
        seen = tuple(_all_seen(session, timeout))
        if session.info.is_head:
            report("the pool")
        pool = see_pool(session, bool(address.members), timeout)
        report("round trips")
        empty = round_trips(lambda: session.synchronize(timeout))
        run = round_trips(_run(session, device, timeout))
        measuring = _Measuring(device, empty.median_seconds, timeout, report)
        transports = tuple(_transports(session, address, measuring))
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
            why_no_command_socket=session.why_no_command_socket,
            version=session.info.version,
            features=session.info.features,
            missing_features=tuple(one for one in COMMON_FEATURES if one not in session.info.features),
            devices=seen,
            pool=pool,
            machine=_machine(address, report),
        )


def _machine(address: Address, report: Report) -> MachineRates | None:
    if address.members or not address.is_loopback:
        return None
    report("this machine")
    return measure_machine()


def _all_seen(session: hg.Session, timeout: float) -> Iterator[DeviceSeen]:
    """The devices, without those of members that are lost or get lost meanwhile."""
    for device in session.devices:
        with suppress(hg.MemberLostError):
            if device.lost:
                continue
            memory = device.memory(timeout=timeout)
            yield DeviceSeen(
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
    """A function that runs a plan of one op, with 64 bytes in and out."""
    graph = hg.Graph()
    graph.output("y", graph.input("x", (16,), "f32") + 1.0)
    plan, x = session.compile(graph, device.name, timeout=timeout), np.ones(16, np.float32)
    return lambda: plan.run(x=x, timeout=timeout)


def round_trips(step: Callable[[], object]) -> RoundTrip:
    """Measure a step, after one run that is not counted: at least twice, and as often as fits into
    the time."""
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
    """The parameters that all transports are measured with."""

    device: hg.Device
    round_trip_seconds: float
    timeout: float
    report: Report

    def growth(self, kind: TransportKind) -> Growth:
        is_network = kind in (TransportKind.GRPC, TransportKind.DIRECT)
        first = FIRST_BYTES if is_network else FIRST_BY_MEMORY
        return Growth(first, most_bytes(self.device, self.timeout), self.round_trip_seconds)


def _by_grpc(address: Address, measuring: _Measuring) -> PathMeasurement:
    with hg.connect(
        str(address),
        timeout=measuring.timeout,
        progress=None,
        shared_memory=False,
        direct=False,
        compression="off",
        token=address.token or None,
    ) as other:
        return _measured(TransportKind.GRPC, other, measuring)


def _directly(address: Address, measuring: _Measuring) -> Iterator[PathMeasurement]:
    """Measure direct connections, where the server offers them."""
    with hg.connect(
        str(address),
        timeout=measuring.timeout,
        progress=None,
        shared_memory=False,
        compression="off",
        token=address.token or None,
    ) as other:
        if other.command_socket:
            yield _measured(TransportKind.DIRECT, other, measuring)


def _transports(session: hg.Session, address: Address, measuring: _Measuring) -> Iterator[PathMeasurement]:
    if address.members:
        # Each member has its own transports, which a doctor of that member's URL measures.
        return
    if address.scheme == "local":
        yield _measured(TransportKind.LOCAL, session, measuring)
    elif not session.shared_memory:
        yield from _directly(address, measuring)
        yield _by_grpc(address, measuring)
        return
    else:
        yield _measured(TransportKind.SHARED, session, measuring)
        yield from _directly(address, measuring)
        yield _by_grpc(address, measuring)
    with _refusals(TransportKind.MAPPED) as refused:
        yield _mapped(session, measuring)
    yield from refused


def _measured(kind: TransportKind, session: hg.Session, measuring: _Measuring) -> PathMeasurement:
    """Measure a transport by setting and getting tensors."""
    up = down = None
    with _refusals(kind) as refused:
        measuring.report(f"{kind.value}, up")
        up = _up(kind, session, measuring)
        measuring.report(f"{kind.value}, down")
        down = _down(kind, session, measuring)
    return PathMeasurement(kind, up, down, refused[0].why_not if refused else "")


@contextmanager
def _refusals(kind: TransportKind) -> Iterator[list[PathMeasurement]]:
    """Record why a transport could not be measured; a lost connection ends the whole
    measurement."""
    refused: list[PathMeasurement] = []
    try:
        yield refused
    except hg.ConnectionError:
        raise
    except hg.HeliographError as error:
        refused.append(PathMeasurement(kind, why_not=error.message))


def _up(kind: TransportKind, session: hg.Session, measuring: _Measuring) -> Direction:
    timeout = measuring.timeout

    def transfer(size_bytes: int) -> float:
        tensor, array = session.empty(size_bytes, "u8", measuring.device.name), np.ones(size_bytes, np.uint8)
        session.synchronize(timeout)
        begun = time.perf_counter()
        tensor.set(array, timeout=timeout)
        session.synchronize(timeout)
        return time.perf_counter() - begun

    before = _traffic(session, timeout)
    rate = grow(transfer, measuring.growth(kind))
    after = _traffic(session, timeout)
    return Direction(rate, _copies(lambda one: (one.copied_in_bytes, one.written_bytes), before, after))


def _down(kind: TransportKind, session: hg.Session, measuring: _Measuring) -> Direction:
    timeout = measuring.timeout

    def transfer(size_bytes: int) -> float:
        tensor = session.empty(size_bytes, "u8", measuring.device.name)
        # Otherwise its pages might not be there, and reading them would cost nothing.
        tensor.memset(1)
        session.synchronize(timeout)
        begun = time.perf_counter()
        tensor.get(timeout=timeout)
        return time.perf_counter() - begun

    before = _traffic(session, timeout)
    rate = grow(transfer, measuring.growth(kind))
    after = _traffic(session, timeout)
    return Direction(rate, _copies(lambda one: (one.copied_out_bytes, one.read_bytes), before, after))


def _mapped(session: hg.Session, measuring: _Measuring) -> PathMeasurement:
    """Measure a tensor in memory that both sides map: only the caller copies."""
    measuring.report(TransportKind.MAPPED.value)
    size_bytes = most_bytes(measuring.device, measuring.timeout)
    tensor = session.empty(size_bytes, "u8", measuring.device.name, buffer_type="shared")
    there, here = tensor.map(measuring.timeout), np.ones(size_bytes, np.uint8)

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
    """The largest transfer to a device: a small part of its free memory, and no more than a buffer
    may have."""
    memory = device.memory(timeout=timeout)
    free = memory.free_bytes // MEMORY_PART if memory.total_bytes else LARGEST_BYTES
    kinds = device.buffer_types
    return max(1, min(LARGEST_BYTES, free, kinds[0].max_size_bytes if kinds else LARGEST_BYTES))


def _traffic(session: hg.Session, timeout: float) -> tuple[Traffic, Traffic]:
    """The traffic of the client, and of the server."""
    return session.statistics().traffic, session.server_traffic(timeout)


def _copies(
    read: Callable[[Traffic], tuple[int, int]],
    before: tuple[Traffic, Traffic],
    after: tuple[Traffic, Traffic],
) -> Copies:
    """The copies of each side between two traffics. `read` gives (copied, carried) bytes."""
    times: list[float | None] = []
    for one, other in zip(before, after, strict=True):
        (copied, carried), (copied_now, carried_now) = read(one), read(other)
        times.append((copied_now - copied) / (carried_now - carried) if carried_now > carried else None)
    return Copies(*times)


# The pool


def see_pool(session: hg.Session, is_here: bool, timeout: float) -> PoolSeen | None:
    """Return the members and links of a pool, or None for a server that is not the head of one.

    `is_here`: the head is this process. Raises the errors of a call to a server.
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
    known = (
        member.name,
        member.address,
        member.state.name.lower(),
        member.why,
        member.advice,
        member.devices,
        member.server,
    )
    if is_here or member.state is not MemberState.READY:
        return MemberSeen(*known)
    try:
        return MemberSeen(*known, *_reached(session, member.address, timeout))
    except hg.HeliographError as error:
        return MemberSeen(*known, reached=False, why_not_reached=error.message)


def _reached(session: hg.Session, address: str, timeout: float) -> tuple[bool, str, float]:
    """Check whether this client finds the same member at the head's address of it.

    Returns whether it does; if not, why; and the round trip of an empty command. Raises the errors
    of connecting.
    """
    with hg.connect(address, timeout=timeout, progress=None, shared_memory=False, direct=False) as member:
        # Another daemon answers if the head's address is 127.0.0.1, for example.
        if session.info.daemons and member.info.incarnation not in session.info.daemons:
            return False, "another daemon answers there", 0.0
        member.synchronize(timeout)
        begun = time.perf_counter()
        member.synchronize(timeout)
        return True, "", time.perf_counter() - begun
