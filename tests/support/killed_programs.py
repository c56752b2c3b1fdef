"""Random programs of a durable session, whose daemon is killed while they run.

    python -m killed_programs --kills 60 --seed 1

runs one after the other until the daemon was killed so often, and compares everything that each program
sees with what it sees on a calm daemon. It ends with status 1 after a difference.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from surviving_daemons import SurvivingDaemon

import heliograph as hg

SIZE = 64
STEPS = 30


def summing() -> hg.Graph:
    """total += x * scale, and total is returned."""
    g = hg.Graph()
    x, total = g.input("x", (SIZE,), "f32"), g.variable("total", (SIZE,), "f32")
    scale = g.weight("scale", np.linspace(0.5, 2, SIZE, dtype=np.float32))
    g.output("y", hg.assign(total, total + x * scale))
    return g


def doubling() -> hg.Graph:
    """x + x, without any state."""
    g = hg.Graph()
    x = g.input("x", (SIZE,), "f32")
    g.output("y", x + x)
    return g


class Killer:
    """Kills and restarts a daemon at random moments of a program, some in the middle of calls."""

    def __init__(self, daemon: SurvivingDaemon, seed: int, chance: float) -> None:
        self._daemon, self._random, self._chance = daemon, random.Random(f"kill {seed}"), chance
        self.kills = 0
        self._thread: threading.Thread | None = None

    def __call__(self) -> None:
        """Perhaps kill it now, or in a moment."""
        if self._random.random() >= self._chance:
            return
        self.end()
        self.kills += 1
        delay = self._random.choice([0.0, 0.002, 0.01, 0.03])
        self._thread = threading.Thread(target=self._kill, args=(delay,))
        self._thread.start()

    def _kill(self, delay: float) -> None:
        threading.Event().wait(delay)
        self._daemon.restart()

    def end(self) -> None:
        """Wait until the daemon is there again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def program(session: hg.Session, seed: int, disturb: Any = lambda: None) -> list[Any]:
    """Run a random program; everything that its user sees."""
    chance = random.Random(seed)
    plans = [session.compile(summing()), session.compile(doubling())]
    tensors: list[hg.Tensor] = []
    seen: list[Any] = []
    futures: list[hg.RunFuture] = []
    for _ in range(STEPS):
        disturb()
        x = np.float32([chance.randrange(100) for _ in range(SIZE)])
        match chance.randrange(10):
            case 0:
                seen.append(plans[0].run(x=x)["y"].tobytes())
            case 1:
                seen.append(plans[1].run(x=x)["y"].tobytes())
            case 2:
                futures.append(plans[0].submit(x=x))
            case 3:
                tensors.append(session.put(x))
            case 4:
                tensors.append(session.put(np.tile(x, 20_000)))  # 5 MB
            case 5 if tensors:
                seen.append(chance.choice(tensors).get().tobytes())
            case 6:
                loop = plans[0].loop(x=x, steps=40, taps=["y"])
                seen.append([one.value.tobytes() for one in loop.taps()] + [loop.result()["y"].tobytes()])
            case 7:
                plans[0] = session.compile(summing())
            case 9:
                session.snapshot()
            case 8 if tensors:
                del tensors[chance.randrange(len(tensors))]
    seen += [one.result()["y"].tobytes() for one in futures]
    seen += [one.get().tobytes() for one in tensors]
    seen.append(plans[0].run(x=np.zeros(SIZE, np.float32))["y"].tobytes())
    return seen


def compared(folder: Path, seed: int, seconds: str, place: str = "") -> int:
    """Run a program calmly and killed. Return the number of kills; raises AssertionError.

    `place`: of the state of the daemon that is killed, if that is no folder."""
    with SurvivingDaemon(folder / "calm") as daemon, daemon.connect() as session:
        expected = program(session, seed)
    with SurvivingDaemon(place or folder / "killed", "--snapshot-seconds", seconds) as daemon:
        killer = Killer(daemon, seed, 0.2)
        with daemon.connect() as session:
            found = program(session, seed, killer)
            killer.end()
    assert found == expected, f"seed {seed} saw something else when its daemon was killed"
    return killer.kills


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the daemon of random programs.")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    logging.disable(logging.WARNING)
    kills, seed = 0, wanted.seed
    while kills < wanted.kills:
        with tempfile.TemporaryDirectory() as made:
            kills += compared(Path(made), seed, ["0.05", "0.3", "30", "0"][seed % 4])
        print(f"seed {seed}: the same bits; {kills} kills so far", flush=True)
        seed += 1
    print(f"{seed - wanted.seed} programs and {kills} kills: nothing lost, nothing done twice")
    return 0


if __name__ == "__main__":
    sys.exit(main())
