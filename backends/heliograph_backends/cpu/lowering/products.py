"""Matrix products with weights that are stored as f16, bf16 or blocks, or that repeat. Pure.

A matrix of mul_mat's weights is used for several consecutive ones of its activations. If these are
neither all nor one, the dimension is cut in two: the matrix, and its repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.stored_types import INTEGER_KINDS
from heliograph_backends.cpu.kernels.program.words import OUTER_DIMENSIONS
from heliograph_backends.planning.layout import ValuePlace
from heliograph_proto.types import F32, TensorType

#: The kernels' number of each stored type, by name.
STORED = {each.name.lower(): each for each in k.Stored}


def is_stored_product(
    op: str, types: Sequence[TensorType], weights: ValuePlace, activations: ValuePlace
) -> bool:
    """True if a kernel runs the op on operands of these types and places."""
    if op != "mul_mat" or types[0].dtype.name not in STORED:
        return False
    found = types[0]
    if types[1].dtype is not F32 and not is_integer_product(types, activations.strides):
        return False
    adjacent = weights.strides[-1] == found.dtype.block_bytes or found.block_shape[-1] <= 1
    # f32 weights are packed in place if only products read them.
    return found.dtype is not F32 and adjacent and can_cut(*types)


def is_integer_product(types: Sequence[TensorType], activations: Sequence[int]) -> bool:
    """True if weights and activations, with these strides, are blocks whose products are in
    integers."""
    weights, rows = types[:2]
    known = rows.dtype.name == "q8_0" and STORED.get(weights.dtype.name) in INTEGER_KINDS
    return known and (activations[-1] == rows.dtype.block_bytes or rows.block_shape[-1] <= 1)


def can_cut(weights: TensorType, activations: TensorType) -> bool:
    """True if the leading dimensions, with repeating ones cut, are not too many for the kernels."""
    sizes = activations.shape[:-2]
    return len(cut_sizes(sizes, repeats(weights.shape[:-2], sizes))) <= OUTER_DIMENSIONS


def repeats(weights: Sequence[int], activations: Sequence[int]) -> tuple[int, ...]:
    """Return for each leading dimension how often a matrix of the weights repeats; 1 if one serves
    all."""
    aligned = (1,) * (len(activations) - len(weights)) + tuple(weights)
    pairs = zip(aligned, activations, strict=True)
    return tuple(size // have if 1 < have < size else 1 for have, size in pairs)


def cut_sizes(sizes: Sequence[int], cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the leading dimensions, with repeating ones cut."""
    pairs = zip(sizes, cuts, strict=True)
    return tuple(part for size, times in pairs for part in ((size // times, times) if times > 1 else (size,)))


def cut_strides(strides: Sequence[int], cuts: Sequence[int], inner: int, *, repeat: bool) -> tuple[int, ...]:
    """Return strides over cut dimensions, followed by `inner` more; `repeat` is true for the
    weights."""
    missing = len(cuts) + inner - len(strides)
    full = (0,) * missing + tuple(strides)
    found: list[int] = []
    for step, times in zip(full, cuts, strict=False):
        if times == 1:
            found.append(step)
        else:
            found += (step, 0) if repeat else (step * times, step)
    return (*found, *full[len(cuts) :])


def stored_operand(
    operand: k.Operand, dtype: str, cuts: Sequence[int], *, grouped: bool, integers: bool
) -> k.StoredOperand:
    """Return the weights of a product as its right side; `grouped`: see `RowGroups`; `integers`:
    the left side is q8_0."""
    strides = cut_strides(operand.strides[:-1], cuts, 1, repeat=True)
    return k.StoredOperand(operand.slot, operand.offset, strides, STORED[dtype], grouped, integers)


def cut_operand(operand: k.Operand, cuts: Sequence[int], *, repeat: bool = False) -> k.Operand:
    """Cut an f32 operand of the product or its epilogue; `repeat` is true for the weights."""
    return operand._replace(strides=cut_strides(operand.strides, cuts, 2, repeat=repeat))


def cut_body(body: k.Elementwise | None, cuts: Sequence[int]) -> k.Elementwise | None:
    """Cut the operands of the epilogue."""
    if body is None or all(times == 1 for times in cuts):
        return body
    return body._replace(operands=tuple(cut_operand(each, cuts) for each in body.operands))
