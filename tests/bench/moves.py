"""Moves of sessions: the time for which a client stands still, beside a plain copy of the same bytes.

    python tests/bench/moves.py [--rounds N] [--mib N ...]

Two daemons in processes of their own on loopback. A session with one tensor goes from one to the other and
back; the client measures from its call to the next result. Beside it the same bytes go between the same
daemons over the same wire, as a copy of a tensor from member to member that nothing else waits for. A row
is `ok` if the move takes at most its bar, as a multiple of the copy and a time of its own.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from surviving import doubling, four  # noqa: E402

import heliograph as hg  # noqa: E402
from heliograph.testing import running_daemon  # noqa: E402

MIB = 2**20
#: A move reads, hashes and writes what a copy only carries. What it takes besides: a moment.
COPIES, OWN_SECONDS = 3.0, 0.25
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


def stands_still(urls: list[str], mib: int, rounds: int) -> tuple[list[float], list[float]]:
    """The times from the call of a move to the next result, and those in which no command began."""
    times, stills = [], []
    with hg.connect(urls[0], progress=None) as session:
        plan = doubling(session)
        held = _tensor(session, mib) if mib else None
        plan.run(x=four(1))
        for number in range(rounds):
            there = urls[1 - number % 2]
            begun = time.perf_counter()
            found = session.move(there)
            assert (plan.run(x=four(1))["y"] == 2).all()
            times.append(time.perf_counter() - begun)
            stills.append(found.still_seconds)
            # The next move would find the bytes of this one there, and not send them.
            assert found.size_bytes >= mib * MIB
        if held is not None:
            assert held[:16].get().any()
    return times, stills


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
    times, stills = stands_still(urls, mib, rounds)
    copy, still = statistics.median(copies), statistics.median(stills)
    note = f"median of {rounds}; held still by the daemon {still:.3f} s; longest {max(times):.3f} s"
    if mib:
        note += f"; a copy of the same bytes {copy:.3f} s, {statistics.median(times) / copy:.2f} times that"
    name = f"stands still for a move, {mib} MiB" if mib else "stands still for a move, empty"
    return row(name, statistics.median(times), COPIES * copy + OWN_SECONDS, note)


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
