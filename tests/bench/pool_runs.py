"""Runs over a pool: a chain that goes to and fro between two hosts, stages that overlap on three, and what a
head costs a run that lies on one member.

The chain's hosts are 0.5 ms apart each way; head and client are on the first one's. What crosses is tiny, so
what counts is how often a message waits for another. The client runs there, as a process: this file is its
program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import Figure, seconds_of

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from member_factory import MemberFactory
from paths import SUPPORT
from virtual_hosts import Host, Network, Wire, rights
from virtual_hosts.probes import ECHO, connected

#: Of each host's own wire; from one to the other lie both.
DELAY_SECONDS = 0.00025
SPLITS = 8
#: What a split may take beside half a ping.
SPLIT_SECONDS = 0.0004
RUNS, ROUNDS, WARMUP = 40, 5, 10
HEAD_PORT, MEMBER_PORT, ECHO_PORT = 7070, 7071, 9000
STAGES = 3
STAGE_MS = 20
PIPELINE_RUNS = 60
PIPELINE_FACTOR = 2.8
#: What a run through a head may cost of one that knows its member.
SINGLE_FACTOR = 2.2
SECONDS = 300
PROBES = str(SUPPORT / "virtual_hosts" / "probes.py")
SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--log-level", "warning"]
PIPE: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}


def chain() -> Iterator[Figure]:
    """One run of 8 splits, each on the other host."""
    if reason := rights():
        print(f"  skipped: {reason}", file=sys.stderr)
        return
    found = chain_times()
    half, run = median(found["round_trips"]) / 2, median(found["runs"])
    limit = SPLITS * (half + SPLIT_SECONDS)
    note = (
        f"half a ping {half * 1e3:.2f} ms; a split {run / SPLITS * 1e3:.2f} ms, "
        f"at best {min(found['runs']) / SPLITS * 1e3:.2f}; "
        f"tensor bytes between head and client {found['head_bytes'][0]:.0f}"
    )
    against = f"{SPLITS} half pings and 0.4 ms a split"
    yield Figure("pool-chain/run", run * 1e3, limit * 1e3, 1.0, "ms", against, note)


def chain_times() -> dict[str, list[float]]:
    """What the client on the first host found."""
    wires = {"first": Wire(delay_seconds=DELAY_SECONDS), "second": Wire(delay_seconds=DELAY_SECONDS)}
    with Network(**wires) as network, ExitStack() as stack:
        first, second = network["first"], network["second"]
        for host in (first, second):
            stack.callback(_end, _member(host))
        echo = second.popen([sys.executable, PROBES, "answer", str(ECHO_PORT)], **PIPE)
        assert echo.stdout.readline()
        pool = f"static:first={first.address}:{MEMBER_PORT},second={second.address}:{MEMBER_PORT}"
        head = first.popen([*SERVE, "--listen", f"grpc://127.0.0.1:{HEAD_PORT}", "--pool", pool], **PIPE)
        stack.callback(_end, head)
        assert head.stdout.readline().startswith("listening on ")
        client = [sys.executable, __file__, f"grpc://127.0.0.1:{HEAD_PORT}", second.address]
        found: dict[str, list[float]] = json.loads(first.run(client, timeout=SECONDS).stdout)
        return found


def _member(host: Host) -> subprocess.Popen[Any]:
    listen = f"grpc://{host.address}:{MEMBER_PORT}"
    process = host.popen([*SERVE, "--device", "cpu:threads=1", "--listen", listen], **PIPE)
    assert process.stdout.readline().startswith("listening on ")
    return process


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait(SECONDS)


def alternating(devices: list[str], splits: int) -> tuple[hg.Graph, dict[str, str]]:
    """A chain of tiny nodes, and the device of each."""
    g = hg.Graph()
    x = g.input("x", (16,), "f32")
    for number in range(splits):
        with g.scope(f"split{number}"):
            x = hg.tanh(x)
    g.output("y", x)
    return g, {f"split{number}/*": devices[number % len(devices)] for number in range(splits)}


def chain_client(url: str, address: str) -> dict[str, list[float]]:
    """Round trips and runs in turn, so that a drift of the machine meets both."""
    found: dict[str, list[float]] = {"round_trips": [], "runs": []}
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    with hg.connect(url, timeout=SECONDS) as session, connected(address, ECHO_PORT, ECHO) as echo:
        devices = wait_for_devices(session, ["first/cpu0", "second/cpu0"])
        graph, pins = alternating(devices, SPLITS)
        plan = session.compile(graph, devices=devices, pins=pins)
        for _ in range(WARMUP):
            plan.run(x=x)
        before = carried_bytes(session)
        for _ in range(ROUNDS):
            for _ in range(RUNS):
                begun = time.perf_counter()
                echo.sendall(b"x")
                echo.recv(1)
                found["round_trips"].append(time.perf_counter() - begun)
            for _ in range(RUNS):
                begun = time.perf_counter()
                plan.run(x=x)
                found["runs"].append(time.perf_counter() - begun)
        found["head_bytes"] = [carried_bytes(session) - before]
    return found


def wait_for_devices(session: hg.Session, names: list[str]) -> list[str]:
    """Waits until a head has these devices. Raises AssertionError."""
    deadline = time.monotonic() + SECONDS
    while not {one.name for one in session.devices} >= set(names):
        assert time.monotonic() < deadline, f"the pool has {[one.name for one in session.devices]} alone"
        time.sleep(0.05)
    return names


def carried_bytes(session: hg.Session) -> float:
    """Tensor bytes that a head took or gave for a session, or brought from member to member."""
    traffic = session.statistics().traffic
    return float(traffic.written_bytes + traffic.read_bytes + traffic.peers.relayed_bytes)


def pipeline() -> Iterator[Figure]:
    """Runs that follow each other through three members, a stage on each."""
    with MemberFactory() as factory:
        device = ("--device", f"fake:compute_ms={STAGE_MS}")
        members = [factory.start(*device) for _ in range(STAGES)]
        names = [f"m{number}={one.host}:{one.port}" for number, one in enumerate(members)]
        with hg.connect([one.url for one in members], timeout=SECONDS) as session:
            devices = [device.name for device in session.devices][:STAGES]
            graph, pins = alternating(devices, STAGES)
            plan = session.compile(graph, devices=devices, pins=pins, pipeline=STAGES + 1)
            alone, _ = alternating(devices[:1], 1)
            stage = session.compile(alone, devices=devices[:1])
            ours = _seconds_a_run(plan)
            one = _seconds_a_run(stage)
    note = f"{ours * 1e3:.1f} ms a run; a stage of {STAGE_MS} ms {one * 1e3:.1f} ms; {len(names)} members"
    against = "three stages, one after the other, on one member"
    yield Figure(
        "pool-pipeline/run", ours * 1e3, STAGES * one * 1e3, 1 / PIPELINE_FACTOR, "ms", against, note
    )


def _seconds_a_run(plan: hg.Plan) -> float:
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    for future in [plan.submit(x=x) for _ in range(WARMUP)]:
        future.result(timeout=SECONDS)
    begun = time.perf_counter()
    for future in [plan.submit(x=x) for _ in range(PIPELINE_RUNS)]:
        future.result(timeout=SECONDS)
    return (time.perf_counter() - begun) / PIPELINE_RUNS


def single() -> Iterator[Figure]:
    """A tiny run on one member: through a head in the client's process, and from the client itself."""
    with MemberFactory() as factory, ExitStack() as stack:
        member = factory.start("--device", "cpu:threads=1")
        head = factory.start("--pool", f"static:m={member.host}:{member.port}")
        sessions = [hg.connect(where, timeout=SECONDS) for where in ([member.url], member.url, head.url)]
        for session in sessions:
            stack.enter_context(session)
        name = next(one.name for one in sessions[0].devices if "/" in one.name)
        wait_for_devices(sessions[2], ["m/cpu0"])
        plans = [
            session.compile(alternating([device], 1)[0], devices=[device])
            for session, device in zip(sessions, (name, "cpu0", "m/cpu0"), strict=True)
        ]
        ours, direct, daemon = _medians(plans)
    note = f"through a daemon {daemon * 1e3:.2f} ms, {daemon / direct:.2f} times; over loopback"
    against = "from a client of the member"
    yield Figure("pool-single/run", ours * 1e3, direct * 1e3, SINGLE_FACTOR, "ms", against, note)


def _medians(plans: list[hg.Plan]) -> list[float]:
    """Seconds of a run of each, in turn."""
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    found: list[list[float]] = [[] for _ in plans]
    for _ in range(ROUNDS):
        for plan, seconds in zip(plans, found, strict=True):
            seconds += seconds_of(partial(plan.run, x=x), RUNS, WARMUP)
    return [median(seconds) for seconds in found]


if __name__ == "__main__":
    print(json.dumps(chain_client(*sys.argv[1:])))
