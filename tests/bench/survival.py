"""Sessions that survive a broken connection: the time from a healed cut to the next result, and the cost.

    python tests/bench/survival.py [--rounds N]

A daemon runs in this process, behind a proxy on loopback that is cut. Leases on and off run in turns,
in processor time of client and daemon together. A row is `ok` if its figure is within its bar.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from cutting import CutProxy, cut_proxy  # noqa: E402
from daemon_threads import ThreadDaemon, thread_daemon  # noqa: E402
from surviving import TRANSPORTS, doubling, four  # noqa: E402

import heliograph as hg  # noqa: E402

MIB = 2**20
#: The bars: milliseconds from a healed cut to the next result, and leases on against off.
HEALED_MS, COST = 150.0, 1.02
CUTS, RUNS, SESSIONS = 40, 400, 100


def row(name: str, figure: float, bar: float, unit: str, note: str = "") -> bool:
    """Print a figure. Return whether it is within its bar."""
    is_ok = figure <= bar
    verdict = "ok" if is_ok else "short"
    print(f"{name:44} {figure:8.3f} {unit:6} bar {bar:g}  {verdict:6} {note}")
    return is_ok


def healed(transport: str) -> bool:
    """The time from a healed cut to the next result."""
    with site(transport) as (_, proxy), hg.connect(proxy.url, progress=None) as session:
        plan = doubling(session)
        direct, cut = [], []
        for value in range(CUTS):
            start = time.perf_counter()
            plan.run(x=four(value))
            direct.append(time.perf_counter() - start)
            proxy.refuse()
            proxy.cut()
            time.sleep(0.01)
            waiting = plan.submit(x=four(value))
            proxy.go_on()
            start = time.perf_counter()
            assert (waiting.result(30)["y"] == 2 * value).all()
            cut.append(time.perf_counter() - start)
    own = statistics.median(direct)
    note = f"median of {CUTS}; longest {max(cut) * 1e3:.0f} ms; a run without a cut {own * 1e3:.2f} ms"
    figure = (statistics.median(cut) - own) * 1e3
    return row(f"healed cut to the next result, {transport}", figure, HEALED_MS, "ms", note)


def cost(transport: str, what: str, rounds: int, prepare: Callable[[hg.Session], Callable[[], Any]]) -> bool:
    """Processor time with leases on against off, in turns."""
    with (
        thread_daemon(**TRANSPORTS[transport]) as daemon,
        hg.connect(daemon.url, progress=None) as kept,
        hg.connect(daemon.url, progress=None, reconnect=False) as plain,
    ):
        assert kept.info.lease_ms and not plain.info.lease_ms
        works = [prepare(kept), prepare(plain)]
        taken: list[list[float]] = [[], []]
        for number in range(2 * rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                start = time.process_time()
                works[which]()
                taken[which].append(time.process_time() - start)
    # The shortest quarter: other processes of the machine lengthen the rest.
    on, off = (statistics.median(sorted(one)[: max(3, rounds // 2)]) for one in taken)
    note = f"{on * 1e3:.2f} and {off * 1e3:.2f} ms of processors, {2 * rounds} rounds each"
    return row(f"{what}, {transport}: leases on / off", on / off, COST, "", note)


def small_runs(session: hg.Session) -> Callable[[], Any]:
    plan, x = doubling(session), four(1)

    def run() -> None:
        for _ in range(RUNS):
            plan.run(x=x)

    return run


def large_tensor(session: hg.Session) -> Callable[[], Any]:
    data = np.ones(16 * MIB, np.float32)
    tensor = session.empty(data.shape, "f32")

    def move() -> None:
        tensor.set(data)
        session.synchronize()
        tensor.get()

    return move


def memory() -> None:
    """The memory that a detached session costs its daemon, beyond what an open one has."""
    with thread_daemon() as daemon, cut_proxy(daemon.url) as proxy:
        sessions = [hg.connect(proxy.url, progress=None) for _ in range(SESSIONS // 2)]
        for one in sessions:
            doubling(one).run(x=four(1))
        before = resident()
        proxy.refuse()
        proxy.cut()
        end = time.monotonic() + 30
        while sum(one.is_detached for one in daemon.host.sessions) < len(sessions):
            assert time.monotonic() < end
            time.sleep(0.05)
        after = resident()
        for one in sessions:
            one.close()
    each = (after - before) / len(sessions) / 1024
    print(
        f"{'a session that is detached':44} {each:8.1f} KiB more than an open one, client and daemon together"
    )


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@contextmanager
def site(transport: str) -> Iterator[tuple[ThreadDaemon, CutProxy]]:
    with thread_daemon(**TRANSPORTS[transport]) as daemon, cut_proxy(daemon.url) as proxy:
        yield daemon, proxy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    logging.getLogger("heliograph").setLevel(logging.ERROR)
    found = [healed(one) for one in ("grpc", "unix socket")]
    for one in TRANSPORTS:
        found.append(cost(one, f"{RUNS} small runs", rounds, small_runs))
    for one in TRANSPORTS:
        found.append(cost(one, "64 MiB there and back", rounds, large_tensor))
    memory()
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
