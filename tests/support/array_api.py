"""The functions of the array API standard (2024.12), by heading, and their signatures."""

from __future__ import annotations

FUNCTIONS = {
    "elementwise": (
        "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert "
        "bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos "
        "cosh divide equal exp expm1 floor floor_divide greater greater_equal hypot imag isfinite "
        "isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and logical_not "
        "logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow "
        "real reciprocal remainder round sign signbit sin sinh sqrt square subtract tan tanh trunc"
    ),
    "reductions": "all any count_nonzero cumulative_prod cumulative_sum diff max mean min prod std sum var",
    "sorting and searching": "argmax argmin argsort nonzero searchsorted sort where",
    "sets": "unique_all unique_counts unique_inverse unique_values",
    "indexing": "take take_along_axis",
    "manipulation": (
        "broadcast_arrays broadcast_to concat expand_dims flip moveaxis permute_dims repeat reshape "
        "roll squeeze stack tile unstack"
    ),
    "products": "matmul matrix_transpose tensordot vecdot",
    "creation": (
        "arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones "
        "ones_like tril triu zeros zeros_like"
    ),
    "data types": "astype can_cast finfo iinfo isdtype result_type",
}

_OF_TWO = (
    "add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign divide "
    "equal floor_divide greater greater_equal hypot less less_equal logaddexp logical_and logical_or "
    "logical_xor maximum minimum multiply nextafter not_equal pow remainder subtract"
)
_REDUCTION = "x, /, *, axis=None, keepdims=False"
_ADDING_UP = "x, /, *, axis=None, dtype=None, keepdims=False"
_SPREAD = "x, /, *, axis=None, correction=0.0, keepdims=False"
_CUMULATIVE = "x, /, *, axis=None, dtype=None, include_initial=False"
_SORT = "x, /, *, axis=-1, descending=False, stable=True"
_FILLED = "shape, *, dtype=None, device=None"
_LIKE = "x, /, *, dtype=None, device=None"
#: The parameters of each function, as Python writes them.
SIGNATURES = {
    **dict.fromkeys(FUNCTIONS["elementwise"].split(), "x, /"),
    **dict.fromkeys(_OF_TWO.split(), "x1, x2, /"),
    **dict.fromkeys(("all", "any", "count_nonzero", "max", "mean", "min"), _REDUCTION),
    **dict.fromkeys(("argmax", "argmin"), _REDUCTION),
    **dict.fromkeys(("sum", "prod"), _ADDING_UP),
    **dict.fromkeys(("std", "var"), _SPREAD),
    **dict.fromkeys(("cumulative_prod", "cumulative_sum"), _CUMULATIVE),
    **dict.fromkeys(("argsort", "sort"), _SORT),
    **dict.fromkeys(("empty", "ones", "zeros"), _FILLED),
    **dict.fromkeys(("empty_like", "ones_like", "zeros_like"), _LIKE),
    **dict.fromkeys(("tril", "triu"), "x, /, *, k=0"),
    **dict.fromkeys(FUNCTIONS["sets"].split(), "x, /"),
    "arange": "start, /, stop=None, step=1, *, dtype=None, device=None",
    "asarray": "obj, /, *, dtype=None, device=None, copy=None",
    "astype": "x, dtype, /, *, copy=True, device=None",
    "broadcast_arrays": "*arrays",
    "broadcast_to": "x, /, shape",
    "can_cast": "from_, to, /",
    "clip": "x, /, min=None, max=None",
    "concat": "arrays, /, *, axis=0",
    "diff": "x, /, *, axis=-1, n=1, prepend=None, append=None",
    "expand_dims": "x, /, axis",
    "eye": "n_rows, n_cols=None, /, *, k=0, dtype=None, device=None",
    "finfo": "type, /",
    "flip": "x, /, *, axis=None",
    "from_dlpack": "x, /, *, device=None, copy=None",
    "full": "shape, fill_value, *, dtype=None, device=None",
    "full_like": "x, /, fill_value, *, dtype=None, device=None",
    "iinfo": "type, /",
    "isdtype": "dtype, kind",
    "linspace": "start, stop, /, num, *, dtype=None, device=None, endpoint=True",
    "matmul": "x1, x2, /",
    "matrix_transpose": "x, /",
    "meshgrid": "*arrays, indexing='xy'",
    "moveaxis": "x, source, destination, /",
    "nonzero": "x, /",
    "permute_dims": "x, /, axes",
    "repeat": "x, repeats, /, *, axis=None",
    "reshape": "x, /, shape, *, copy=None",
    "result_type": "*arrays_and_dtypes",
    "roll": "x, /, shift, *, axis=None",
    "searchsorted": "x1, x2, /, *, side='left', sorter=None",
    "squeeze": "x, /, axis",
    "stack": "arrays, /, *, axis=0",
    "take": "x, indices, /, *, axis=None",
    "take_along_axis": "x, indices, /, *, axis=-1",
    "tensordot": "x1, x2, /, *, axes=2",
    "tile": "x, repetitions, /",
    "unstack": "x, /, *, axis=0",
    "vecdot": "x1, x2, /, *, axis=-1",
    "where": "condition, x1, x2, /",
}
#: Parameters that no function has: devices are chosen when a graph is compiled.
LEFT_OUT = ("device",)
