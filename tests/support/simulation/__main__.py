"""`python -m simulation`: many schedules of every kind, in as many processes as there are processors."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from simulation.edges import SimulatedEdge
from simulation.keeping import SimulatedKeeping
from simulation.lease import SimulatedLease
from simulation.move import SimulatedMove
from simulation.session import SimulatedSession
from simulation.turns import SimulatedTurns
from simulation.values import SimulatedValues
from simulation.world import Violation

KINDS = {
    "session": SimulatedSession,
    "lease": SimulatedLease,
    "move": SimulatedMove,
    "turns": SimulatedTurns,
    "edge": SimulatedEdge,
    "keeping": SimulatedKeeping,
    "values": SimulatedValues,
}
#: The parts of each kind in ten schedules.
SHARES = {"session": 2, "lease": 2, "move": 1, "turns": 2, "edge": 1, "keeping": 1, "values": 1}
BATCH = 50


@dataclass(frozen=True)
class Found:
    """The schedules of a batch: how many, their events, and the first violation."""

    kind: str
    schedules: int
    events: int
    seed: int = 0
    violation: str = ""


def batch(kind: str, first: int, count: int) -> Found:
    """Run schedules with consecutive seeds, up to the first violation."""
    events = 0
    for seed in range(first, first + count):
        try:
            events += KINDS[kind](seed).run()
        except Exception as error:
            what = str(error) if isinstance(error, Violation) else repr(error)
            return Found(kind, seed - first + 1, events, seed, what)
    return Found(kind, count, events)


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="schedules in all (default: 10,000)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: random)")
    parser.add_argument("--only", choices=[*KINDS], help="one kind")
    arguments = parser.parse_args()
    first = secrets.randbits(40) if arguments.seed is None else arguments.seed
    print(f"seed {first}", flush=True)
    kinds = {arguments.only: 10} if arguments.only else SHARES
    began, found = time.monotonic(), []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = [
            pool.submit(batch, kind, first + start, min(BATCH, count - start))
            for kind, share in kinds.items()
            for count in [max(1, arguments.count * share // 10)]
            for start in range(0, count, BATCH)
        ]
        found = [one.result() for one in work]
    for kind in kinds:
        mine = [one for one in found if one.kind == kind]
        schedules, events = sum(one.schedules for one in mine), sum(one.events for one in mine)
        print(f"{kind:8} {schedules:7,} schedules {events:11,} events")
    print(f"{time.monotonic() - began:.1f} s")
    bad = [one for one in found if one.violation]
    for one in bad[:10]:
        print(f"violation: {one.violation}\n  again: make simulate ONLY={one.kind} SEED={one.seed} COUNT=1")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
