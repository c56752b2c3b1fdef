"""Moves of sessions: the time for which a client stands still, beside a plain copy of the same bytes.

    python tests/bench/moves.py [--rounds N] [--mib N ...]

Two daemons in processes of their own on loopback. A session with one tensor goes from one to the other and
back, while its program runs a small plan; the figure is the longest time between two results. Beside it the
same bytes go between the same daemons over the same wire, as a copy of a tensor from member to member that
nothing else waits for. A row is `ok` if that time is at most its bar, as a multiple of the copy and a time of
its own.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from moving_programs import InThread  # noqa: E402
from surviving import doubling, four  # noqa: E402

import heliograph as hg  # noqa: E402
from heliograph.testing import running_daemon  # noqa: E402

MIB = 2**20
#: The bytes go ahead, so that no copy of them is waited for.
COPIES, OWN_SECONDS = 0.5, 0.1
ROUNDS = 5
SIZES = (0, 64, 1024)
QUIET = ("--device", "cpu:threads=1", "--log-level", "error")


def row(name: str, figure: float, bar: float, note: str) -> bool:
    """Print a time. Return whether it is within its bar."""
    is_ok = figure <= bar
    print(f"{name:34} {figure:8.3f} s  bar {bar:8.3f}  {'ok' if is_ok else 'short':6} {note}", flush=True)
    return is_ok


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@dataclass
class Moved:
    """Moves of one session, in seconds each."""

    #: The longest time between two results of a program that runs on.
    gaps: list[float] = field(default_factory=list)
    #: The time in which no command began.
    stills: list[float] = field(default_factory=list)
    #: The whole call.
    calls: list[float] = field(default_factory=list)


def moved(urls: list[str], mib: int, rounds: int) -> Moved:
    """Move a session to and fro, whose program runs a small plan all the time."""
    measured = Moved()
    with hg.connect(urls[0], progress=None) as session:
        plan = doubling(session)
        held = _tensor(session, mib) if mib else None
        plan.run(x=four(1))
        for number in range(rounds):
            ends: list[float] = []

            def step(ends: list[float] = ends) -> None:
                assert (plan.run(x=four(1))["y"] == 2).all()
                ends.append(time.perf_counter())

            with InThread(step):
                begun = time.perf_counter()
                found = session.move(urls[1 - number % 2])
                measured.calls.append(time.perf_counter() - begun)
            measured.gaps.append(max(b - a for a, b in pairwise((begun, *ends[1:]))))
            measured.stills.append(found.still_seconds)
            # The next move would find the bytes of this one there, and not send them.
            assert found.size_bytes >= mib * MIB
        if held is not None:
            assert held[:16].get().any()
    return measured


def copied(urls: list[str], mib: int, rounds: int) -> list[float]:
    """The times of copies of as many bytes between the same daemons."""
    with hg.connect(urls, progress=None) as session:
        first, second = (device.name for device in session.devices)
        source = _tensor(session, mib, first)
        target = session.empty(source.shape, "f32", device=second)
        source.copy_and_wait(target)
        pairs = [(source, target), (target, source)]
        return [seconds(lambda pair=pairs[n % 2]: pair[0].copy_and_wait(pair[1])) for n in range(rounds)]


def _tensor(session: hg.Session, mib: int, device: str | None = None) -> hg.Tensor:
    """A tensor whose pieces differ: equal ones would go once."""
    generator = np.random.default_rng(mib)
    tensor = session.empty(mib * MIB // 4, "f32", device=device)
    piece = 16 * MIB // 4
    for start in range(0, mib * MIB // 4, piece):
        tensor[start : start + piece].set(generator.standard_normal(piece, np.float32))
    session.synchronize()
    return tensor


def measured(urls: list[str], mib: int, rounds: int) -> bool:
    copies = copied(urls, mib, rounds) if mib else [0.0]
    found, median = moved(urls, mib, rounds), statistics.median
    copy, call = median(copies), median(found.calls)
    note = f"median of {rounds}; held still by the daemon {median(found.stills):.3f} s; longest gap "
    note += f"{max(found.gaps):.3f} s; the call {call:.3f} s"
    if mib:
        note += f", {call / copy:.2f} times a copy of the same bytes, {copy:.3f} s"
    name = f"stands still for a move, {mib} MiB" if mib else "stands still for a move, empty"
    return row(name, median(found.gaps), COPIES * copy + OWN_SECONDS, note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--mib", type=int, nargs="+", default=SIZES)
    given = parser.parse_args()
    logging.getLogger("heliograph").setLevel(logging.ERROR)
    print(f"load {', '.join(f'{one:.1f}' for one in os.getloadavg())} on {os.cpu_count()} processors")
    with running_daemon(*QUIET) as first, running_daemon(*QUIET) as second:
        found = [measured([first, second], mib, given.rounds) for mib in given.mib]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
