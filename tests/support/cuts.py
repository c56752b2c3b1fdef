"""`make cuts`: real connections cut at random, thousands of times, over every transport.

    python tests/support/cuts.py [--cuts N] [--steps N] [--seed N]

Small runs count in a variable, and a loop streams every step, while connections are cut. Anything
that is lost, done twice, out of order or hangs ends the program with an error.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from cutting import CutProxy, RandomCuts, cut_proxy
from daemon_threads import thread_daemon
from surviving import ONE, TRANSPORTS, counting

import heliograph as hg

#: The longest time that one result may take.
HANG_SECONDS = 60.0


def count_through(proxy: CutProxy, cuts: int, seed: int) -> int:
    """Count by small runs until the connection was cut so often. Return the runs."""
    with hg.connect(proxy.url, progress=None) as session, RandomCuts(proxy, seed, 0.015):
        plan, number = session.compile(counting()), 0
        while proxy.cuts < cuts:
            futures = [plan.submit(step=ONE) for _ in range(20)]
            for future in futures:
                number += 1
                found = future.result(HANG_SECONDS)["after"].item()
                assert found == number, f"run {number} counted {found}"
    return number


def loop_through(proxy: CutProxy, steps: int, cuts: int, seed: int) -> None:
    """Stream every step of a loop that is cut about so often on its way."""
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "i64") + g.constant(np.ones(1, np.int64)))
    start = time.monotonic()
    with hg.connect(proxy.url, progress=None) as session, ExitStack() as cutting:
        # A machine that takes longer to connect than from cut to cut would never go on.
        pause = max(0.02, steps * 1e-5 / max(1, cuts), time.monotonic() - start)
        cutting.enter_context(RandomCuts(proxy, seed, pause))
        plan = session.compile(g)
        loop = plan.loop(x=np.zeros(1, np.int64), steps=steps, carry={"y": "x"}, taps="y")
        for step, tap in enumerate(loop.taps(HANG_SECONDS)):
            assert (tap.step, tap.value.item()) == (step, step + 1), f"step {step} gave {tap}"
        assert loop.result()["y"].item() == steps == step + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(30))
    arguments = parser.parse_args()
    logging.getLogger("heliograph").setLevel(logging.ERROR)
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    print(f"seed {arguments.seed}", flush=True)
    for name, options in TRANSPORTS.items():
        each: dict[str, Any] = options
        with thread_daemon(**each) as daemon, cut_proxy(daemon.url) as proxy:
            start, cuts = time.monotonic(), arguments.cuts // len(TRANSPORTS)
            runs = count_through(proxy, cuts, arguments.seed)
            took = time.monotonic() - start
            told = f"{name:12} {proxy.cuts:6,} cuts {runs:8,} runs, none lost or doubled"
            print(f"{told}; {took:.0f} s", flush=True)
            proxy.cuts = 0
            loop_through(proxy, arguments.steps // len(TRANSPORTS), 100, arguments.seed)
            print(f"{name:12} {proxy.cuts:6,} cuts of a loop, each step once and in order", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
