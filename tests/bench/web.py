"""The cost of the dashboard for a daemon: processor time with and without viewers, and small runs' tail.

Processor time is that of the daemon's process, in turns with a viewer and without, so that what else it
does is in both; a figure is the difference. Viewers are sockets of a process of their own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from figures import Figure, seconds_of, shared
from planes_latency import VALUE, one_op

import heliograph as hg

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from dashboards import WebDaemon, events, first, load, web_daemon

#: In percent of a core: idle with one viewer, at a thousand runs a second, and without a viewer.
IDLE_BAR, BUSY_BAR, UNSEEN_BAR = 1.0, 5.0, 0.2
#: Many viewers: times the p99 of a small run without them, and in percent of a core.
CROWD, CROWD_BAR, CROWD_SHARE_BAR = 100, 1.1, 1.5
#: One look at the processor time, and the looks of each kind.
LOOK_SECONDS, LOOKS = 3.0, 6
#: How long the collection goes on when the last viewer has left, and a bit.
LINGER_SECONDS = 6.0
#: The time of a turn of small runs, in which a hundred viewers are told four times and more, and the pairs
#: of turns: with ratios of pairs that differ by a tenth, their median is known to a few percent.
TAIL_SECONDS, PAIRS = 5.0, 16
RUNS = 500

#: Reads so many streams of events until its stdin ends, and says how many bytes came.
VIEWERS = """
import selectors, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
found = selectors.DefaultSelector()
found.register(sys.stdin, selectors.EVENT_READ)
for _ in range(count):
    made = socket.create_connection((host, port))
    made.sendall(f"GET /api/events HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n".encode())
    found.register(made, selectors.EVENT_READ)
print("looking", flush=True)
read, over = 0, False
while not over:
    for key, _ in found.select():
        if key.fileobj is sys.stdin:
            over = True
        else:
            data = key.fileobj.recv(65536)
            read += len(data)
            if not data:
                found.unregister(key.fileobj)
print(read, flush=True)
"""


def figures() -> Iterator[Figure]:
    """Percent of a core, and the p99 of small runs."""
    yield from _processor()
    yield _tail()


def _processor() -> Iterator[Figure]:
    with web_daemon("--log-level", "warning") as daemon:
        seen, alone = _in_turns(daemon)
        yield _share("idle", seen - alone, IDLE_BAR, f"one viewer, {seen:.2f} % in all")
        seen, alone = _in_turns(daemon, CROWD)
        yield _share("crowd", seen - alone, CROWD_SHARE_BAR, f"{CROWD} viewers, {seen:.2f} % in all")
        with load(daemon.url, "paced=1000"):
            seen, alone = _in_turns(daemon)
            rate = _rate(daemon)
        yield _share("busy", seen - alone, BUSY_BAR, f"{rate:,.0f} runs/s, {seen:.1f} % in all")
        with plain_daemon() as other:
            own, others = _shares((daemon, other))
        yield _share("unseen", own - others, UNSEEN_BAR, "beside a daemon without a dashboard")


def _rate(daemon: WebDaemon) -> float:
    """The runs a second, as a page is told them."""
    with events(daemon) as found:
        rates = [first(found, "state")["run_rates"]["ended"] for _ in range(6)]
    return statistics.median(rates[1:])


def _share(name: str, percent: float, bar: float, note: str) -> Figure:
    # Noise may be below nothing.
    return Figure(f"web/{name}", max(percent, 0.001), bar, 1.0, "% of a core", "the bar", note)


@contextmanager
def plain_daemon() -> Iterator[int]:
    """The process of a daemon without a dashboard."""
    from forked_daemons import newest_daemon, running_daemon

    with running_daemon("--device", "cpu:threads=1,memory=256MiB", "--log-level", "warning"):
        yield newest_daemon().pid


@contextmanager
def looking(daemon: WebDaemon, count: int) -> Iterator[None]:
    """So many viewers."""
    host, _, port = daemon.web.partition("://")[2].rpartition(":")
    command = [sys.executable, "-c", VIEWERS, host, port, str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "looking"
        time.sleep(1.0)
        yield
    finally:
        process.stdin.write("over\n")
        process.stdin.close()
        read = int(process.stdout.readline() or 0)
        process.stdout.close()
        process.wait(20)
        assert read, "no viewer was told anything"


def _in_turns(daemon: WebDaemon, viewers: int = 1) -> tuple[float, float]:
    """The shares of a core with viewers, and without: medians."""
    seen, alone = [], []
    for _ in range(shared(LOOKS)):
        with looking(daemon, viewers):
            seen += _shares((daemon,))
        time.sleep(LINGER_SECONDS)
        alone += _shares((daemon,))
    return statistics.median(seen), statistics.median(alone)


def _shares(daemons: tuple[WebDaemon | int, ...]) -> list[float]:
    """The processor time that each takes, in percent of a core."""
    processes = [one if isinstance(one, int) else one.process.pid for one in daemons]
    before = list(map(_processor_seconds, processes))
    began = time.monotonic()
    time.sleep(LOOK_SECONDS)
    took = time.monotonic() - began
    return [
        100 * (_processor_seconds(one) - start) / took for one, start in zip(processes, before, strict=True)
    ]


def _processor_seconds(process: int) -> float:
    """The processor time of a process by its clock, which counts nanoseconds: ticks are 0.01 s.

    The clock's number is that of `clock_getcpuclockid`, which Python does not have.
    """
    return time.clock_gettime(~process << 3 | 2)


def _tail() -> Figure:
    """The p99 of a small run with a hundred viewers, times that without: the median of pairs of turns.

    Else than the dashboard, the machine moves a tail as well. So a turn has several looks of the
    dashboard in it, both turns of a pair are close to each other, and either comes first as often.
    """
    with (
        web_daemon("--log-level", "warning") as daemon,
        hg.connect(daemon.url, shared_memory=False, direct=False) as session,
    ):
        plan = session.compile(one_op())
        pairs = [_pair(daemon, plan, crowded_first=number % 2 == 0) for number in range(shared(PAIRS))]
    ratios = sorted(crowded / alone for crowded, alone in pairs)
    alone = statistics.median(alone for _, alone in pairs)
    quarter = len(ratios) // 4
    note = (
        f"p99; half of {len(ratios)} pairs between {ratios[quarter]:.2f} and {ratios[-1 - quarter]:.2f} times"
    )
    ours = alone * statistics.median(ratios)
    return Figure("web/hundred-viewers", ours, alone, CROWD_BAR, "us", "without viewers", note)


def _pair(daemon: WebDaemon, plan: hg.Plan, *, crowded_first: bool) -> tuple[float, float]:
    """The p99 of a small run in microseconds with viewers, and without."""
    alone = 0.0
    if not crowded_first:
        alone = _p99_us(plan)
    with looking(daemon, CROWD):
        crowded = _p99_us(plan)
    time.sleep(LINGER_SECONDS)
    return crowded, alone or _p99_us(plan)


def _p99_us(plan: hg.Plan) -> float:
    """The p99 of a small run over some seconds."""
    found, end = seconds_of(lambda: plan.run(x=VALUE), 1, warmup=200), time.monotonic() + TAIL_SECONDS
    while time.monotonic() < end:
        found += seconds_of(lambda: plan.run(x=VALUE), RUNS, warmup=0)
    return 1e6 * float(np.quantile(found, 0.99))
