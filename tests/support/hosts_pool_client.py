"""What a client of a pool's head does, on the head's host: `python hosts_pool_client.py URL DEVICE...`.

It waits for a run on each of these devices, and tells as lines of JSON how each wait ended, and what happened
to the devices, with the time of the system's monotonic clock.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
from hosts_client import START_SECONDS, tell

import heliograph as hg

SIZE = 1024


def long_graph(products: int = 4000) -> hg.Graph:
    """A minute of work, and more."""
    g = hg.Graph()
    x = y = g.input("x", (SIZE, SIZE), "f32")
    for _ in range(products):
        y = y @ x
    g.output("y", y[:1, :1])
    return g


def wait(session: hg.Session, device: str) -> None:
    # Each in an order of its own, so that none waits for another's.
    plan, stream = session.compile(long_graph(), device), session.stream(device)
    run = plan.submit(x=np.zeros((SIZE, SIZE), np.float32), stream=stream)
    tell(["waiting", device, "", 0.0])
    try:
        run.result()
    except hg.HeliographError as error:
        tell([type(error).__name__, device, str(error), time.monotonic()])


def small(session: hg.Session) -> list[float]:
    """What a graph gives on the head's own device."""
    g = hg.Graph()
    g.output("y", g.input("x", (3,), "f32") + 1.0)
    found: list[float] = session.compile(g, "cpu0").run(x=np.arange(3, dtype=np.float32))["y"].tolist()
    return found


def main(url: str, *devices: str) -> None:
    with hg.connect(url, timeout=START_SECONDS) as session, session.watch() as watch:
        while not set(devices) <= {one.name for one in session.devices}:
            watch.next(timeout=START_SECONDS)
        waits = [threading.Thread(target=wait, args=(session, one)) for one in devices]
        for one in waits:
            one.start()
        for kind in ("lost", "appeared"):
            for _ in devices:
                event = watch.next(timeout=START_SECONDS)
                assert event is not None and bool(event.lost) is (kind == "lost"), event
                tell([kind, event.device, event.lost, time.monotonic()])
            if kind == "lost":
                for one in waits:
                    one.join(START_SECONDS)
                tell(["goes on", "cpu0", str(small(session)), time.monotonic()])


if __name__ == "__main__":
    main(*sys.argv[1:])
