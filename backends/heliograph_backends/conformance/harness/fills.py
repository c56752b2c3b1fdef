"""Seeded initialisers of the operands of a case, by the names that case ids contain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from heliograph_backends.conformance.harness.content import Array, Content, encode
from heliograph_proto.types import TensorType

#: (random, tensor type, number of the fill) -> numbers in the tensor's shape.
Fill = Callable[[np.random.Generator, TensorType, int], Array]

#: Special values; each op treats at least one of them specially.
SPECIAL = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 20.0, -20.0, 2.0**-13, 30000.0,
)  # fmt: skip


def fill(name: str, random: np.random.Generator, type: TensorType) -> Content:
    """Return the content that a fill, such as "normal" or "below 9", gives a tensor."""
    word, _, number = name.partition(" ")
    return encode(type, FILLS[word](random, type, int(number or 0)))


def normal(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats from -3 to 3; integers from -100 or 0 to 99; random booleans; blocks from -1 to 1, as
    in ggml."""
    if type.dtype.kind == "bool":
        return random.random(type.shape) < 0.5
    if type.dtype.kind == "quantized":
        return random.uniform(-1, 1, type.shape)
    if type.dtype.is_integer:
        return random.integers(0 if type.dtype.kind == "uint" else -100, 100, type.shape)
    found: Array = np.clip(2 * random.standard_normal(type.shape), -3, 3)
    return found


def positive(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats from 1/16 to 3."""
    found: Array = np.abs(normal(random, type, 0)) + 0.0625
    return found


def fraction(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats from 1/4 to 3/4."""
    return random.uniform(0.25, 0.75, type.shape)


def within_one(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats from -7/8 to 7/8."""
    return random.uniform(-0.875, 0.875, type.shape)


def above_one(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats from 17/16 to 4."""
    return 1 + positive(random, type, 0)


def bits(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Shift counts, some larger than the integers' bits and, for signed types, some negative."""
    own = type.dtype.itemsize * 8
    return random.integers(-2 if type.dtype.kind == "int" else 0, own + 3, type.shape)


def below_zero(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats from -3/4 to -1/4."""
    return -fraction(random, type, 0)


def quarters(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Multiples of 1/4 from -3 to 3, some of them equal, none 0; integers from 1 to 9."""
    if type.dtype.is_integer:
        return random.integers(1, 10, type.shape)
    found: Array = random.integers(1, 13, type.shape) / 4 * random.choice([-1, 1], type.shape)
    return found


def few(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """0, 1 and 2, so that many elements are equal."""
    return random.integers(0, 2 if type.dtype.kind == "bool" else 3, type.shape)


def wide(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Integers of the whole range, beyond what floats hold exactly, with a few zeros."""
    limits = np.iinfo(type.dtype.numpy)
    found = random.integers(limits.min, limits.max, type.shape, type.dtype.numpy, endpoint=True)
    return np.where(random.random(type.shape) < 0.1, 0, found)


def rising(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Like quarters, sorted."""
    return np.sort(quarters(random, type, 0), axis=-1)


def rising_wide(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Like wide, sorted."""
    return np.sort(wide(random, type, 0), axis=-1)


def near_one(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats near 1, integers from 1 to 3, so that their product stays in range."""
    if type.dtype.is_integer:
        return random.integers(1, 4, type.shape)
    return 1 + normal(random, type, 0) / 64


def special(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """NaN, infinities, zeros of both signs and others; each element is `number` places further in
    SPECIAL."""
    step = number or 1
    return np.asarray(SPECIAL)[np.arange(type.size) * step % len(SPECIAL)].reshape(type.shape)


def edges(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Quarters from -4 to 4, some times the square root of 2 or 1/2, and their neighbours up to
    2**number units in the last place of f32, where kernels switch from one approximation to the
    next."""
    quarters = np.arange(-16, 17) / 4
    scale = random.choice([1.0, math.sqrt(2), math.sqrt(0.5)], type.shape)
    steps = random.integers(-(2**number), 2**number + 1, type.shape) * 2.0**-24
    return np.asarray(random.choice(quarters, type.shape) * scale * (1 + steps), np.float32)


def edges_above(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Like edges, without signs."""
    return np.abs(edges(random, type, number))


def spoiled(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Normal rows, one with a NaN and one with each infinity; the other rows must not be
    affected."""
    found = normal(random, type, 0)
    rows = found.reshape(-1, type.shape[-1])
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        rows[row + 1, row] = value
    return found


def zero(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Zeros."""
    return np.zeros(type.shape)


def large(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Floats from -1000 to 1000: exponentials overflow unless the maximum is subtracted first."""
    return random.uniform(-1000, 1000, type.shape)


def below(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Indices below `number`."""
    return random.integers(0, number, type.shape)


def distinct(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Indices below `number`, distinct in each row."""
    rows = [random.permutation(number)[: type.shape[-1]] for _ in range(math.prod(type.shape[:-1]))]
    return np.array(rows, np.int64).reshape(type.shape)


def outside(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Zeros, except that the last index is `number`, which is out of range."""
    found = np.zeros(type.size, np.int64)
    found[-1] = number
    return found.reshape(type.shape)


def mask(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """0 or -inf, at least one 0 in each row."""
    found = np.where(random.random(type.shape) < 0.4, -math.inf, 0.0)
    found[..., 0] = 0.0
    return found


def bias(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Finite numbers and -inf, at least one finite in each row."""
    return mask(random, type, 0) + normal(random, type, 0)


def hiding(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Like mask, but the first row is fully hidden."""
    found = mask(random, type, 0)
    found[..., 0, :] = -math.inf
    return found


def positions(random: np.random.Generator, type: TensorType, number: int) -> Array:
    """Positions of tokens, some negative."""
    return random.integers(-3, 60, type.shape)


FILLS: Mapping[str, Fill] = {
    "normal": normal, "positive": positive, "quarters": quarters, "few": few, "wide": wide,
    "near_one": near_one, "special": special, "edges": edges, "edges_above": edges_above, "spoiled": spoiled,
    "zero": zero, "large": large, "below": below,
    "distinct": distinct, "outside": outside, "mask": mask, "bias": bias, "hiding": hiding,
    "positions": positions, "fraction": fraction, "below_zero": below_zero, "within_one": within_one,
    "above_one": above_one, "bits": bits, "rising": rising, "rising_wide": rising_wide,
}  # fmt: skip
