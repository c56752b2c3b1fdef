"""Functions of data types: the array API's names and rules.

A data type is a name ("f32"), a NumPy data type, or a `hg.DType`. Anything else raises
InvalidGraphError at the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.promotion import Scalar, is_scalar, named_dtype, promotable, promote_all, weak_scalar
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import DType, DTypeArgument

__all__ = ["astype", "can_cast", "finfo", "iinfo", "isdtype", "result_type"]


@dataclass(frozen=True, slots=True)
class FloatInfo:
    """The limits of a floating-point data type."""

    dtype: DType
    bits: int
    #: The distance from 1 to the next float.
    eps: float
    max: float
    min: float
    #: The smallest positive float of full precision.
    smallest_normal: float


@dataclass(frozen=True, slots=True)
class IntegerInfo:
    """The limits of an integer data type."""

    dtype: DType
    bits: int
    max: int
    min: int


#: Digits behind the point in base 2, and the largest exponent.
_FORMATS = {"f64": (52, 1023), "f32": (23, 127), "f16": (10, 15), "bf16": (7, 127)}

_KINDS: Mapping[str, Callable[[DType], bool]] = {
    "bool": lambda found: found.kind == "bool",
    "signed integer": lambda found: found.kind == "int",
    "unsigned integer": lambda found: found.kind == "uint",
    "integral": lambda found: found.is_integer,
    "real floating": lambda found: found.is_float,
    "complex floating": lambda found: False,
    "numeric": lambda found: found.is_float or found.is_integer,
}


def astype(x: Operand, dtype: DTypeArgument, /, *, copy: bool = True) -> Value:
    """The elements as another data type: to integers towards zero, to bool true unless 0.

    Values never change, so `copy` makes no difference.
    """
    return lowering.cast(lowering.one_value(x), named_dtype(dtype))


def can_cast(from_: Value | DTypeArgument, to: DTypeArgument, /) -> bool:
    """True if promotion leads from one data type, or a value's, to another."""
    target = named_dtype(to)
    return promotable(_dtype_of(from_), target) is target


def finfo(type: Value | DTypeArgument, /) -> FloatInfo:
    """The limits of floats of a data type, or a value's."""
    found = _dtype_of(type)
    if not found.is_float:
        raise invalid(f"finfo of {found}, which is no float", "hg.iinfo tells of integers")
    digits, exponent = _FORMATS[found.name]
    largest = (2.0 - 2.0**-digits) * 2.0**exponent
    return FloatInfo(found, found.itemsize * 8, 2.0**-digits, largest, -largest, 2.0 ** (1 - exponent))


def iinfo(type: Value | DTypeArgument, /) -> IntegerInfo:
    """The limits of integers of a data type, or a value's."""
    found = _dtype_of(type)
    if not found.is_integer:
        raise invalid(f"iinfo of {found}, which is no integer", "hg.finfo tells of floats")
    bits = found.itemsize * 8
    least = -(2 ** (bits - 1)) if found.kind == "int" else 0
    return IntegerInfo(found, bits, least + 2**bits - 1, least)


def isdtype(dtype: DTypeArgument, kind: DTypeArgument | tuple[DTypeArgument, ...]) -> bool:
    """True if a data type is of a kind ("integral", "real floating", ...), or equals another.

    `kind` may be a tuple of kinds and data types.
    """
    found = named_dtype(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(found, one) for one in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind](found)
    return named_dtype(kind) is found


def result_type(*arrays_and_dtypes: Value | Scalar | DTypeArgument) -> DType:
    """The data type of an operation on values, arrays, Python scalars (weak) and data types."""
    scalars = [one for one in arrays_and_dtypes if is_scalar(one)]
    strong = [_dtype_of(one) for one in arrays_and_dtypes if not is_scalar(one)]
    if not strong:
        raise invalid(
            "result_type of Python scalars alone, or of nothing",
            "name a value, an array or a data type",
            InvalidArgumentError,
        )
    common = promote_all(strong)
    for one in scalars:
        weak_scalar(one, common)  # type: ignore[arg-type]
    return common


def _dtype_of(found: Value | Scalar | DTypeArgument) -> DType:
    if isinstance(found, (np.ndarray, np.generic)):
        return named_dtype(found.dtype)
    return found.dtype if lowering.is_value(found) else named_dtype(found)  # type: ignore[arg-type]
