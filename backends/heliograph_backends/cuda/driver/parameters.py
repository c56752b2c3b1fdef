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
            "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs",
            "iq2_s", "iq3_xxs", "iq3_s", "nvfp4",
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
    ("pages", "u8"), ("failure", "u8"),
    *((name, "i8") for name in ("table_stride", "number_stride", "k_page_stride", "v_page_stride")),
    ("page", DIVISOR, (1,)),
    *((f"{name}_strides", "i8", (3,)) for name in ("q", "k", "v", "mask", "result")),
    *((name, "i4") for name in ("heads", "rows", "keys", "d", "dv", "batch_repeat", "head_repeat")),
    *((name, "i4") for name in ("mask_batches", "mask_heads")),
    *((f"{name}_type", "i4") for name in ("q", "k", "v", "mask", "sinks", "result")),
    *((name, "i4") for name in ("has_mask", "has_sinks", "has_biases", "splits", "tiles_of_split")),
    *((name, "i4") for name in ("page_count", "table_pages", "node")),
    *((name, "f4") for name in ("scale", "cap", "max_bias", "slope_power")),
)  # fmt: skip

CONVOLUTION = _struct(
    *((name, "u8") for name in ("kernel", "data", "result", "partial", "bias", "addend")),
    *((f"{name}_strides", "i8", (5,)) for name in ("kernel", "data", "result", "addend")),
    ("bias_stride", "i8"), ("outputs", DIVISOR, (3,)), ("taps", DIVISOR, (3,)), ("channels", DIVISOR, (1,)),
    ("row_tiles", DIVISOR, (1,)), *((name, "i4", (3,)) for name in ("sizes", "step", "padding", "spread")),
    *((name, "i4") for name in ("rows", "data_channels", "depth", "splits", "steps_of_split")),
    *((name, "i4") for name in ("kernel_type", "data_type", "packed", "has_bias", "has_addend")),
    ("activation", "i4"), ("low", "f4"), ("high", "f4"),
    *((name, "u4") for name in ("columns", "results", "images")),
)  # fmt: skip
PLANES = _struct(
    ("divisors", DIVISOR, (MOST_DIMENSIONS,)), ("strides", "i8", (3, MOST_DIMENSIONS)),
    ("dimensions", "i4"), ("reserved", "i4"),
)  # fmt: skip
POOL = _struct(
    ("planes", PLANES), *((name, "u8") for name in ("x", "result", "gradient")),
    *((f"{name}_strides", "i8", (2,)) for name in ("x", "result", "gradient")),
    ("results_along", DIVISOR, (2,)),
    *((name, "i4", (2,)) for name in ("sizes", "windows", "kernel", "step", "padding")),
    *((name, "i4") for name in ("x_type", "gradient_type", "is_mean", "leaves_padding_out", "lanes")),
    ("reserved", "i4"), ("results", "u4"), ("area", "f4"),
)  # fmt: skip
COLUMNS = _struct(
    ("from", "u8"), ("to", "u8"), ("strides", "i8", (5,)),
    *((name, DIVISOR, (3,)) for name in ("taps", "windows", "places")), ("channels", DIVISOR, (1,)),
    *((name, "i4", (3,)) for name in ("step", "padding", "spread")), ("from_type", "i4"), ("to_type", "i4"),
    ("count", "u4"),
)  # fmt: skip
PLACE = _struct(
    ("sizes", DIVISOR, (MOST_DIMENSIONS,)), ("from_strides", "i8", (MOST_DIMENSIONS,)),
    ("to_strides", "i8", (MOST_DIMENSIONS,)), ("from", "u8"), ("to", "u8"),
    ("left", "i4", (MOST_DIMENSIONS,)), ("have", "i4", (MOST_DIMENSIONS,)),
    ("count", "u4"), *((name, "i4") for name in ("dimensions", "item_bytes", "outside")),
)  # fmt: skip
UPSCALE = _struct(
    ("sizes", DIVISOR, (MOST_DIMENSIONS,)), ("x_strides", "i8", (MOST_DIMENSIONS,)),
    ("result_strides", "i8", (MOST_DIMENSIONS,)), ("x", "u8"), ("result", "u8"), ("scale", "f8", (2,)),
    ("support", "f8", (2,)), ("offset", "f8"), ("have", "i4", (MOST_DIMENSIONS,)), ("corners", "i4", (2,)),
    ("count", "u4"), ("dimensions", "i4"), ("mode", "i4"), ("type", "i4"),
)  # fmt: skip
TRIANGLE = _struct(
    ("sizes", DIVISOR, (MOST_DIMENSIONS,)), ("from_strides", "i8", (MOST_DIMENSIONS,)),
    ("to_strides", "i8", (MOST_DIMENSIONS,)), ("from", "u8"), ("to", "u8"), ("offset", "i8"),
    ("outside", "u8"), ("count", "u4"),
    *((name, "i4") for name in ("dimensions", "item_bytes", "keeps_beyond")),
)  # fmt: skip
SORT = _struct(
    ("walk", WALK), ("x", OPERAND), ("step", "i8"), ("keys", "u8"), ("found", "u8"), ("result", "u8"),
    *((name, "i4") for name in ("columns", "chunks", "chunk", "padded", "kept")),
    *((name, "i4") for name in ("descending", "reads_keys", "keeps_keys")),
)  # fmt: skip
LARGEST = _struct(
    ("walk", WALK), ("x", OPERAND), ("step", "i8"), ("result", "u8"), ("rows", "i8"), ("columns", "i8"),
)  # fmt: skip
RUNNING = _struct(
    ("walk", WALK), ("x", OPERAND), ("result", OPERAND), ("steps", "i8", (2,)), ("rows", "i8"),
    ("columns", "i8"), ("is_product", "i4"), ("reserved", "i4"),
)  # fmt: skip
GATHER_BACK = _struct(
    ("walk", WALK), *((name, "i8") for name in ("count", "columns", "there", "given")),
    *((name, OPERAND) for name in ("result", "gradient", "indices")), ("result_steps", "i8", (2,)),
    ("gradient_steps", "i8", (2,)), ("index_step", "i8"), ("failure", "u8"), ("node", "i4"),
    ("wide_indices", "i4"),
)  # fmt: skip
TYPED = _struct(
    ("divisors", DIVISOR, (MOST_DIMENSIONS,)), ("strides", "i8", (4, MOST_DIMENSIONS)),
    ("addresses", "u8", (4,)), ("count", "u4"),
    *((name, "i4") for name in ("dimensions", "operation", "operands", "result_type", "type", "item_bytes")),
    ("reserved", "i4"),
)  # fmt: skip


def empty(type: np.dtype[np.void]) -> Parameters:
    """Return zeroed parameters of a type, in an array of one element."""
    return np.zeros(1, type)
