"""Pools that survive cuts and a restart of their head: the time to the next result, and the cost.

    python tests/bench/pool_survival.py [--rounds N] [--mib N]

Head and members are processes on loopback. Leases on and off run in turns, through two heads of one
member. A head is killed and started again, with what its member kept for it and without; the member
has room for both. A row is `ok` if its figure is within its bar.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from cutting import cut_proxy  # noqa: E402
from pool_daemons import daemons, head_of, wait_for_devices  # noqa: E402
from surviving import four  # noqa: E402
from surviving_daemons import SurvivingDaemon  # noqa: E402

import heliograph as hg  # noqa: E402

MIB = 2**20
#: The bars: milliseconds from a healed cut to the next result, and leases on against off; and the part
#: of the time of a restart that sends everything again.
HEALED_MS, COST, TAKEN_UP = 150.0, 1.02, 1.0
CUTS, RUNS, WIDTH = 40, 100, 1024
PLAIN = ("--no-shared-memory", "--direct-connections", "-1")
DEVICE = "m0/cpu0"


def row(name: str, figure: float, bar: float, unit: str, note: str = "") -> bool:
    """Print a figure. Return whether it is within its bar."""
    is_ok = figure <= bar
    print(f"{name:44} {figure:8.3f} {unit:6} bar {bar:g}  {'ok' if is_ok else 'short':6} {note}", flush=True)
    return is_ok


def connected(stack: ExitStack, url: str) -> hg.Session:
    """A session with a head whose member is there."""
    session = stack.enter_context(hg.connect(url, progress=None))
    wait_for_devices(session, "cpu0", DEVICE)
    return session


def healed() -> bool:
    """The time from a healed cut between a head and its member to the next result."""
    with ExitStack() as stack:
        (member,) = stack.enter_context(daemons(1, "--device", "cpu:threads=1", *PLAIN))
        way = stack.enter_context(cut_proxy(member.url))
        session = connected(stack, stack.enter_context(head_of(f"127.0.0.1:{way.port}")).url)
        plan, found = doubled_on_member(session), []
        for value in range(CUTS):
            way.stall()
            waiting = plan.submit(x=four(value))
            way.cut(reset=True)
            time.sleep(0.2)
            start = time.perf_counter()
            way.go_on()
            assert (waiting.result(30)["y"] == 2 * value).all()
            found.append((time.perf_counter() - start) * 1e3)
    note = f"{max(found):.0f} ms at most, of {CUTS}"
    return row("a healed cut to the next result", statistics.median(found), HEALED_MS, "ms", note)


def doubled_on_member(session: hg.Session) -> hg.Plan:
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") * 2.0)
    return session.compile(g, DEVICE)


def small_runs(session: hg.Session) -> Callable[[], Any]:
    plan, x = doubled_on_member(session), four(1)
    return lambda: [plan.run(x=x) for _ in range(RUNS)]


def large_tensor(session: hg.Session) -> Callable[[], Any]:
    data = np.zeros(64 * MIB // 4, np.float32)
    tensor = session.empty(data.shape, "f32", DEVICE)

    def there_and_back() -> None:
        tensor.set(data)
        tensor.get()

    return there_and_back


def cost(what: str, rounds: int, prepare: Callable[[hg.Session], Callable[[], Any]]) -> bool:
    """Leases of a head on against off, in turns."""
    with ExitStack() as stack:
        (member,) = stack.enter_context(daemons(1, "--device", "cpu:threads=1,memory=1GiB", *PLAIN))
        heads = [stack.enter_context(head_of(member, lease=lease)) for lease in (0.0, 10.0)]
        works = [prepare(connected(stack, head.url)) for head in heads]
        times: list[list[float]] = [[], []]
        for number in range(rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                start = time.perf_counter()
                works[place]()
                times[place].append(time.perf_counter() - start)
    # The shortest quarter: other processes of the machine lengthen the rest.
    off, on = (statistics.median(sorted(one)[: max(1, rounds // 4)]) for one in times)
    return row(f"{what}, leases on / off", on / off, COST, "", f"{off * 1e3:.1f} ms without")


def restarts(mib: int) -> bool:
    """The time from the start of a head that was killed to the next result, and what it sent."""
    x = np.ones((1, WIDTH), np.float32)
    with ExitStack() as stack:
        memory = f"cpu:threads=1,memory={4 * mib + 256}MiB"
        (member,) = stack.enter_context(daemons(1, "--device", memory))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = "--pool", f"static:m0={member.host}", "--log-level", "error"
        head = stack.enter_context(SurvivingDaemon(folder, "--device", memory, *pool))
        session = stack.enter_context(head.connect(progress=None))
        wait_for_devices(session, "cpu0", DEVICE)
        plan = session.compile(layers(mib * MIB // (4 * WIDTH * WIDTH)), DEVICE)
        expected = plan.run(x=x)["y"]
        session.snapshot()
        seconds = []
        for is_kept in (True, False):
            head.kill()
            if not is_kept:
                (folder / "links" / "members").unlink()
            start = time.perf_counter()
            head.start()
            assert np.array_equal(plan.run(x=x, timeout=120)["y"], expected)
            seconds.append(time.perf_counter() - start)
    note = f"{seconds[0]:.1f} s and {seconds[1]:.1f} s, with the start of the process"
    return row(f"restart of a head, {mib} MiB kept / sent", seconds[0] / seconds[1], TAKEN_UP, "", note)


def layers(count: int) -> hg.Graph:
    generator, g = np.random.default_rng(1), hg.Graph()
    value = g.input("x", (1, WIDTH), "f32")
    for number in range(count):
        weight = generator.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 32
        value = hg.tanh(value @ g.weight(f"w{number}", weight))
    g.output("y", value)
    return g


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--mib", type=int, default=256)
    given = parser.parse_args()
    rows = [
        healed(),
        cost("small runs on a member", given.rounds, small_runs),
        cost("64 MiB there and back", max(8, given.rounds // 2), large_tensor),
        restarts(given.mib),
    ]
    return 0 if all(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
