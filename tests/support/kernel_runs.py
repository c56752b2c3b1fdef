"""Runs of single kernels and of a small network, for the tests of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels import (
    BoundProgram,
    Elementwise,
    Input,
    Instruction,
    Operand,
    Operation,
    PackedForm,
    PackedOperand,
    ProgramBuilder,
    Register,
    Status,
    WorkerPool,
)
from heliograph_backends.host_memory.buffers import aligned_bytes

Array = NDArray[np.float32]


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape, dtype=np.float32)


def over(slot: int, array: Array) -> Operand:
    """Return the operand that is all of `array`."""
    return Operand(slot, 0, array.strides)


def pack_weight(matrix: Array) -> NDArray[np.uint8]:
    """Return the bytes of a matrix packed for the product."""
    bytes_ = aligned_bytes(matrix.nbytes)
    bytes_[:] = np.frombuffer(matrix.tobytes(), np.uint8)
    PackedForm(*matrix.shape, by_columns=False).pack(bytes_)
    return bytes_


def addresses(arrays: Sequence[Any]) -> list[int]:
    return [each.ctypes.data for each in arrays]


def run(builder: ProgramBuilder, arrays: Sequence[Any], pool: WorkerPool | None = None) -> None:
    assert BoundProgram(builder.build(), addresses(arrays)).run(pool) is Status.OK


def same_bits(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes()


def nmse(value: Array, reference: NDArray[np.float64]) -> float:
    return float(((value - reference) ** 2).sum() / max(float((reference**2).sum()), 1e-300))


def ulps(value: Array, reference: NDArray[np.float64]) -> float:
    """Return the largest error in units of the rounded reference's last place."""
    with np.errstate(over="ignore"):
        rounded = reference.astype(np.float32)
    finite = np.isfinite(rounded)
    assert np.array_equal(value[~finite], rounded[~finite], equal_nan=True)
    spacing = np.spacing(np.abs(rounded[finite])).astype(np.float64)
    return float((np.abs(value[finite] - reference[finite]) / spacing).max(initial=0.0))


def apply(operation: Operation, *sources: Array, immediates: tuple[float, ...] = ()) -> Array:
    """Run one instruction over arrays of one shape."""
    result = np.empty(np.broadcast_shapes(*(each.shape for each in sources)), np.float32)
    arrays = [*(np.broadcast_to(each, result.shape) for each in sources), result]
    inputs = tuple(Input(number) for number in range(len(sources)))
    instruction = Instruction(operation, Input(len(sources)), inputs, immediates)
    operands = tuple(over(slot, array) for slot, array in enumerate(arrays))
    builder = ProgramBuilder()
    builder.elementwise(result.shape, Elementwise(operands, (instruction,)))
    run(builder, arrays)
    return result


def multiply(
    left: Array,
    right: Array,
    packed: bool = False,
    pool: WorkerPool | None = None,
    rows: int | None = None,
) -> Array:
    """Return left @ right by one step."""
    batch = left.shape[:-2]
    product = np.full((*batch, left.shape[-2], right.shape[-1]), 7, np.float32)
    weight = pack_weight(right) if packed else right
    side = PackedOperand(1) if packed else over(1, right)
    builder = ProgramBuilder()
    builder.gemm(*product.shape[-2:], left.shape[-1], over(0, left), side, over(2, product), batch)
    run(builder, [left, weight, product], pool)
    return product


def by_rows(method: str, x: Array, *extra: Array, **parameters: float) -> Array:
    """Run a row kernel over one source, perhaps further operands, and a new target."""
    reduces = method.endswith("_rows")
    target = np.empty(x.shape[:-1] if reduces else x.shape, np.float32)
    builder = ProgramBuilder()
    operands = [over(2 + number, each) for number, each in enumerate(extra)]
    getattr(builder, method)(x.shape, over(0, x), over(1, target), *operands, **parameters)
    run(builder, [x, target, *extra])
    return target


class Layer:
    """Product with epilogue, scores, soft_max, product, layer_norm: most steps are shared."""

    def __init__(self, random: np.random.Generator, tokens: int = 150, width: int = 192) -> None:
        self.x = normal(random, tokens, width)
        self.weight, self.bias = (
            pack_weight(normal(random, width, 2 * width)),
            normal(random, 2 * width),
        )
        self.hidden, self.scores = (
            np.empty((tokens, 2 * width), np.float32),
            np.empty((tokens, tokens), np.float32),
        )
        self.mixed, self.result = (
            np.empty((tokens, width), np.float32),
            np.empty((tokens, width), np.float32),
        )
        self.bound = BoundProgram(self.program(tokens, width).build(), addresses(self.arrays))

    @property
    def arrays(self) -> list[Any]:
        return [self.x, self.weight, self.bias, self.hidden, self.scores, self.mixed, self.result]

    def program(self, tokens: int, width: int) -> ProgramBuilder:
        builder = ProgramBuilder()
        hidden = over(3, self.hidden)
        queries, keys = hidden, Operand(3, 4 * width, self.hidden.T.strides)
        activate = Instruction(Operation.ADD, Register(0), (Input(0), Input(1)))
        body = Elementwise(
            (hidden, over(2, self.bias)),
            (activate, Instruction(Operation.GELU_ERF, Input(0), (Register(0),))),
        )
        builder.gemm(tokens, 2 * width, width, over(0, self.x), PackedOperand(1), hidden, epilogue=body)
        builder.gemm(tokens, tokens, width, queries, keys, over(4, self.scores))
        builder.soft_max((tokens, tokens), over(4, self.scores), over(4, self.scores), scale=0.05)
        builder.gemm(tokens, width, tokens, over(4, self.scores), over(0, self.x), over(5, self.mixed))
        builder.layer_norm((tokens, width), over(5, self.mixed), over(6, self.result))
        return builder

    def run(self, pool: WorkerPool | None) -> bytes:
        for each in (self.hidden, self.scores, self.mixed, self.result):
            each.fill(np.nan)
        assert self.bound.run(pool) is Status.OK
        return self.result.tobytes()
