"""A client that is interrupted at random moments, and counts the interrupts that reach its code.

Run as a program: URL, seed, number of interrupts. Prints those that did not surface, or "all".
"""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
import sys
import threading
import time

import numpy as np

import heliograph as hg

SECONDS = 5.0
X = np.arange(64, dtype=np.float32)


def graph() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", X.shape, "f32") + 1)
    return g


def work(session: hg.Session, url: str, plan: hg.Plan, chance: random.Random) -> None:
    """One of the things that clients do, some of which leave objects to the collector."""
    match chance.randrange(6):
        case 0 | 1:
            assert np.array_equal(plan.run(x=X, timeout=SECONDS)["y"], X + 1)
        case 2:
            tensor = session.put(X)
            assert np.array_equal(plan.run(x=tensor, fetch=False)["y"].get(), X + 1)
        case 3:
            runs = [plan.submit(x=X) for _ in range(3)]
            runs[-1].result(SECONDS)
        case 4:
            session.compile(graph()).run(x=X)
            gc.collect()
        case 5 if chance.random() < 0.2:
            with hg.connect(url) as other:
                other.put(X).get()


def main(url: str, seed: int, count: int) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(50, exit=True)
    chance, timing = random.Random(seed), random.Random(seed + 1)
    begun, surfaced, is_over = threading.Event(), threading.Event(), threading.Event()
    lost: list[int] = []
    me = threading.get_ident()

    def interrupt() -> None:
        begun.wait(SECONDS)
        for number in range(count):
            time.sleep(timing.random() * 0.004)
            signal.pthread_kill(me, signal.SIGINT)
            if not surfaced.wait(SECONDS):
                lost.append(number)
            surfaced.clear()
        is_over.set()

    with hg.connect(url) as session:
        plan = session.compile(graph())
        plan.run(x=X)
        thread = threading.Thread(target=interrupt)
        thread.start()
        while not is_over.is_set():
            try:
                begun.set()
                while not is_over.is_set():
                    work(session, url, plan, chance)
            except KeyboardInterrupt:
                surfaced.set()
        thread.join()
        assert np.array_equal(plan.run(x=X, timeout=SECONDS)["y"], X + 1)
    print(lost or "all")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
