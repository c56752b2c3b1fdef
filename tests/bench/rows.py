"""Sorts, searches, running sums, images and narrow rows on one thread, beside NumPy: CPU time, in
turns.

The peer is NumPy's own function where it has one: for the largest of a row, `argpartition` and a
sort of what it found. Otherwise it is the definition of the op.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import Figure, shared

from heliograph_backends.contract import Abort
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.types import DTYPES

sys.path.append(str(Path(__file__).parents[1] / "support"))

from backend_graphs import Array, Maker, loaded, place

ROUNDS, RUNS = 9, 5
MEMORY = 2**29
#: The words of a language model.
VOCABULARY = 152_064


class Row(NamedTuple):
    """An op on some operands, its peer, and the most of the peer's time that it may take."""

    op: str
    operands: tuple[Array, ...]
    attributes: dict[str, Any]
    bar: float
    peer: Callable[[Array], object] | None = None


def _largest(kept: int) -> Callable[[Array], object]:
    def find(x: Array) -> Array:
        some = np.argpartition(x, -kept)[:, -kept:]
        order = np.argsort(np.take_along_axis(x, some, -1))[:, ::-1]
        return np.take_along_axis(some, order, -1)

    return find


def _rows() -> dict[str, Row]:
    random = np.random.default_rng(3)

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, np.float32)

    def half(*shape: int) -> Array:
        return normal(*shape).astype(np.float16)

    logits, words, image = normal(1, VOCABULARY), normal(32, 32_000), normal(1, 64, 56, 56)
    steps = {"stride": (1, 1), "padding": (1, 1)}
    return {
        "argmax-32-rows": Row("argmax", (words,), {}, 2.0, lambda x: x.argmax(-1)),
        "top-k-1": Row("top_k", (logits,), {"k": 1}, 0.5, _largest(1)),
        "top-k-40": Row("top_k", (logits,), {"k": 40}, 0.5, _largest(40)),
        "top-k-256": Row("top_k", (logits,), {"k": 256}, 0.75, _largest(256)),
        "top-k-32-rows": Row("top_k", (words,), {"k": 40}, 0.75, _largest(40)),
        "argsort-152k": Row("argsort", (logits,), {}, 0.5, lambda x: x.argsort(kind="stable")),
        "argsort-100": Row("argsort", (normal(1000, 100),), {}, 1.0, lambda x: x.argsort(kind="stable")),
        "cumsum-512": Row("cumsum", (normal(512, 512),), {}, 0.5, lambda x: x.cumsum(-1)),
        "roll-512": Row("roll", (normal(512, 512),), {"shifts": (3, 5)}, 1.0),
        "soft-max-f16": Row("soft_max", (half(64, 1024),), {}, 0.2),
        "rms-norm-f16": Row("rms_norm", (half(64, 4096),), {}, 0.2),
        "upscale-linear": Row("upscale", (image,), {"shape": (1, 64, 112, 112), "mode": 1}, 0.25),
        "upscale-cubic": Row("upscale", (image,), {"shape": (1, 64, 112, 112), "mode": 2}, 0.25),
        "im2col": Row("im2col", (normal(8, 64, 3, 3), image), {"dtype": DTYPES["f32"], **steps}, 0.8),
        "pool-gradient": Row(
            "pool_2d_back", (normal(1, 64, 28, 28), image), {"kernel": (2, 2), "stride": (2, 2)}, 0.25
        ),
        "convolution-f16": Row("conv_2d", (half(64, 64, 3, 3), half(1, 64, 56, 56)), steps, 0.25),
    }


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    for _ in range(RUNS):
        call()
    return (time.thread_time() - start) / RUNS


def _figure(name: str, row: Row, devices: list[CpuDevice]) -> Figure:
    made = Maker()
    made.output(made.node(row.op, *map(made.input, row.operands), **row.attributes))
    found: list[list[float]] = [[], []]
    with ExitStack() as stack:
        calls: list[Callable[[], object]] = []
        for device in devices:
            it = stack.enter_context(loaded(device, made))
            type = it.graph.type_of(it.graph.outputs[0].value)
            output = place(device, np.zeros(type.storage_shape, type.dtype.storage), type)
            stack.callback(output.buffer.free)
            calls.append(lambda it=it, output=output: it.plan.compute(it.inputs, [output], Abort()))  # type: ignore[misc]
        if row.peer is not None:
            peer, x = row.peer, row.operands[0]
            calls[1] = lambda: peer(x)
        for number in range(shared(ROUNDS) + 1):
            for place_of, call in enumerate(calls):
                seconds = _seconds(call)
                if number:
                    found[place_of].append(seconds)
    ours, theirs = (statistics.median(each) * 1e6 for each in found)
    against = "the definition" if row.peer is None else "NumPy"
    return Figure(f"rows/{name}", ours, theirs, row.bar, "us CPU", against)


def figures() -> Iterator[Figure]:
    """Microseconds a run."""
    devices = [CpuDevice(threads=1, memory_bytes=MEMORY, native=native) for native in (True, False)]
    try:
        for name, row in _rows().items():
            yield _figure(name, row, devices)
    finally:
        for device in devices:
            device.close()


if __name__ == "__main__":
    for each in figures():
        print(
            f"{each.name:28} {each.ours:10.1f} {each.peer:10.1f} {each.ratio:6.2f} of {each.bar}", flush=True
        )
