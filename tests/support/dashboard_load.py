"""A client that does what the dashboard shows, until it is terminated: runs, uploads, failures.

Run as a program, with the URL of a daemon.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from itertools import count

import numpy as np

import heliograph as hg

X = np.ones((64, 64), np.float32)


def main(url: str) -> None:
    with hg.connect(url, shared_memory=False) as session:
        for number in count(1):
            work(session, number)
            time.sleep(0.05)


def work(session: hg.Session, number: int) -> None:
    """A plan over all devices with a new weight, its runs, a transfer, and what is refused."""
    g = hg.Graph()
    y = g.input("x", X.shape, "f32")
    for place, device in enumerate(session.devices):
        with g.scope(device.name):
            y = y @ g.weight("w", np.full(X.shape, 1 / number + place, np.float32))
    g.output("y", y)
    names = [one.name for one in session.devices]
    plan = session.compile(g, names, pins={f"{name}/*": name for name in names})
    for _ in range(20):
        plan.run(x=X)
    session.put(np.ones(2**18, np.float32)).get()
    with suppress(hg.OutOfMemoryError):
        session.empty(2**34, "f32").get(size_bytes=4)
    with suppress(hg.HeliographError):
        session.server_weights("missing.safetensors")
    plan.free()


if __name__ == "__main__":
    main(sys.argv[1])
