"""Elementwise ops between types as launches: choices, comparisons, conversions, whole numbers; and
rarer ones of floats. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.cuda.driver.parameters import TYPED
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import Filling, Launch, blocks_for, fits
from heliograph_backends.cuda.lowering.programs import pieces
from heliograph_backends.cuda.lowering.target import Asked
from heliograph_proto.types import TensorType

#: The kernel's numbers of data types, and of ops, in their order.
NUMBERS = (*FLOATS, "i8", "u8", "bool", "i16", "u16", "i32", "u32", "i64", "u64")
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")
QUESTIONS = ("isnan", "isinf", "isfinite", "signbit")
WHOLE = (
    "add", "sub", "mul", "maximum", "minimum", "neg", "abs", "sgn", "sqr", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bitwise_invert",
)  # fmt: skip
FLOATING = (
    "pow", "atan2", "hypot", "copysign", "acos", "acosh", "asin", "asinh", "atan", "atanh",
)  # fmt: skip
OPS = ("where", "cast", *COMPARISONS, *LOGICAL, *QUESTIONS, *WHOLE, *FLOATING)


def is_typed(op: str, operands: Sequence[TensorType], result: TensorType) -> bool:
    """True if the kernel computes an op of these types."""
    if op not in OPS or not fits(result.shape) or len({one.dtype.name for one in operands[-2:]}) > 1:
        return False
    name, made = operands[-1].dtype.name, result.dtype.name
    if op == "where":
        return result.dtype.block_size == 1
    if op in WHOLE:
        return name in NUMBERS and name not in (*FLOATS, "bool") and made == name
    if op in FLOATING:
        return name in FLOATS and made == name
    return name in (FLOATS if op in QUESTIONS else NUMBERS) and made in NUMBERS


def elements(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launches of an op; None if the kernel does not compute it."""
    op, values, result = asked.node.op, asked.values, asked.result
    if not is_typed(op, [one.type for one in values], result.type):
        return None
    type = values[-1].type.dtype.name
    found = []
    for piece in pieces((result, *values)):
        filling = Filling(TYPED)
        filling.divisors(piece.sizes)
        for place, (one, steps) in enumerate(zip(piece.operands, piece.steps, strict=True)):
            filling.address("addresses", one, place)
            filling.parameters["strides"][0][place][: len(steps)] = steps
        filling.set(
            count=piece.elements, dimensions=len(piece.sizes), operation=OPS.index(op),
            operands=len(piece.operands), item_bytes=result.type.dtype.block_bytes,
            type=NUMBERS.index(type) if type in NUMBERS else len(NUMBERS),
        )  # fmt: skip
        if op != "where":
            filling.set(result_type=NUMBERS.index(result.type.dtype.name))
        found.append(filling.launch("typed", (blocks_for(piece.elements, 256), 1, 1), 256))
    return tuple(found)
