"""Rules of reductions, sorts and searches along the last dimension."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.row import EXACT, Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    LARGEST,
    NUMBERS,
    PLAIN,
    Attributes,
    Types,
    require_i32_places,
    require_kind,
    require_one_dtype,
    require_rank,
    require_within,
)
from heliograph_proto.types import F32, F64, I32, I64, TensorType


def count_equal(types: Types, attributes: Attributes) -> TensorType:
    """Two operands of one type give a scalar, i64."""
    require_kind(types, PLAIN)
    require_one_dtype(types)
    if types[0].shape != types[1].shape:
        raise InvalidGraphError(f"operands are {types[0]} and {types[1]}; their shapes must be equal")
    return TensorType(I64, ())


def sum_(types: Types, attributes: Attributes) -> TensorType:
    """Any shape to a scalar."""
    require_kind(types, NUMBERS)
    return TensorType(types[0].dtype, ())


def sum_rows(types: Types, attributes: Attributes) -> TensorType:
    """[.., n] to [.., 1]."""
    require_kind(types, NUMBERS)
    require_rank(types[0], 1)
    return TensorType(types[0].dtype, (*types[0].shape[:-1], 1))


def mean(types: Types, attributes: Attributes) -> TensorType:
    """[.., n] to [.., 1], f32 as in ggml; f64 stays."""
    (x,) = types
    require_kind(types, FLOATS)
    require_rank(x, 1)
    if x.shape[-1] == 0:
        raise InvalidGraphError(f"operand {x} has empty rows")
    return TensorType(F64 if x.dtype is F64 else F32, (*x.shape[:-1], 1))


def cumsum(types: Types, attributes: Attributes) -> TensorType:
    """Rows; the type stays."""
    require_kind(types, NUMBERS)
    require_rank(types[0], 1)
    return types[0]


def argsort(types: Types, attributes: Attributes) -> TensorType:
    """[.., n] to places (i32) [.., n]."""
    (x,) = types
    require_kind(types, NUMBERS)
    require_rank(x, 1)
    require_i32_places(x.shape[-1])
    return TensorType(I32, x.shape)


def top_k(types: Types, attributes: Attributes) -> TensorType:
    """[.., n] to places (i32) [.., k]."""
    found = argsort(types, attributes)
    require_within("k", attributes["k"], 1, min(LARGEST, found.shape[-1]))
    return TensorType(I32, (*found.shape[:-1], attributes["k"]))


def searchsorted(types: Types, attributes: Attributes) -> TensorType:
    """A sorted vector and values of the same data type give a place (i64) for each value."""
    vector, x = types
    require_kind(types, NUMBERS)
    require_one_dtype(types)
    if vector.ndim != 1:
        raise InvalidGraphError(f"searchsorted in {vector}: the sorted operand must have one dimension")
    return TensorType(I64, x.shape)


ROWS: tuple[Op, ...] = (
    Op("sum", ("x",), "reduction", sum_, "The sum of all elements, a scalar.", tolerance=1e-6),
    Op(
        "sum_rows", ("x",), "reduction", sum_rows, "The sum of each row, [.., 1].", tolerance=1e-6
    ),
    Op("mean", ("x",), "reduction", mean, "The mean of each row, [.., 1], f32.", tolerance=1e-6),
    Op(
        "cumsum", ("x",), "rows", cumsum, "The sums of each row up to each element.",
        tolerance=1e-6,
    ),
    Op(
        "cumprod", ("x",), "rows", cumsum, "The products of each row up to each element.",
        tolerance=1e-6,
    ),
    Op(
        "count_equal", ("a", "b"), "reduction", count_equal,
        "The number of equal elements, i64.", tolerance=EXACT,
    ),
    Op(
        "argsort", ("x",), "rows", argsort,
        "The places (i32) of each row's elements in ascending or descending order; the sort is stable.",
        (Attribute("descending", "boolean", False),), (), EXACT,
    ),
    Op(
        "top_k", ("x",), "rows", top_k,
        "The places (i32) of each row's `k` largest elements, the largest first.",
        (Attribute("k", "integer"),), (), EXACT,
    ),
    Op(
        "searchsorted", ("sorted", "x"), "rows", searchsorted,
        "For each x, the number (i64) of elements of a sorted vector below it, or with `right` not above "
        "it. NaN sorts above all numbers.",
        (Attribute("right", "boolean", False),), (), EXACT,
    ),
)  # fmt: skip
