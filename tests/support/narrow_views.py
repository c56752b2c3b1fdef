"""Operands that lie in every way that a view can lie, on several numbers of threads: for the tests
of kernels on data types other than float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from backend_graphs import Array, Maker, loaded, nothing_left, run, same_bits

from heliograph_backends.conformance.harness.content import decode
from heliograph_backends.conformance.harness.expected import compare, evaluate
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.quantization import blocks
from heliograph_proto.types import DTYPES, TensorType

NARROW = ("f16", "bf16")
FLOATS = ("f32", *NARROW)
THREADS = (1, 2, 3, 7)
#: As its leaf; with gaps, from an odd place; with dimensions exchanged; repeated; behind an odd start.
WAYS = ("whole", "sliced", "turned", "repeated", "behind")
#: Around none, one and two groups of sixteen lanes.
LENGTHS = range(1, 34)
#: Zeros, numbers that are denormal in f16 or bf16, halves, NaN.
SPECIAL = (0.0, -0.0, 6e-8, -6e-8, 3e-5, 1e-40, -1e-40, 0.5, 2.5, -1.5, np.nan)
#: And the ends of the ranges.
ENDS = (*SPECIAL, np.inf, -np.inf, 65504.0, -65504.0, 3e38, -3e38)


def stored(x: Array, name: str) -> Array:
    """f32 as a float of this name stores it."""
    with np.errstate(all="ignore"):
        if name == "bf16":
            return np.asarray(blocks.to_bits(x))
        return x.astype(np.float16 if name == "f16" else np.float32)


def whole(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Numbers of a data type that NumPy has: small ones, of all sizes, and the ends of the range."""
    kind = DTYPES[name].numpy
    if name == "bool":
        return random.random(shape) < 0.5
    if kind.kind == "f":
        special = np.array((*ENDS, 1e300, -1e-300))
        x = random.standard_normal(shape) * 100
        return np.where(random.random(shape) < 0.2, random.choice(special, shape), x).astype(kind)
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    small = random.integers(max(least, -70), 71, shape, dtype=kind)
    some = random.integers(least, most, shape, dtype=kind, endpoint=True)
    ends = random.choice(np.array([least, most, 0, 1], kind), shape)
    return np.choose(random.integers(0, 3, shape), [small, some, ends])


class Operands:
    """Makes leaves of random numbers, and views of them."""

    def __init__(self, made: Maker, random: np.random.Generator, special: Sequence[float] = ()) -> None:
        self.made = made
        self.random = random
        #: A tenth of all elements.
        self.special = special

    def leaf(self, name: str, *shape: int) -> int:
        if name not in FLOATS:
            return self.made.input(whole(self.random, name, shape))
        # Within bounds, as a rare large power would be all that an error is measured with.
        x = np.clip(2 * self.random.standard_normal(shape, np.float32), -3, 3)
        if self.special:
            x = np.where(self.random.random(shape) < 0.1, self.random.choice(self.special, shape), x)
        return self.made.input(stored(x.astype(np.float32), name), "bf16" if name == "bf16" else "")

    def shape(self, dimensions: int, columns: int) -> tuple[int, ...]:
        """Few rows in so many dimensions."""
        return (*(int(size) for size in self.random.integers(1, 5, dimensions - 1)), columns)

    def view(self, way: str, name: str, *shape: int) -> int:
        """A value of this shape that lies so."""
        match way:
            case "sliced":
                step = [int(each) for each in self.random.integers(1, 4, len(shape))]
                stop = [1 + (size - 1) * each + 1 for size, each in zip(shape, step, strict=True)]
                x = self.leaf(name, *(end + 1 for end in stop))
                return self.made.node("slice", x, start=(1,) * len(shape), stop=stop, step=step)
            case "turned":
                axes = [int(axis) for axis in self.random.permutation(len(shape))]
                x = self.leaf(name, *(shape[axes.index(axis)] for axis in range(len(shape))))
                return self.made.node("permute", x, axes=axes)
            case "repeated":
                sizes = [1 if self.random.random() < 0.5 else size for size in shape]
                return self.made.node("broadcast_to", self.leaf(name, *sizes), shape=shape)
            case "behind":
                start, size = int(self.random.integers(1, 32)), int(np.prod(shape))
                x = self.leaf(name, start + size)
                x = self.made.node("slice", x, start=(start,), stop=(start + size,), step=(1,))
                return self.made.node("reshape", x, shape=shape)
        return self.leaf(name, *shape)

    def any_view(self, name: str, *shape: int) -> int:
        return self.view(str(self.random.choice(WAYS)), name, *shape)


class Devices:
    """Kernels on each of `THREADS`, and the definition."""

    def __init__(self, with_kernels: Sequence[CpuDevice], definition: CpuDevice) -> None:
        self.with_kernels = with_kernels
        self.definition = definition

    def found(self, made: Maker, *, shared: bool = False) -> list[Array]:
        """Return the results of kernels alone, the same with any number of threads.

        `shared`: steps take long enough that helpers share them; of others the least and the most
        will do.
        """
        outputs = []
        for device in self.with_kernels if shared else (self.with_kernels[0], self.with_kernels[-1]):
            with loaded(device, made) as it:
                assert isinstance(it.plan, CpuPlan)
                assert len(it.plan._native) == len(it.plan._steps) > 0, "a node is not on the kernels' path"
                assert not shared or any(step.bound._worth_sharing for step in it.plan._native)
                outputs.append([array for array in it.run() if array is not None])
        for others in outputs[1:]:
            assert all(map(same_bits, outputs[0], others)), "bits depend on the number of threads"
        return outputs[0]

    def check_exactly(self, made: Maker, *, shared: bool = False) -> None:
        """The definition's numbers; a zero's sign and a NaN's digits are not looked at."""
        pairs = zip(self.found(made, shared=shared), run(self.definition, made), strict=True)
        for place, (found, expected) in enumerate(pairs):
            type = made.type(made.outputs[place])
            numbers = [as_numbers(array, type) for array in (found, expected)]
            np.testing.assert_array_equal(*numbers, err_msg=f"{made.nodes[-1][0]}, output {place}")

    def check_closely(self, made: Maker, *, shared: bool = False) -> None:
        """Numbers within the tolerance of their ops."""
        graph, outputs = made.graph(), self.found(made, shared=shared)
        leaves = zip(made.leaves, made.arrays, strict=True)
        with np.errstate(all="ignore"):
            expected, _ = evaluate(graph, [decode(leaf.type, as_bytes(array)) for leaf, array in leaves])
        for place, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
            compare(f"output {place}", decode(wanted.type, as_bytes(found)), wanted)


def as_bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def as_numbers(array: Array, type: TensorType) -> Array:
    return decode(type, as_bytes(array)).values


@contextmanager
def opened() -> Iterator[Devices]:
    """All the devices, closed afterwards with nothing left on them."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(nothing_left(CpuDevice(threads=each, memory_bytes=2**28))) for each in THREADS
        ]
        plain = CpuDevice(threads=1, memory_bytes=2**28, native=False)
        yield Devices(made, stack.enter_context(nothing_left(plain)))
