"""Tenants that share a device: how time on it is shared, and what that costs one that is alone."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
from figures import Figure, shared

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun, RunForm
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import CompileRequest
from heliograph_proto.sessions import Quota
from heliograph_proto.types import tensor_type
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.principals import Principal
from heliograph_server.runtime import host as host_module
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session

#: Of what is shared: the share of one, against what it should be.
BAR_EQUAL, BAR_WEIGHTED = 0.05, 0.05
#: Of what one pays that is alone: of a run of one op, in its call; of one in the device's thread.
BAR_ALONE = 1.10
SECONDS, PLAN = 4.0, 1
ROUNDS, RUNS = 40, 250


@dataclass
class Greed:
    """A tenant that has so many runs in flight, over so many streams."""

    name: str
    in_flight: int
    streams: int = 1
    weight: float = 1.0


def _product() -> Graph:
    """A run of some milliseconds."""
    side = tensor_type("f32", (640, 640))
    nodes = tuple(Node("matmul", (place, 0), side) for place in range(4))
    return Graph((Leaf(LeafKind.INPUT, "x", side),), nodes, (Output("y", 4),))


def _one_op(size: int) -> Graph:
    type = tensor_type("f32", (size,))
    return Graph((Leaf(LeafKind.INPUT, "x", type),), (Node("neg", (0,), type),), (Output("y", 1),))


class _Client:
    """Keeps its runs in flight until it is told to end."""

    def __init__(self, host: Host, greed: Greed) -> None:
        principal = Principal(greed.name, quota=Quota(weight=greed.weight))
        self.session: Session = host.session(host.open_session(greed.name, principal=principal).session)
        self._greed = greed
        self._lock = threading.RLock()
        self._sequence = 0
        self._ends = False
        self._streams: dict[int, int] = {}
        self.session.attach(self._take)
        self.session.compile(CompileRequest(PLAN, _product()))
        self._send(c.Allocate(10, tensor_type("f32", (640, 640))), 0)
        for stream in range(greed.streams - 1):
            self._send(c.CreateStream(100 + stream), 0)
            # One plan runs once at a time, so each stream has one of its own.
            self.session.compile(CompileRequest(PLAN + 1 + stream, _product()))

    def _send(self, kind: c.CommandKind, stream: int) -> None:
        with self._lock:
            self._sequence += 1
            self._streams[self._sequence] = stream
            self.session.submit([c.Command(self._sequence, kind, stream, notify=True)])

    def _run(self, stream: int) -> None:
        plan = PLAN + (stream - 99 if stream else 0)
        self._send(
            c.RunCommand(plan, (c.InputBinding(0, tensor=10),), (c.OutputBinding(0, 0, False),)), stream
        )

    def begin(self) -> None:
        for number in range(self._greed.in_flight):
            place = number % self._greed.streams
            self._run(99 + place if place else 0)

    def _take(self, batch: c.CompletionBatch) -> None:
        for one in batch.completions:
            if self._ends:
                return
            if one.error is not None:
                raise one.error
            if one.device_us:
                self._run(self._streams[one.sequence])

    def end(self) -> None:
        self._ends = True
        self.session.close()


def _shared(*greeds: Greed) -> list[float]:
    """The share of each of a device's time."""
    host = Host(Registry.of(CpuDevice(threads=2)))
    clients = [_Client(host, one) for one in greeds]
    for client in clients:
        client.begin()
    time.sleep(0.5)
    before = _seconds(host)
    time.sleep(SECONDS)
    after = _seconds(host)
    for client in clients:
        client.end()
    host.close()
    had = [after[one.name] - before[one.name] for one in greeds]
    return [one / sum(had) for one in had]


def _seconds(host: Host) -> dict[str, float]:
    return {one.tenant: one.device_seconds for one in host.tenants()}


