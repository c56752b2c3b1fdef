"""Rows: reductions, sorts and searches along the last dimension."""

from __future__ import annotations

from heliograph_proto.rules import reductions
from heliograph_proto.table.row import EXACT, Attribute, Op

ROWS: tuple[Op, ...] = (
    Op("sum", ("x",), "reduction", reductions.sum_, "The sum of all elements, a scalar.", tolerance=1e-6),
    Op(
        "sum_rows", ("x",), "reduction", reductions.sum_rows, "The sum of each row, [.., 1].", tolerance=1e-6
    ),
    Op("mean", ("x",), "reduction", reductions.mean, "The mean of each row, [.., 1], f32.", tolerance=1e-6),
    Op(
        "cumsum", ("x",), "rows", reductions.cumsum, "The sums of each row up to each element.",
        tolerance=1e-6,
    ),
    Op(
        "cumprod", ("x",), "rows", reductions.cumsum, "The products of each row up to each element.",
        tolerance=1e-6,
    ),
    Op(
        "count_equal", ("a", "b"), "reduction", reductions.count_equal,
        "How many elements are equal, i64.", tolerance=EXACT,
    ),
    Op(
        "argsort", ("x",), "rows", reductions.argsort,
        "The places (i32) of each row's elements in rising order, or falling; equal ones stay in order.",
        (Attribute("descending", "boolean", False),), (), EXACT,
    ),
    Op(
        "top_k", ("x",), "rows", reductions.top_k,
        "The places (i32) of each row's `k` largest elements, the largest first.",
        (Attribute("k", "integer"),), (), EXACT,
    ),
    Op(
        "searchsorted", ("sorted", "x"), "rows", reductions.searchsorted,
        "For each x how many elements of a sorted vector are below it, or with `right` not above it; i64. "
        "NaN is above all numbers.",
        (Attribute("right", "boolean", False),), (), EXACT,
    ),
)  # fmt: skip
