"""Cases of the op table: seeded operands, and what a float64 or exact reference says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from backend_graphs import Array

from heliograph_proto.types import DTYPES, TensorType

SEED = 20250314
FLOATS = ("f16", "f32", "f64")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
NUMBERS = FLOATS + INTEGERS
PLAIN = (*NUMBERS, "bool")
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (0,), (1,), (7,), (3, 0, 2), (33, 5), (2, 3, 65), (1, 1, 1), (2, 1, 2, 1, 3, 1, 2, 5),
)  # fmt: skip
PAIRS = (
    ((), ()), ((5,), ()), ((3, 1), (1, 4)), ((2, 3, 5), (5,)), ((1,), (0, 1)), ((2, 1, 7), (3, 1)),
    ((2, 1, 2, 1, 2, 1, 2, 3), (1, 3, 1, 2, 1, 2, 1, 3)), ((97,), (97,)),
)  # fmt: skip
ROWS = ((1,), (5,), (4, 33), (2, 3, 64), (3, 1), (0, 4), (2, 1, 1, 1, 2, 1, 3, 17))


@dataclass
class Case:
    """Operands and attributes of one node, and what its result is: float64, bool, or Python's integers."""

    op: str
    operands: Sequence[Array]
    expected: Array
    attributes: Mapping[str, Any] = field(default_factory=dict)


# Data


def data(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Seeded elements of a data type; small numbers, so that nothing leaves float16's range or cancels."""
    target = DTYPES[name].numpy
    if name == "bool":
        return random.random(shape) < 0.5
    if name in FLOATS:
        return np.clip(random.standard_normal(shape) * 2, -3, 3).astype(target)
    return random.integers(0 if name[0] == "u" else -100, 100, shape).astype(target)


def wide(array: Array) -> Array:
    """Floats as float64, integers as Python's integers, which have no width."""
    kind = array.dtype.kind
    return array if kind == "b" else array.astype(np.float64 if kind == "f" else object)


def narrow(array: Any, target: np.dtype[Any]) -> Array:
    """An exact result in its data type: integers wrap, floats round."""
    found = np.asarray(array)
    if target.kind in "iu" and found.dtype.kind not in "fb":
        bits = target.itemsize * 8
        wrapped = np.asarray(found.astype(object) % 2**bits, object).astype(np.uint64)
        return wrapped.astype(f"u{target.itemsize}").view(target)
    with np.errstate(all="ignore"):
        return found.astype(target)


#: (op, random) -> cases.
Cases: TypeAlias = Callable[[str, np.random.Generator], Iterator[Case]]
#: What is wrong, op, operand types, attributes, a part of the message.
Refusal: TypeAlias = tuple[str, str, list[TensorType], dict[str, Any], str]


def t(name: str, *shape: int) -> TensorType:
    return TensorType(DTYPES[name], shape)
