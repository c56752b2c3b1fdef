"""Graphs of one elementwise chain each, which together have every operation, data type and way to read an
operand: for the tests of chains on the CUDA backend, emulated and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from backend_graphs import Maker

from heliograph_backends.cuda.lowering.chains import INSTRUCTIONS
from heliograph_proto.types import DTYPES

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 1.7, "bias": -0.3}, "clamp": {"min": 0.4, "max": 1.1}, "leaky_relu": {"slope": 0.02},
}  # fmt: skip
OF_TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "relu_back")
OPS = sorted(set(INSTRUCTIONS) - {"cont"})
FIVES = [OPS[place : place + 5] for place in range(0, len(OPS), 5)]
CASTS = (("f32", "f16"), ("bf16", "f32"), ("f16", "bf16"))


def numbers(rng: np.random.Generator, dtype: str, *shape: int, positive: bool = False) -> np.ndarray:
    """Of a data type, in the form in which it is stored."""
    values = rng.standard_normal(shape).astype(np.float32)
    values = np.abs(values) + np.float32(0.1) if positive else values
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"f32": np.float32, "f16": np.float16}[dtype])


def sum_of(made: Maker, ops: Sequence[str], x: int, y: int) -> int:
    """A chain that has all of these ops."""
    total = None
    for op in ops:
        operands = (x, y) if op in OF_TWO else (x,)
        value = made.node(op, *operands, **ATTRIBUTES.get(op, {}))
        total = value if total is None else made.node("add", total, value)
    assert total is not None
    return total


def computing(ops: Sequence[str], dtype: str, rng: np.random.Generator) -> Maker:
    """All of these ops, over more than a tile of every width, and a rest that is no vector."""
    made = Maker()
    x, y = (made.input(numbers(rng, dtype, 5003, positive=True), dtype) for _ in range(2))
    made.output(sum_of(made, ops, x, y))
    return made


def casting(source: str, target: str, rng: np.random.Generator) -> Maker:
    """From one data type to another."""
    made = Maker()
    made.output(made.node("cast", made.input(numbers(rng, source, 3, 1001), source), dtype=DTYPES[target]))
    return made


def beside(made: Maker, rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> int:
    """An operand of a shape that broadcasts to [9, 4, 24], or to [9, 4, 23] with as much."""
    return made.input(numbers(rng, dtype, *shape), dtype)


READINGS: dict[str, tuple[int, Callable[[Maker, np.random.Generator, str], int]]] = {
    "in order": (24, lambda made, rng, dtype: beside(made, rng, dtype, (9, 4, 24))),
    "one element": (24, lambda made, rng, dtype: beside(made, rng, dtype, ())),
    "one element, odd": (23, lambda made, rng, dtype: beside(made, rng, dtype, (1, 1))),
    "a row": (24, lambda made, rng, dtype: beside(made, rng, dtype, (24,))),
    "an odd row": (23, lambda made, rng, dtype: beside(made, rng, dtype, (23,))),
    "a column": (24, lambda made, rng, dtype: beside(made, rng, dtype, (9, 4, 1))),
    "an odd column": (23, lambda made, rng, dtype: beside(made, rng, dtype, (4, 1))),
    "the middle": (24, lambda made, rng, dtype: beside(made, rng, dtype, (4, 24))),
    "repeated in the middle": (24, lambda made, rng, dtype: beside(made, rng, dtype, (9, 1, 24))),
    "turned": (
        24,
        lambda made, rng, dtype: made.node("permute", beside(made, rng, dtype, (24, 9, 4)), axes=(1, 2, 0)),
    ),
}


def reading_it(reading: str, dtype: str, rng: np.random.Generator) -> Maker:
    """With an operand that is read in one of the ways."""
    columns, second = READINGS[reading]
    made = Maker()
    x = made.input(numbers(rng, dtype, 9, 4, columns), dtype)
    y = second(made, rng, dtype)
    made.output(made.node("sub", made.node("mul", made.node("neg", x), y), y))
    return made


def graphs(rng: np.random.Generator) -> Iterator[Maker]:
    """With all operations, data types, and ways to read an operand."""
    for dtype, ops in zip(("f32", "f16", "bf16") * len(FIVES), FIVES, strict=False):
        yield computing(ops, dtype, rng)
    for dtype, reading in zip(("f16", "f32") * len(READINGS), READINGS, strict=False):
        yield reading_it(reading, dtype, rng)
    for source, target in CASTS:
        yield casting(source, target, rng)