def fair() -> Iterator[Figure]:
    """Shares of a device's time, and what one pays that is alone."""
    modest, greedy = _shared(Greed("modest", 1), Greed("greedy", 50))
    note = f"{100 * modest:.1f} : {100 * greedy:.1f}"
    off, against = abs(modest - 0.5), "50 : 50, to 45 : 55"
    yield Figure("deploy-fair/1-against-50-runs", off, 1.0, BAR_EQUAL, "of the time off", against, note)
    modest, greedy = _shared(Greed("modest", 1), Greed("greedy", 48, streams=8))
    note = f"{100 * modest:.1f} : {100 * greedy:.1f}"
    off = abs(modest - 0.5)
    yield Figure("deploy-fair/1-against-8-streams", off, 1.0, BAR_EQUAL, "of the time off", against, note)
    light, heavy = _shared(Greed("light", 8), Greed("heavy", 8, weight=3.0))
    note = f"{100 * light:.1f} : {100 * heavy:.1f}"
    off = abs(light - 0.25)
    yield Figure("deploy-fair/weights-1-to-3", off, 1.0, BAR_WEIGHTED, "of the time off", "25 : 75", note)
    yield from _alone()


# Alone


class _Plain(Mapping[str, DeviceLock]):
    """Devices without turns, as they would be if there were no tenants."""

    def __new__(cls, wholes: Mapping[str, DeviceLock], _: object) -> Mapping[str, DeviceLock]:  # type: ignore[misc]
        return wholes


class _Timed:
    """One session, which does runs of one op: in the call that brings them, or in the device's thread."""

    def __init__(self, *, at_once: bool) -> None:
        self._host = Host(Registry.of(CpuDevice(threads=2)))
        self._session: Session = self._host.session(self._host.open_session("one").session)
        self._done = threading.Semaphore(0)
        self._sequence = 0
        self._given: list[InlineResult] = []
        self._session.attach(
            lambda batch: self._done.release(len(batch.completions)), at_once=lambda: at_once
        )
        self._session.compile(CompileRequest(1, _one_op(16)))
        self._session.compile(CompileRequest(2, _one_op(2**14)))

    def inline(self) -> float:
        """Seconds of a run that is done where it arrives."""
        form, data = RunForm(1, [(0, 64)], [0]), [bytes(64)]
        start = time.perf_counter()
        for _ in range(RUNS):
            self._sequence += 1
            assert self._session.answer(InlineRun(form, data, self._sequence), self._given.append)
        self._given.clear()
        return (time.perf_counter() - start) / RUNS

    def queued(self) -> float:
        """Seconds of a run that goes to the device's thread and back."""
        kind = c.RunCommand(
            2, (c.InputBinding(0, np.ones(2**14, np.float32).tobytes()),), (c.OutputBinding(0, 9),)
        )
        start = time.perf_counter()
        for _ in range(RUNS // 5):
            for one in (kind, c.Free((9,))):
                self._sequence += 1
                self._session.submit([c.Command(self._sequence, one, notify=True)])
            assert self._done.acquire(timeout=10) and self._done.acquire(timeout=10)
        return (time.perf_counter() - start) / (RUNS // 5)

    def close(self) -> None:
        self._session.close()
        self._host.close()


@contextmanager
def _one_processor() -> Iterator[None]:
    """A thread that wakes on another processor takes half as long again, or not, for as long as a process
    lives: that would be all there is to see."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _timed(*, at_once: bool) -> Iterator[tuple[_Timed, _Timed]]:
    """With turns, and without. Their threads are made here, and stay on the processors of who makes them."""
    ours = _Timed(at_once=at_once)
    with mock.patch.object(host_module, "DeviceShares", _Plain):
        plain = _Timed(at_once=at_once)
    try:
        yield ours, plain
    finally:
        ours.close()
        plain.close()


def _alone() -> Iterator[Figure]:
    for name in ("inline", "queued"):
        with _one_processor(), _timed(at_once=name == "inline") as (ours, plain):
            seconds: dict[_Timed, list[float]] = {ours: [], plain: []}
            for one in (ours, plain):
                getattr(one, name)()
            for number in range(shared(ROUNDS)):
                # By turns the first, which finds the processor as the other one left it.
                for one in (ours, plain) if number % 2 else (plain, ours):
                    seconds[one].append(getattr(one, name)())
            mine, theirs = (statistics.median(seconds[one]) * 1e6 for one in (ours, plain))
            note = "on one processor"
            yield Figure(
                f"deploy-fair/alone-{name}", mine, theirs, BAR_ALONE, "us", "the same without turns", note
            )
