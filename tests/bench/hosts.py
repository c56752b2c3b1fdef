"""A job of a hundred steps on another host, 5 ms away each way: what a step costs beside a round trip.

Each step's output is the next one's input, as in decoding, so no step can begin before the last one's answer.
The client runs as a process on its host: this file is its program too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import Figure, shared

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from paths import SUPPORT
from virtual_hosts import Network, Wire, rights
from virtual_hosts.probes import ECHO, connected

DELAY_SECONDS = 0.005
STEPS = 100
ROUNDS = 5
WIDTH = 64
#: Round trips that a step may cost.
STEP_ROUND_TRIPS = 1.1
#: How many times faster the job must be in one call.
LOOP_FACTOR = 20
DAEMON_PORT, ECHO_PORT = 7070, 9000
SECONDS = 300
PROBES = str(SUPPORT / "virtual_hosts" / "probes.py")


def figures() -> Iterator[Figure]:
    """A step by `plan.run`, and where plans can loop by themselves, all of them in one call."""
    if reason := rights():
        print(f"  skipped: {reason}", file=sys.stderr)
        return
    found = measured()
    trip, step = median(found["round_trips"]), median(found["steps"])
    note = f"TCP echo {trip * 1e3:.2f} ms, step {step * 1e3:.2f} ms; at best {min(found['steps']) * 1e3:.2f}"
    yield Figure(
        "hosts/step", step * 1e3, trip * 1e3, STEP_ROUND_TRIPS, "ms", "a round trip of a byte over TCP", note
    )
    if found["loops"]:
        loop, stepwise = median(found["loops"]), median(found["jobs"])
        against = f"{STEPS} runs, one after the other"
        yield Figure("hosts/loop", loop, stepwise, 1 / LOOP_FACTOR, "s", against)


def measured() -> dict[str, list[float]]:
    """What the client found: seconds of round trips, steps, and whole jobs stepwise and in one call."""
    with Network(server=Wire(), client=Wire(delay_seconds=DELAY_SECONDS)) as network:
        server = network["server"]
        url = f"grpc://{server.address}:{DAEMON_PORT}"
        serve = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--log-level", "warning"]
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        daemon = server.popen([*serve, "--listen", url], **pipe)
        echo = server.popen([sys.executable, PROBES, "answer", str(ECHO_PORT)], **pipe)
        assert daemon.stdout.readline().startswith("listening on ") and echo.stdout.readline()
        done = network["client"].run([sys.executable, __file__, url, server.address], timeout=SECONDS)
        daemon.terminate()
        daemon.wait(SECONDS)
        found: dict[str, list[float]] = json.loads(done.stdout)
        return found


def job() -> hg.Graph:
    """One step: a small product and an activation, whose result the next step takes."""
    g = hg.Graph()
    w = g.weight("w", np.random.default_rng(3).standard_normal((WIDTH, WIDTH), np.float32) / WIDTH)
    g.output("next", hg.gelu(g.input("x", (1, WIDTH), "f32") @ w + 0.5))
    return g


def client(url: str, address: str) -> dict[str, list[float]]:
    """Round trips and jobs in turn, so that a drift of the machine meets all."""
    found: dict[str, list[float]] = {"round_trips": [], "steps": [], "jobs": [], "loops": []}
    start = np.ones((1, WIDTH), np.float32)
    with hg.connect(url, timeout=SECONDS) as session, connected(address, ECHO_PORT, ECHO) as echo:
        plan = session.compile(job())
        plan.run(x=start)
        for _ in range(shared(ROUNDS)):
            for _ in range(STEPS):
                begun = time.perf_counter()
                echo.sendall(b"x")
                echo.recv(1)
                found["round_trips"].append(time.perf_counter() - begun)
            begun_job, x = time.perf_counter(), start
            for _ in range(STEPS):
                begun = time.perf_counter()
                x = plan.run(x=x)["next"]
                found["steps"].append(time.perf_counter() - begun)
            found["jobs"].append(time.perf_counter() - begun_job)
            if hasattr(plan, "loop"):
                begun = time.perf_counter()
                plan.loop({"x": start}, steps=STEPS, carry={"next": "x"}).result()
                found["loops"].append(time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    print(json.dumps(client(*sys.argv[1:])))
