"""The parameters of kernels as NumPy types: each has the fields of the struct of its name in
`kernels/`.

A kernel takes one of them by value. `align=True` lays fields out as C does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np

Parameters: TypeAlias = np.ndarray[Any, np.dtype[np.void]]

MOST_DIMENSIONS = 6
#: The limits of the kernels that interpret chains.
MOST_OPERANDS, MOST_INSTRUCTIONS = 16, 32
FEW_OPERANDS, FEW_INSTRUCTIONS = 4, 8
#: The most sums before a norm that are fused into it.
MOST_ADDED = 2
#: The most pairs of a row that are rotated.
MOST_PAIRS = 128

#: The numbers of data types.
TYPES = {
    name: number
    for number, name in enumerate(
        (
            "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k",
            "q6_k",
        )
    )
}  # fmt: skip

#: How an operand of a chain is read.
IN_ORDER, ONE_ELEMENT, STRIDED = range(3)


def _struct(*fields: tuple[Any, ...]) -> np.dtype[np.void]:
    return np.dtype(list(fields), align=True)


OPERAND = _struct(("address", "u8"), ("strides", "i8", (MOST_DIMENSIONS,)), ("type", "i4"), ("kind", "i4"))
WALK = _struct(("sizes", "i8", (MOST_DIMENSIONS,)), ("dimensions", "i4"), ("reserved", "i4"))
DIVISOR = _struct(("size", "u4"), ("multiplier", "u4"), ("shift", "u4"), ("reserved", "u4"))
INSTRUCTION = _struct(
    ("operation", "u1"), ("first", "i1"), ("second", "i1"), ("target", "i1"), ("rounds", "i4"), ("p", "f4"),
    ("q", "f4"),
)  # fmt: skip


def _interpreted(operands: int, instructions: int) -> np.dtype[np.void]:
    return _struct(
        ("divisors", DIVISOR, (MOST_DIMENSIONS,)), ("count", "u4"), ("dimensions", "i4"), ("type", "i4"),
        ("instructions", "i4"), ("operands", OPERAND, (operands,)), ("program", INSTRUCTION, (instructions,)),
    )  # fmt: skip


ELEMENTWISE = _interpreted(MOST_OPERANDS, MOST_INSTRUCTIONS)
ELEMENTWISE_FEW = _interpreted(FEW_OPERANDS, FEW_INSTRUCTIONS)


@cache
def chain_type(operands: int, walked: int, dimensions: int, numbers: int) -> np.dtype[np.void]:
    """Return the parameter type of a chain with its own kernel."""
    axes = max(1, dimensions)
    return _struct(
        ("vectors", "u4"), ("tiles", "u4"), ("rest", "u4"), ("reserved", "u4"),
        ("addresses", "u8", (operands,)), ("divisors", DIVISOR, (axes,)),
        ("strides", "i8", (max(1, walked), axes)), ("numbers", "f4", (max(1, numbers),)),
    )  # fmt: skip


LINE = _struct(("address", "u8"), ("step", "i8"))
ROWS = _struct(
    ("x", LINE), ("result", LINE),
    *((name, "i4") for name in ("rows", "columns", "threads", "dimensions", "packed", "has_second")),
    ("has_third", "i4"), ("adds", "i4"), ("type", "i4"), ("norm", "i4"), ("scale", "f4"), ("max_bias", "f4"),
    ("second", LINE), ("third", LINE), ("added", LINE, (MOST_ADDED,)),
    *((name, "i4") for name in ("second_type", "third_type", "heads", "matrix_rows")),
    ("slope_power", "f4"), ("reserved", "i4"), ("inner", "i8", (4 + MOST_ADDED,)),
    ("sizes", "i8", (MOST_DIMENSIONS,)), ("strides", "i8", (4 + MOST_ADDED, MOST_DIMENSIONS)),
)  # fmt: skip
REDUCE = _struct(
    ("walk", WALK), ("inner", WALK), ("rows", "i8"), ("columns", "i8"), ("x", OPERAND), ("along", OPERAND),
    ("result", OPERAND), ("operation", "i4"), ("threads", "i4"),
)  # fmt: skip
COPY = _struct(
    ("divisors", DIVISOR, (MOST_DIMENSIONS,)), ("from_strides", "i8", (MOST_DIMENSIONS,)),
    ("to_strides", "i8", (MOST_DIMENSIONS,)), ("from", "u8"), ("to", "u8"), ("count", "u4"),
    ("dimensions", "i4"), ("item_bytes", "i4"), ("reserved", "i4"),
)  # fmt: skip
TRANSPOSE = _struct(
    ("divisors", DIVISOR, (MOST_DIMENSIONS,)), ("from_strides", "i8", (MOST_DIMENSIONS,)),
    ("to_strides", "i8", (MOST_DIMENSIONS,)), ("tiles", DIVISOR, (2,)), ("from", "u8"), ("to", "u8"),
    ("from_step", "i8"), ("to_step", "i8"), ("across", "u4"), ("along", "u4"), ("dimensions", "i4"),
    ("item_bytes", "i4"),
)  # fmt: skip
GATHER = _struct(
    ("walk", WALK), ("count", "i8"), ("columns", "i8"), ("there", "i8"), ("table", OPERAND),
    ("rows", OPERAND), ("indices", OPERAND),
    ("table_stride", "i8"), ("inner", "i8", (2,)), ("failure", "u8"),
    ("node", "i4"),
    ("item_bytes", "i4"), ("wide_indices", "i4"), ("last", "i4"),
)  # fmt: skip
RANDOM = _struct(
    ("seed", "u8"), ("counter", "u8"), ("result", "u8"), ("count", "i8"), ("as_floats", "i4"),
    ("reserved", "i4"),
)  # fmt: skip
ROPE = _struct(
    ("walk", WALK), ("tokens", "i8"), ("x", OPERAND), ("result", OPERAND), ("positions", OPERAND),
    ("factors", OPERAND), ("head_strides", "i8", (2,)), ("inner", "i8", (2,)), ("turns", "f8", (MOST_PAIRS,)),
    *((name, "i4") for name in ("heads", "width", "has_factors", "pairs", "start", "adjacent")),
    ("heads_of_unit", "i4"), ("units_of_token", "i4"), ("size", "f4"), ("packed", "i4"),
)  # fmt: skip
PRODUCT = _struct(
    ("walk", WALK), ("n", "i8"), ("k", "i8"), ("rows", "i8"), ("weights", OPERAND), ("x", OPERAND),
    ("result", OPERAND), ("ids", OPERAND), ("experts", "i8"), ("expert_stride", "i8"),
    ("weight_stride", "i8"), ("x_stride", "i8"), ("result_stride", "i8"), ("id_step", "i8"), ("groups", "i8"),
    ("larger_blocks", "i8"), ("chunk", "i8"), ("failure", "u8"), ("node", "i4"), ("wide_ids", "i4"),
    ("warp_bits", "i4"), ("reserved", "i4"),
)  # fmt: skip
ATTENTION = _struct(
    *((name, "u8") for name in ("q", "k", "v", "mask", "sinks", "result", "partial")),
    *((f"{name}_bias", "u8") for name in ("q", "k", "v")),
    *((f"{name}_bias_stride", "i8") for name in ("q", "k", "v")),
    *((f"{name}_strides", "i8", (3,)) for name in ("q", "k", "v", "mask", "result")),
    *((name, "i4") for name in ("heads", "rows", "keys", "d", "dv", "batch_repeat", "head_repeat")),
    *((name, "i4") for name in ("mask_batches", "mask_heads")),
    *((f"{name}_type", "i4") for name in ("q", "k", "v", "mask", "sinks", "result")),
    *((name, "i4") for name in ("has_mask", "has_sinks", "has_biases", "splits", "tiles_of_split")),
    *((name, "f4") for name in ("scale", "cap", "max_bias", "slope_power")),
)  # fmt: skip


def empty(type: np.dtype[np.void]) -> Parameters:
    """Return zeroed parameters of a type, in an array of one element."""
    return np.zeros(1, type)
