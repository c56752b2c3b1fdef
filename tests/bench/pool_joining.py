"""Sixteen members: how long joining takes, and what a run costs the head by the number of its splits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from figures import Figure
from pool_runs import SECONDS, alternating

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from member_factory import MemberFactory

MEMBERS = 16
JOIN_SECONDS = 2.0
FEW, MANY = 2, 16
RUNS, ROUNDS, WARMUP = 30, 5, 10


def figures() -> Iterator[Figure]:
    with MemberFactory() as factory:
        urls = [factory.start("--device", "fake").url for _ in range(MEMBERS)]
        joining = [_join(urls) for _ in range(ROUNDS)]
        against = "2 s"
        note = f"{MEMBERS} processes on this machine; at best {min(joining):.2f} s"
        yield Figure("pool-joining/16", median(joining), JOIN_SECONDS, 1.0, "s", against, note)
        costs = _costs(urls)
    few, many = (median(costs[splits]) / splits for splits in (FEW, MANY))
    note = f"processor time of the head's process; a run of {MANY} splits {many * MANY * 1e3:.2f} ms"
    against = f"a split of a run of {FEW}, on as many members"
    yield Figure("pool-joining/head", many * 1e6, few * 1e6, 1.0, "us", against, note)


def _join(urls: list[str]) -> float:
    begun = time.perf_counter()
    with hg.connect(urls, timeout=SECONDS) as session:
        took = time.perf_counter() - begun
        assert len(session.devices) == len(urls)
    return took


def _costs(urls: list[str]) -> dict[int, list[float]]:
    """Processor seconds of this process, which is head and client, a run; by the number of splits."""
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    found: dict[int, list[float]] = {FEW: [], MANY: []}
    with hg.connect(urls, timeout=SECONDS) as session:
        devices = [device.name for device in session.devices]
        plans = {}
        for splits in found:
            graph, pins = alternating(devices[:splits], splits)
            plans[splits] = session.compile(graph, devices=devices[:splits], pins=pins)
        for _ in range(ROUNDS):
            for splits, plan in plans.items():
                for _ in range(WARMUP):
                    plan.run(x=x)
                begun = time.process_time()
                for _ in range(RUNS):
                    plan.run(x=x)
                found[splits].append((time.process_time() - begun) / RUNS)
    return found
