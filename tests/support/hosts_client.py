"""What a client on another host does: a program, so that it can run there. `python hosts_client.py WHAT URL`.

Each writes lines of JSON: what it has come to, and at last what it saw.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np

import heliograph as hg

X = np.arange(12, dtype=np.float32).reshape(3, 4)
W = np.full((4, 5), 0.5, np.float32)
#: A daemon's first start on a machine compiles its kernels.
START_SECONDS = 180
HELD_BYTES = 2**20
UPLOAD = np.random.default_rng(11).random(6 * 2**20 // 4, np.float32)


def tell(what: object) -> None:
    # With its end at once: unbuffered, print() writes that by itself, and lines of two threads run together.
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def small_graph() -> hg.Graph:
    """x times a weight, plus one, through gelu."""
    g = hg.Graph()
    g.output("y", hg.gelu(g.input("x", X.shape, "f32") @ g.weight("w", W) + 1.0))
    return g


def graph(url: str) -> None:
    """Tells the values of 30 runs, one by one and several under way."""
    with hg.connect(url) as session:
        plan = session.compile(small_graph())
        futures = [plan.submit(x=X * number) for number in range(15)]
        values = [future.result(timeout=60)["y"] for future in futures]
        values += [plan.run(x=X * number)["y"] for number in range(15)]
        tell([value.tolist() for value in values])


def waiting(url: str) -> None:
    """Waits without bound for a run, which another that pauses holds up; tells how the wait ended.

    Without a lease: a session that has one would wait for the way to come back.
    """
    with hg.connect(url, reconnect=False) as session:
        held = session.put(np.zeros(HELD_BYTES, np.uint8))
        plan = session.compile(small_graph())
        first = plan.submit(x=X, taps=["*"], pause=True)
        taps = first.taps()
        next(taps)
        second = plan.submit(x=X)
        tell(session.devices[0].memory().free_bytes)
        begun = time.monotonic()
        try:
            second.result()
        except hg.HeliographError as error:
            tell([type(error).__name__, str(error), time.monotonic() - begun])
        del taps, held


def asking(url: str) -> None:
    """Runs once more when a line comes; tells how that ended. Without a lease, as `waiting`."""
    with hg.connect(url, reconnect=False) as session:
        plan = session.compile(small_graph())
        plan.run(x=X)
        tell("ready")
        sys.stdin.readline()
        try:
            plan.run(x=X)
        except hg.HeliographError as error:
            tell([type(error).__name__, str(error)])


def memory(url: str) -> None:
    """Tells how much of the device is free whenever a line comes. The daemon may start meanwhile."""
    with hg.connect(url, timeout=START_SECONDS) as session:
        tell(session.devices[0].memory().free_bytes)
        for _ in sys.stdin:
            tell(session.devices[0].memory().free_bytes)


def large_graph() -> hg.Graph:
    """The sum of a weight of some MB, and x."""
    g = hg.Graph()
    total = hg.sum(g.weight("large", UPLOAD))
    g.output("y", g.input("x", (1,), "f32") + total)
    return g


def uploading(url: str) -> None:
    """Runs while a weight is uploaded; tells in which order they ended, and the values of both plans."""
    ended: list[str] = []
    large: list[float] = []
    under_way = threading.Event()

    def progress(done_bytes: int, total_bytes: int) -> None:
        if done_bytes and total_bytes == UPLOAD.nbytes:
            under_way.set()

    with hg.connect(url, progress=progress) as session:
        small = session.compile(small_graph())

        def upload() -> None:
            plan = session.compile(large_graph())
            ended.append("upload")
            large.extend(plan.run(x=np.zeros(1, np.float32))["y"].tolist())

        thread = threading.Thread(target=upload)
        thread.start()
        assert under_way.wait(30), "no upload began"
        value = small.run(x=X)["y"]
        ended.append("run")
        thread.join()
    tell([ended, large, value.tolist()])


if __name__ == "__main__":
    {"graph": graph, "waiting": waiting, "asking": asking, "memory": memory, "uploading": uploading}[
        sys.argv[1]
    ](sys.argv[2])
