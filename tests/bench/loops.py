"""Costs of loops: a step above its op, in 256 steps of a plan of one tiny op in one message; and
new inputs that come while a loop runs, beside a loop that ends for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from figures import Figure, paired_medians, seconds_of

import heliograph as hg
from heliograph.testing import running_daemon
from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type

STEPS = 256
F16 = tensor_type("f32", (16,))
#: Microseconds a step above the op itself.
BAR_US = 5.0
RUNS, ROUNDS = 10, 10
#: Rows of a batch, their width, and the steps between two admissions.
ROWS, WIDTH, BETWEEN, ADMISSIONS = 8, 512, 16, 4


class Alone:
    """The op itself: the same plan's compute on a device of this process, between two places in turns."""

    def __init__(self) -> None:
        self.device = CpuDevice()
        graph = Graph((Leaf(LeafKind.INPUT, "x", F16),), (Node("neg", (0,), F16),), (Output("y", 1),))
        self.plan = self.device.compile(graph, LeafBindings({}, {}), DeviceCompileOptions())
        self.places = [[Tensor(F16, self.device.buffer_type.allocate(F16.nbytes))] for _ in range(2)]
        self.abort = Abort()

    def steps(self) -> None:
        compute, (one, other), abort = self.plan.compute, self.places, self.abort
        for _ in range(STEPS // 2):
            compute(one, other, abort)
            compute(other, one, abort)

    def close(self) -> None:
        self.plan.free()
        for (tensor,) in self.places:
            tensor.buffer.free()
        self.device.close()


def looping(session: hg.Session) -> Callable[[], object]:
    """A loop of so many steps, and what waits for its result."""
    g = hg.Graph()
    g.output("y", -g.input("x", (16,), "f32"))
    plan, x = session.compile(g), np.ones(16, np.float32)
    return lambda: plan.loop(x=x, steps=STEPS, carry={"y": "x"}).result()


def figures() -> Iterator[Figure]:
    """Microseconds a step above the op, in process and through the daemon, round trip included."""
    alone = Alone()
    try:
        with hg.connect("local:") as session:
            yield _figure("loops/local-step", session, alone)
        with running_daemon("--log-level", "warning") as url, hg.connect(url) as session:
            yield _figure("loops/daemon-step", session, alone)
            yield _admissions(session)
    finally:
        alone.close()


def _figure(name: str, session: hg.Session, alone: Alone) -> Figure:
    run = looping(session)
    looped, computed = paired_medians(
        lambda runs: seconds_of(run, runs), lambda runs: seconds_of(alone.steps, runs), ROUNDS, RUNS
    )
    above_us = (looped - computed) / STEPS * 1e6
    note = f"{looped * 1e3:.2f} ms for {STEPS} steps, the op {computed / STEPS * 1e6:.1f} us"
    against = f"{BAR_US:.0f} us above plan.compute"
    return Figure(name, max(above_us, 0.0), BAR_US, 1.0, "us/step", against, note)


def _admissions(session: hg.Session) -> Figure:
    """A row joins a batch every 16 steps: by a feed, or by ending the loop and starting another."""
    g = hg.Graph()
    x, seen = g.input("x", (ROWS, WIDTH), "f32"), g.input("seen", (ROWS,), "i32")
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    g.output("y", hg.softmax(x @ g.weight("w", weight), axis=-1))
    g.output("next", seen + 1)
    plan = session.compile(g, threads=1)
    given = {"x": np.ones((ROWS, WIDTH), np.float32), "seen": np.zeros(ROWS, np.int32)}
    carry = {"y": "x", "next": "seen"}
    row = {name: value[:1] for name, value in given.items()}

    def feeding() -> None:
        loop = plan.loop(
            given, steps=BETWEEN * ADMISSIONS, carry=carry, taps="next", feed=["x", "seen"], fetch=()
        )
        for tap in loop.taps():
            if tap.step % BETWEEN == BETWEEN - 1 and not loop.done():
                loop.feed(row, rows=[tap.step // BETWEEN % ROWS])
        loop.result()

    def ending() -> None:
        for _ in range(ADMISSIONS):
            loop = plan.loop(given, steps=BETWEEN, carry=carry, taps="next", fetch=())
            for _tap in loop.taps():
                pass
            loop.result()

    fed, ended = paired_medians(
        lambda runs: seconds_of(feeding, runs), lambda runs: seconds_of(ending, runs), ROUNDS, RUNS
    )
    note = f"{fed * 1e3:.2f} ms for {BETWEEN * ADMISSIONS} steps and {ADMISSIONS - 1} admissions"
    return Figure("loops/feed", fed * 1e3, ended * 1e3, 1.0, "ms", "loops that end for each", note)
