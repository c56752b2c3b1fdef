"""Kernels whose limit is the memory: one-op plans on the CPU device against copies of the same size.

All arrays are warm. A copy moves its bytes twice, and so does an op of one operand; an addition moves
them three times. The limit is the best of three copies, each measured in turn with every op: NumPy's on
one thread, NumPy's split over as many threads as the device has, and the device's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from figures import Figure, seconds_of, shared

import heliograph as hg
from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.types import F32, TensorType

SIDE = 4096
ROUNDS, RUNS = 12, 3
#: The most that an op may take of a copy's time.
BAR = 1.2
#: Ops by name, with how many operands of the same size they read.
OPS = {"add": 2, "silu": 1, "gelu_erf": 1, "soft_max": 1, "rms_norm": 1}
TYPE = TensorType(F32, (SIDE, SIDE))

Call = Callable[[], object]


class Arrays:
    """Two operands and a result in the device's memory, and plans on them."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.x, self.y, self.z = (Tensor(TYPE, device.buffer_type.allocate(TYPE.nbytes)) for _ in range(3))
        rng = np.random.default_rng(7)
        for each in (self.x, self.y, self.z):
            rng.standard_normal(out=each.array, dtype=np.float32)

    def plan(self, op: str, operands: int) -> Call:
        """A run of one op."""
        graph = hg.Graph()
        names = ("x", "y")[:operands]
        found = [graph.input(name, (SIDE, SIDE), "f32") for name in names]
        graph.output("z", getattr(hg.ops, op)(*found))
        plan = self.device.compile(graph._freeze(), LeafBindings({}, {}), DeviceCompileOptions())
        inputs, abort = [self.x, self.y][:operands], Abort()
        return lambda: plan.compute(inputs, [self.z], abort)

    def copies(self, threads: ThreadPoolExecutor) -> dict[str, Call]:
        """The limits."""
        target, source = self.z.array, self.x.array
        count = self.device.threads
        pairs = list(zip(np.array_split(target, count), np.array_split(source, count), strict=True))

        def split() -> None:
            parts = [threads.submit(np.copyto, *pair) for pair in pairs[1:]]
            np.copyto(*pairs[0])
            for part in parts:
                part.result()

        return {
            "np.copyto, 1 thread": lambda: np.copyto(target, source),
            f"np.copyto split over {count} threads": split,
            f"the device's copy, {count} threads": self.plan("cont", 1),
        }


def figures() -> Iterator[Figure]:
    """Milliseconds for each GB that is read or written."""
    device = CpuDevice("bandwidth")
    try:
        with ThreadPoolExecutor(device.threads) as threads:
            arrays = Arrays(device)
            copies = arrays.copies(threads)
            for op, operands in OPS.items():
                yield _figure(op, operands, arrays.plan(op, operands), copies)
    finally:
        device.close()


def _figure(op: str, operands: int, run: Call, copies: dict[str, Call]) -> Figure:
    seconds: dict[str, list[float]] = {name: [] for name in ("", *copies)}
    for _ in range(shared(ROUNDS)):
        for name, call in {"": run, **copies}.items():
            seconds[name] += seconds_of(call, RUNS, warmup=1)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ours = medians.pop("") / (TYPE.nbytes * (operands + 1)) * 1e12
    limit = min(medians, key=lambda name: medians[name])
    peer = medians[limit] / (TYPE.nbytes * 2) * 1e12
    found = ", ".join(f"{TYPE.nbytes * 2 / value / 1e9:.1f}" for value in medians.values())
    note = f"{1e3 / ours:.1f} GB/s; copies: {found}"
    return Figure(f"bandwidth/{op}", ours, peer, BAR, "ms/GB", limit, note)
