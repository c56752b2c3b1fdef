"""The array API's type promotion: the data type of an operation on mixed operands.

Types of one kind promote to the wider one; signed and unsigned integers to a signed one that holds
both; f16 and bf16 to f32. Python scalars are weak: they take the type of the tensor beside them.
Kinds never mix implicitly: `hg.astype` converts, so f64 is never used by accident.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TypeAlias

from heliograph.graph.source_lines import invalid
from heliograph_proto.ops.rules import fits
from heliograph_proto.types import BOOL, DTYPES, F32, I64, DType, DTypeArgument, dtype

#: A Python scalar, whose data type is weak.
Scalar: TypeAlias = bool | int | float

_BLOCKS_ADVICE = (
    "blocks multiply as weights: hg.ops.mul_mat(w, x) with a row of w for each output; "
    "hg.astype(w, 'f32') expands them"
)
_ADVICE = "convert one of them: hg.astype(x, 'f32')"


def promote(left: DType, right: DType) -> DType:
    """The data type that holds both. Raises InvalidGraphError when there is none: kinds differ."""
    found = promotable(left, right)
    if found is not None:
        return found
    if left.is_integer and right.is_integer:
        raise invalid(f"{left} and {right} have no common integer type", "convert one: hg.astype(x, 'i64')")
    blocks = "quantized" in (left.kind, right.kind)
    raise invalid(f"{left} and {right} have no common data type", _BLOCKS_ADVICE if blocks else _ADVICE)


def promotable(left: DType, right: DType) -> DType | None:
    """The data type that holds both; None when there is none."""
    if left is right:
        return left
    if left.is_float and right.is_float:
        same_width = left.block_bytes == right.block_bytes
        return F32 if same_width else max(left, right, key=lambda one: one.block_bytes)
    return _integers(left, right) if left.is_integer and right.is_integer else None


def _integers(left: DType, right: DType) -> DType | None:
    if left.kind == right.kind:
        return max(left, right, key=lambda one: one.block_bytes)
    signed, unsigned = (left, right) if left.kind == "int" else (right, left)
    if signed.block_bytes > unsigned.block_bytes:
        return signed
    return None if unsigned.block_bytes == 8 else DTYPES[f"i{unsigned.block_bytes * 16}"]


def promote_all(found: Iterable[DType]) -> DType:
    """The data type that holds all of them; at least one is given."""
    return reduce(promote, found)


def named_dtype(argument: DTypeArgument) -> DType:
    """The data type that an argument names. Raises InvalidGraphError."""
    try:
        return dtype(argument)
    except TypeError as error:
        raise invalid(str(error)) from None


def default_dtype(scalar: Scalar) -> DType:
    """The data type of a Python scalar without a tensor beside it."""
    if isinstance(scalar, bool):
        return BOOL
    return I64 if isinstance(scalar, int) else F32


def weak_scalar(scalar: Scalar, dtype: DType) -> Scalar:
    """The scalar as a value of the data type. Raises InvalidGraphError where it is none."""
    if isinstance(scalar, bool) or dtype.kind == "bool":
        if isinstance(scalar, bool) and dtype.kind == "bool":
            return scalar
        raise invalid(f"the Python {type(scalar).__name__} {scalar!r} does not mix with {dtype}", _ADVICE)
    if dtype.is_float:
        return _float(scalar, dtype)
    if isinstance(scalar, float):
        raise invalid(f"the Python float {scalar!r} does not mix with {dtype}", _ADVICE)
    if not dtype.is_integer or not fits_exactly(scalar, dtype):
        raise invalid(f"{scalar!r} is no {dtype}", "convert the tensor to a wider type: hg.astype(x, 'i64')")
    return scalar


def _float(scalar: int | float, dtype: DType) -> float:
    try:
        return float(scalar)
    except OverflowError:
        raise invalid(f"the Python int passes the range of {dtype}", _ADVICE) from None


def fits_exactly(value: int, dtype: DType) -> bool:
    """As `fits`, for Python ints of any size, and below 2**63, which is what an attribute holds."""
    return -(2**63) <= value < 2**63 and fits(value, dtype)


def is_scalar(operand: object) -> bool:
    """True for a Python scalar. NumPy's scalars have data types of their own and do not count."""
    return type(operand) in (bool, int, float)
