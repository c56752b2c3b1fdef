"""Two hundred kills: members of a pool end at random moments while plans run on it.

Every run ends with the right value or with an error that names who was lost, within its bound; nothing is
left behind. How long it takes to notice is printed as a distribution.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from figures import Figure
from pool_runs import SECONDS, alternating

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from member_factory import FactoryMember, MemberFactory

MEMBERS = 3
KILLS = 200
SPLITS = 6
#: All members are there for so long at most, before one is killed.
MOST_SECONDS = 0.6
#: Of noticing that a process is gone, which the kernel tells.
NOTICED_SECONDS = 0.125
RUN_SECONDS = 10.0
#: How much more memory the head's process may have at the end than after a tenth of the kills.
LEAKED_BYTES = 64 * 2**20


@dataclass
class Toll:
    """What happened."""

    noticed: list[float] = field(default_factory=list)
    runs: int = 0
    lost: int = 0
    wrong: int = 0
    hung: int = 0
    others: list[str] = field(default_factory=list)


def figures() -> Iterator[Figure]:
    seed = random.randrange(2**32)
    print(f"  seed {seed}", file=sys.stderr)
    toll, grown = _kill_them(random.Random(seed))
    noticed = sorted(toll.noticed)
    print(histogram(noticed), file=sys.stderr)
    at = {p: noticed[min(len(noticed) - 1, int(len(noticed) * p / 100))] for p in (50, 95, 100)}
    bad = toll.wrong + toll.hung + len(toll.others)
    note = (
        f"seed {seed}; median {at[50] * 1e3:.0f} ms, 95 % {at[95] * 1e3:.0f} ms; "
        f"{toll.runs} runs, {toll.lost} told of a loss; wrong {toll.wrong}, hung {toll.hung}, "
        f"other errors {len(toll.others)} {toll.others[:1]}; memory {grown / 2**20:+.0f} MiB"
    )
    against = f"{NOTICED_SECONDS * 1e3:.0f} ms to notice each of {KILLS}"
    yield Figure("pool-kills/noticed", at[100] * 1e3, NOTICED_SECONDS * 1e3, 1.0, "ms", against, note)
    against = "no hang, no wrong value, no other error, no leak"
    yield Figure("pool-kills/bad", bad + (grown > LEAKED_BYTES) + 1, 1, 1.0, "one more than", against)


def histogram(seconds: list[float]) -> str:
    """How many were noticed within so many milliseconds, as bars."""
    edges = (5, 10, 20, 40, 80, 125, 250, 1000)
    lines, low = [], 0.0
    for edge in edges:
        count = sum(low <= one * 1e3 < edge for one in seconds)
        lines.append(f"  {low:6.0f} to {edge:4} ms {count:4} {'#' * count}")
        low = edge
    return "\n".join([*lines, f"  more than {edges[-1]} ms {sum(one * 1e3 >= low for one in seconds):4}"])


def _kill_them(chance: random.Random) -> tuple[Toll, int]:
    toll, process, start_bytes = Toll(), psutil.Process(), 0
    with MemberFactory() as factory:
        members = [factory.start("--device", "fake") for _ in range(MEMBERS)]
        with hg.connect([one.url for one in members], timeout=SECONDS) as session:
            stop = threading.Event()
            load = threading.Thread(target=_load, args=(session, toll, stop, MEMBERS))
            load.start()
            try:
                for number in range(KILLS):
                    time.sleep(chance.uniform(0.0, MOST_SECONDS))
                    place = chance.randrange(MEMBERS)
                    toll.noticed.append(_kill(session, members[place]))
                    again = factory.start("--device", "fake", port=members[place].port)
                    members[place] = again
                    _until_back(session, again)
                    if number == KILLS // 10:
                        start_bytes = process.memory_info().rss
            finally:
                stop.set()
                load.join(SECONDS)
            toll.hung += load.is_alive()
            return toll, process.memory_info().rss - start_bytes


def _kill(session: hg.Session, member: FactoryMember) -> float:
    """Seconds until the session's devices say that it is lost."""
    begun = time.perf_counter()
    member.kill()
    while any(_is_of(device, member) for device in present(session)):
        if time.perf_counter() - begun > SECONDS:
            return float(SECONDS)
        time.sleep(0.0005)
    return time.perf_counter() - begun


def _until_back(session: hg.Session, member: FactoryMember) -> None:
    deadline = time.monotonic() + SECONDS
    while not any(_is_of(device, member) for device in present(session)):
        assert time.monotonic() < deadline, f"{member} did not come back"
        time.sleep(0.002)


def _is_of(device: hg.Device, member: FactoryMember) -> bool:
    return str(member.port) in device.name


def present(session: hg.Session) -> list[hg.Device]:
    """The devices that are not lost."""
    return [one for one in session.devices if not one.lost]


def _load(session: hg.Session, toll: Toll, stop: threading.Event, members: int) -> None:
    """Compiles over all members that are there and runs, until it is told to stop."""
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    wanted = x
    for _ in range(SPLITS):
        wanted = np.tanh(wanted)
    while not stop.is_set():
        names = [one.name for one in present(session)]
        if len(names) < members:
            stop.wait(0.005)
            continue
        try:
            graph, pins = alternating(names, SPLITS)
            plan = session.compile(graph, devices=names, pins=pins)
            while not stop.is_set():
                got = plan.submit(x=x).result(timeout=RUN_SECONDS)["y"]
                toll.runs += 1
                toll.wrong += not np.allclose(got, wanted, rtol=1e-5)
        except hg.MemberLostError:
            toll.lost += 1
        except hg.DeadlineExceededError:
            toll.hung += 1
        except hg.HeliographError as error:
            toll.others.append(f"{type(error).__name__}: {error.message}")
