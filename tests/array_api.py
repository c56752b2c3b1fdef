"""The functions of the array API standard (2024.12), by heading."""

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
    "sorting and searching": "argmax argmin argsort searchsorted sort where",
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
