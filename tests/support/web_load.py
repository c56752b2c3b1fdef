"""Work for a dashboard to show: `python web_load.py URL TOKEN NAME ...`, until stdin ends.

small       runs of one small plan, one after the other
paced=N     N small runs a second
chain       runs of a plan whose splits alternate over all devices
waiting     runs of a larger plan by four sessions, which wait for each other
crowd=N     N sessions that do nothing
marked      a session and a plan with markup in their names
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import heliograph as hg

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"
X = np.ones(64, np.float32)


class Work:
    """The sessions of all, and whether the work goes on."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token or None
        self.is_over = threading.Event()

    def connect(self) -> hg.Session:
        return hg.connect(self.url, token=self.token)


def small(work: Work, a_second: float = 0.0) -> None:
    with work.connect() as session:
        g = hg.Graph()
        g.output("y", g.input("x", (64,), "f32") + 1.0)
        plan = session.compile(g)
        began, done = time.monotonic(), 0
        while not work.is_over.is_set():
            plan.run(x=X)
            done += 1
            if a_second and (ahead := began + done / a_second - time.monotonic()) > 0:
                work.is_over.wait(ahead)


def chain(work: Work) -> None:
    with work.connect() as session:
        names = [one.name for one in session.devices]
        g = hg.Graph()
        x = g.input("x", (512, 512), "f32")
        w = g.weight("w", np.eye(512, dtype=np.float32))
        for number in range(6):
            with g.scope(f"n{number}"):
                x = hg.tanh(x @ w)
        g.output("y", x)
        pins = {f"n{number}/*": names[number % len(names)] for number in range(6)}
        plan = session.compile(g, devices=names, pins=pins)
        given = session.put(np.ones((512, 512), np.float32))
        while not work.is_over.is_set():
            plan.run(x=given)


def waiting(work: Work) -> None:
    def one() -> None:
        with work.connect() as session:
            g = hg.Graph()
            x = g.input("x", (384, 384), "f32")
            for _ in range(6):
                x = hg.tanh(x @ x * 0.001)
            g.output("y", x)
            plan = session.compile(g, devices=session.devices[0].name)
            given = session.put(np.ones((384, 384), np.float32))
            runs = [plan.submit(x=given, fetch=False) for _ in range(3)]
            while not work.is_over.is_set():
                runs.append(plan.submit(x=given, fetch=False))
                runs.pop(0).result(60)

    others = [threading.Thread(target=one) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join()


def crowd(work: Work, count: float) -> None:
    sessions = [work.connect() for _ in range(int(count))]
    work.is_over.wait()
    for one in sessions:
        one.close()


def marked(work: Work) -> None:
    with work.connect() as session:
        g = hg.Graph()
        g.output(MARKUP, g.input(f"x{MARKUP}", (64,), "f32") + 1.0)
        plan = session.compile(g)
        plan.run(**{f"x{MARKUP}": X})
        work.is_over.wait()


WORK: dict[str, Callable[..., None]] = {
    "small": small, "paced": small, "chain": chain, "waiting": waiting, "crowd": crowd, "marked": marked,
}  # fmt: skip


def main(url: str, token: str, *names: str) -> None:
    work = Work(url, token)
    threads = []
    for one in names:
        name, _, number = one.partition("=")
        arguments = (float(number),) if number else ()
        threads.append(threading.Thread(target=WORK[name], args=(work, *arguments)))
    for thread in threads:
        thread.start()
    print("working", flush=True)
    sys.stdin.read()
    work.is_over.set()
    for thread in threads:
        thread.join(20)


if __name__ == "__main__":
    main(*sys.argv[1:])
