"""Kernels whose limit is the memory: one-op plans on the CPU device against copies of the same size.

All arrays are warm. Bytes count that are read or written: a copy moves its bytes twice, an addition
three times. The limit is the best of three copies, each measured in turn with every op: NumPy's on
one thread, NumPy's split over as many threads as the device has, and the device's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from figures import Figure, seconds_of, shared

import heliograph as hg
from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.types import DTYPES, TensorType

SIDE = 4096
ROUNDS, RUNS = 12, 3
#: The most that an op may take of a copy's time.
BAR = 1.2
#: Ops by name, with the data types of their operands, each of as many bytes as that of a copy, and of
#: their result.
OPS = {
    "add": ("f32", "f32", "f32"),
    "silu": ("f32", "f32"),
    "gelu_erf": ("f32", "f32"),
    "soft_max": ("f32", "f32"),
    "rms_norm": ("f32", "f32"),
    "add u8": ("u8", "u8", "u8"),
    "add i16": ("i16", "i16", "i16"),
    "logical_and": ("bool", "bool", "bool"),
    "less f32": ("f32", "f32", "bool"),
    "less i64": ("i64", "i64", "bool"),
}
TYPE = TensorType(DTYPES["f32"], (SIDE, SIDE))

Call = Callable[[], object]


class Arrays:
    """A source and a target of copies in the device's memory, and ops of it."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.x, self.z = self.tensor("f32", SIDE), self.tensor("f32", SIDE)

    def tensor(self, name: str, rows: int) -> Tensor:
        """A tensor of numbers that its data type has."""
        made = TensorType(DTYPES[name], (rows, SIDE))
        found = Tensor(made, self.device.buffer_type.allocate(made.nbytes))
        if name == "f32":
            np.random.default_rng(7).standard_normal(out=found.array, dtype=np.float32)
        else:
            found.array[...] = np.random.default_rng(7).integers(0, 2, made.shape, np.int8)
        return found

    def plan(self, op: str, inputs: Sequence[Tensor], output: Tensor) -> Call:
        """A run of one op."""
        graph = hg.Graph()
        given = [graph.input(f"x{n}", one.type.shape, one.type.dtype.name) for n, one in enumerate(inputs)]
        graph.output("z", getattr(hg.ops, op)(*given))
        plan = self.device.compile(graph._freeze(), LeafBindings({}, {}), DeviceCompileOptions())
        abort = Abort()
        return lambda: plan.compute(inputs, [output], abort)

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
            f"the device's copy, {count} threads": self.plan("cont", [self.x], self.z),
        }


def figures() -> Iterator[Figure]:
    """Milliseconds for each GB that is read or written."""
    device = CpuDevice("bandwidth")
    try:
        with ThreadPoolExecutor(device.threads) as threads:
            arrays = Arrays(device)
            copies = arrays.copies(threads)
            for name, types in OPS.items():
                rows = 4 * SIDE // DTYPES[types[0]].block_bytes
                *inputs, output = (arrays.tensor(each, rows) for each in types)
                run = arrays.plan(name.split()[0], inputs, output)
                nbytes = sum(one.type.nbytes for one in (*inputs, output))
                yield _figure(name, nbytes, run, copies)
    finally:
        device.close()


def _figure(op: str, nbytes: int, run: Call, copies: dict[str, Call]) -> Figure:
    seconds: dict[str, list[float]] = {name: [] for name in ("", *copies)}
    for _ in range(shared(ROUNDS)):
        for name, call in {"": run, **copies}.items():
            seconds[name] += seconds_of(call, RUNS, warmup=1)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ours = medians.pop("") / nbytes * 1e12
    limit = min(medians, key=lambda name: medians[name])
    peer = medians[limit] / (TYPE.nbytes * 2) * 1e12
    found = ", ".join(f"{TYPE.nbytes * 2 / value / 1e9:.1f}" for value in medians.values())
    note = f"{1e3 / ours:.1f} GB/s; copies: {found}"
    return Figure(f"bandwidth/{op}", ours, peer, BAR, "ms/GB", limit, note)
