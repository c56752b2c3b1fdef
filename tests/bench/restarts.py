"""Durable sessions: the rate of snapshots, the time after kill -9 to the next result, and their cost.

    python tests/bench/restarts.py [--mib N] [--folder DIR]

The state lies in a folder, and then in the memory of another daemon on loopback. The disk's own rate
is that of one file of as many bytes, written in pieces of a MiB and flushed, in the same folder and
in turns; the wire's is that of a stream of gRPC with nothing of ours on it, from one process to
another, likewise. Both write to memory or a disk that they have used before; so the first snapshots, which
take new memory at either end, are told beside the rate and do not count. A row is `ok` if its figure is
within its bar.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from peer_process import client_and_server  # noqa: E402
from surviving_daemons import SurvivingDaemon  # noqa: E402

import heliograph as hg  # noqa: E402

MIB = 2**20
#: The least part of the own rate of disk or wire; seconds to a result beyond reading as many bytes, for each
#: GiB; and the most that a small run may cost, of a run that is not durable.
RATE, RECOVERY_SECONDS, COST = 0.5, 5.0, 1.05
ROUNDS = 5
#: The snapshots before these: two images are kept, beside the one that is written.
FIRST_ROUNDS = 3


def row(name: str, figure: float, bar: float, unit: str, is_ok: bool, note: str) -> bool:
    """Print a figure. Return whether it is within its bar."""
    print(f"{name:44} {figure:9.3f} {unit:5} bar {bar:g}  {'ok' if is_ok else 'short':6} {note}", flush=True)
    return is_ok


def disk_seconds(folder: Path, size_bytes: int) -> float:
    """The time for a file of so many bytes, on the disk."""
    data, path = os.urandom(MIB), folder / "probe"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // MIB):
            file.write(data)
        os.fsync(file.fileno())
    took = time.perf_counter() - start
    path.unlink()
    return took


def filling(mib: int) -> hg.Graph:
    """A graph that fills a variable with values that no two pieces share, and returns its first."""
    g = hg.Graph()
    state = g.variable("state", (mib * MIB // 4,), "f32")
    seed = g.input("seed", (), "i64")
    g.output("first", hg.assign(state, hg.random.uniform((mib * MIB // 4,), 1, seed))[:1])
    return g


def first_of(mib: int) -> hg.Graph:
    """A graph that reads the first value of that variable."""
    g = hg.Graph()
    g.output("first", g.variable("state", (mib * MIB // 4,), "f32")[:1] + g.input("x", (1,), "f32"))
    return g


def snapshots(place: Path | str, mib: int, own_seconds: Callable[[int], float], what: str) -> bool:
    """The rate of snapshots of variables that changed as a whole, beside that of their medium, and the
    time after a kill."""
    size_bytes, own, taken, still, first = mib * MIB, [], [], [], []
    with SurvivingDaemon(place, "--snapshot-seconds", "0") as daemon, daemon.connect() as session:
        plan, reading = session.compile(filling(mib)), session.compile(first_of(mib))
        for number in range(FIRST_ROUNDS + ROUNDS):
            plan.run(seed=np.int64(number), timeout=120)
            if number >= FIRST_ROUNDS:
                own.append(own_seconds(size_bytes))
            found = session.snapshot(timeout=120)
            assert found.written_bytes >= size_bytes
            (taken if number >= FIRST_ROUNDS else first).append(found.seconds)
            still.append(found.still_seconds)
        again = session.snapshot(timeout=120)
        expected = reading.run(x=np.zeros(1, np.float32))["first"]
        ratio = statistics.median(own) / statistics.median(taken)
        rates = [size_bytes / MIB / statistics.median(one) for one in (taken, own)]
        note = f"{rates[0]:.0f} of {rates[1]:.0f} MiB/s; runs wait {statistics.median(still):.2f} s; "
        note += f"the first ones: {', '.join(f'{mib / one:.0f}' for one in first)} MiB/s; "
        note += f"unchanged: {again.seconds * 1e3:.0f} ms, {again.written_bytes} bytes"
        ok = row(f"snapshots of {mib} MiB / {what}'s own rate", ratio, RATE, "", ratio >= RATE, note)
        daemon.kill()
        start = time.perf_counter()
        daemon.start()
        serving = time.perf_counter() - start
        assert reading.run(x=np.zeros(1, np.float32), timeout=120)["first"] == expected
        took, bar = time.perf_counter() - start, RECOVERY_SECONDS * max(1.0, mib / 1024)
        note = f"its process begins {serving:.2f} s after the start"
        name = f"kill -9 to a result, {mib} MiB from the {what}"
        return row(name, took, bar, "s", took <= bar, note) and ok


def elsewhere(mib: int) -> bool:
    """The same in the memory of another daemon, beside a plain stream."""
    keeping = "--kept-state-size", str(4 * mib * MIB)
    with SurvivingDaemon(None, *keeping) as keeper, client_and_server("peer_grpc.py", "aio") as plain:

        def wire_seconds(size_bytes: int) -> float:
            return plain.seconds("upload", size_bytes, 1, MIB)[0]

        return snapshots(f"{keeper.url}/bench", mib, wire_seconds, "wire")


def runs(session: hg.Session, count: int) -> Callable[[], float]:
    g = hg.Graph()
    x, total = g.input("x", (16,), "f32"), g.variable("total", (16,), "f32")
    g.output("y", hg.assign(total, total + x))
    plan, ones = session.compile(g), np.ones(16, np.float32)

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(count):
            plan.run(x=ones)
        return (time.perf_counter() - start) / count

    return measure


def cost(folder: Path) -> bool:
    """The time of a small run that assigns a variable: durable against not."""
    with (
        SurvivingDaemon(folder / "cost", "--snapshot-seconds", "30") as daemon,
        daemon.connect(shared_memory=False) as durable,
        hg.connect(daemon.url, shared_memory=False) as plain,
    ):
        works, times = [runs(durable, 200), runs(plain, 200)], [[], []]  # type: ignore[var-annotated]
        for number in range(24):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(works[which]())
    on, off = (statistics.median(sorted(one)[:12]) * 1e6 for one in times)
    return row(
        "a small run: durable / not", on / off, COST, "", on / off <= COST, f"{on:.0f} and {off:.0f} us"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of durable sessions.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--folder", type=Path)
    wanted = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=wanted.folder) as made:
        folder = Path(made)
        disk = partial(disk_seconds, folder)
        found = [cost(folder), snapshots(folder / "state", wanted.mib, disk, "disk"), elsewhere(wanted.mib)]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
