"""The definition of every op, written for readability, in NumPy or CuPy (the parameter `xp`).

`define(op, attributes, xp)` returns a function `kernel(*operands, out)` that writes the result into
`out`. It computes in the operands' own precision, except that f16 is computed in f32 and rounded
once, at the end. With the data types given, it also accepts types that array libraries lack: bf16
as bits and blocks as bytes (see `stored`). Other kernels are tested against these definitions, and
a device without faster kernels runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from heliograph_backends.reference import (
    activations,
    attention,
    basic,
    deepseek,
    elementary,
    patches,
    products,
    randomness,
    recurrent,
    reductions,
    rope,
    rows,
    training,
    windows,
)
from heliograph_backends.reference.base import Array, Attributes, Formula, Kernel, Writer, wide
from heliograph_backends.reference.products import product
from heliograph_backends.reference.stored import define_stored, is_stored
from heliograph_proto.graph import Graph
from heliograph_proto.types import DType

_SAME_NAME = (
    "add", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "copysign", "cos", "equal", "exp", "expm1",
    "floor", "floor_divide", "greater", "greater_equal", "hypot", "isfinite", "isinf", "isnan", "less",
    "less_equal", "log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or",
    "logical_xor", "maximum", "minimum", "not_equal", "remainder", "signbit", "sin", "sqrt", "tanh",
    "trunc",
)  # fmt: skip
#: Ops that are a single ufunc, called as ufunc(*operands, out).
UFUNCS = {name: name for name in _SAME_NAME} | {
    "neg": "negative", "abs": "absolute", "sgn": "sign", "sqr": "square", "acos": "arccos",
    "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atanh": "arctanh",
    "atan2": "arctan2", "round": "rint", "sub": "subtract", "mul": "multiply", "div": "divide",
    "bitwise_invert": "invert",
}  # fmt: skip

_FAMILIES = (
    activations, attention, basic, deepseek, elementary, patches, products, randomness, recurrent, reductions,
    rope, rows, training, windows,
)  # fmt: skip
#: Ops that are more than one ufunc.
FORMULAS: Mapping[str, Formula] = {
    name: formula for family in _FAMILIES for name, formula in family.FORMULAS.items()
}
#: Ops that write their result themselves, in parts or whole.
WRITERS: Mapping[str, Writer] = {**elementary.WRITERS, **rows.WRITERS, **windows.WRITERS}
#: Ops whose definition uses matrix products, which for floats come from a BLAS library.
PRODUCTS = frozenset({
    "conv_2d", "conv_3d", "conv_transpose_1d", "conv_transpose_2d", "flash_attn_ext", "flash_attn_paged",
    "lightning_indexer", "matmul", "mul_mat", "mul_mat_id", "out_prod",
})  # fmt: skip


def define(
    op: str,
    attributes: Attributes,
    xp: Any = numpy,
    *,
    operands: Sequence[DType] = (),
    result: DType | None = None,
) -> Kernel:
    """Return the kernel of an op with its attributes bound.

    `operands` and `result` are required if one of them is bf16 or quantized; the arrays then have
    `dtype.storage` and `TensorType.storage_shape`.
    """
    if result is not None and any(map(is_stored, (*operands, result))):
        return define_stored(_define, op, attributes, xp, operands, result)
    return _define(op, attributes, xp)


def define_node(graph: Graph, number: int, xp: Any = numpy) -> Kernel:
    """Return the kernel of a node of a validated graph."""
    node = graph.nodes[number]
    operands = [graph.type_of(value).dtype for value in node.operands]
    return define(node.op, node.attributes, xp, operands=operands, result=node.type.dtype)


def _define(op: str, attributes: Attributes, xp: Any) -> Kernel:
    if op == "matmul":
        return _matmul(xp)
    # An op in both tables is a ufunc in NumPy alone; other libraries differ.
    if op in UFUNCS and (xp is numpy or op not in FORMULAS):
        ufunc: Kernel = getattr(xp, UFUNCS[op])
        # NumPy requires these two ufuncs' `out` by name.
        return (lambda a, b, out: ufunc(a, b, out=out)) if op in ("maximum", "minimum") else ufunc
    return _writing(WRITERS[op], attributes, xp) if op in WRITERS else _filling(FORMULAS[op], attributes, xp)


def _matmul(xp: Any) -> Kernel:
    def kernel(a: Array, b: Array, out: Array) -> None:
        if a.dtype == xp.float16:
            out[...] = product(xp, wide(xp, a), wide(xp, b))
        else:
            product(xp, a, b, out)

    return kernel


def _filling(formula: Formula, attributes: Attributes, xp: Any) -> Kernel:
    def kernel(*operands_and_out: Array) -> None:
        *operands, out = operands_and_out
        # An empty result needs no work, and its other dimensions may be huge.
        if out.size:
            out[...] = formula(xp, attributes, *operands)

    return kernel


def _writing(writer: Writer, attributes: Attributes, xp: Any) -> Kernel:
    def kernel(*operands_and_out: Array) -> None:
        *operands, out = operands_and_out
        if out.size:
            writer(xp, attributes, out, *operands)

    return kernel
