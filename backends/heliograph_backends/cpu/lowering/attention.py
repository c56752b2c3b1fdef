"""Attention as one native step. Pure.

Several heads of the queries may share one of keys and values, so heads are split in two dimensions:
the keys' head, and the query heads that share it. With a single query, the heads that share keys
become the rows of the step and so read the keys once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import BYTES, FLOAT32
from heliograph_backends.cpu.lowering.moves import is_dense
from heliograph_backends.cpu.lowering.products import STORED
from heliograph_backends.reference.attention import alibi_slopes
from heliograph_proto.graph import Node
from heliograph_proto.types import F32, DType, TensorType

#: Elements of a vector: values are summed by whole vectors.
VECTOR = 16
#: The most heads with slopes: each has a word in the step.
MOST_SLOPES = 4096
#: The largest width of rows whose blocks of keys and values fit into a worker's scratch.
MOST_WIDTH = 1024
MASKS = {"f32": int(BYTES[4]), "f16": int(k.Conversion.F16_F32)}
WORD_BYTES = 8

Strides = tuple[int, ...]


class Cut(NamedTuple):
    """The split of [batch, heads] into [keys' batch, batch share, keys' heads, head share]."""

    batch: int
    batch_share: int
    heads: int
    head_share: int

    def shared(self, strides: Strides) -> Strides:
        """Return the strides of queries, target, mask and sinks from those over [batch, heads]."""
        batch, head = strides
        return batch * self.batch_share, batch, head * self.head_share, head

    def own(self, strides: Strides) -> Strides:
        """Return the strides of keys and values, which repeat over the shares."""
        return strides[0], 0, strides[1], 0


def cut_of(queries: TensorType, keys: TensorType) -> Cut:
    """Return the split for these queries and keys, of which none is empty."""
    batch, heads = keys.shape[:2]
    return Cut(batch, queries.shape[0] // batch, heads, queries.shape[1] // heads)


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if the kernel runs attention of operands with these types and strides."""
    queries, keys, values, *rest = types
    if queries.dtype is not F32 or node.type.dtype is not F32 or 0 in (*queries.shape, *keys.shape):
        return False
    if values.shape[-1] % VECTOR or max(keys.shape[-1], values.shape[-1]) > MOST_WIDTH:
        return False
    if any(form_of(each.dtype) is None for each in (keys, values)):
        return False
    if not all(is_dense(*pair) for pair in zip(types, strides[:-1], strict=True)):
        return False
    if rest and not _takes_mask(rest[0], queries):
        return False
    if node.attributes["max_bias"] and queries.shape[1] > MOST_SLOPES:
        return False
    return len(rest) < 2 or rest[1].dtype is F32


def form_of(dtype: DType) -> int | None:
    """Return the kernels' number of a data type of keys and values; None if they have none."""
    return FLOAT32 if dtype is F32 else STORED.get(dtype.name)


def _takes_mask(mask: TensorType, queries: TensorType) -> bool:
    """True if strides can express how a mask repeats."""
    leading = (1, 1, *mask.shape[:-2])[-2:]
    pairs = zip(leading, queries.shape[:2], strict=True)
    return mask.dtype.name in MASKS and mask.ndim <= 4 and all(size in (1, all_) for size, all_ in pairs)


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the step; `places`: operands, then the result, with stride 0 in repeated
    dimensions."""
    queries, keys, values = types[:3]
    q, key, value, *rest, result = places
    cut, rows = cut_of(queries, keys), queries.shape[-2]
    # The result is [batch, rows, heads, width], the operands [batch, heads, rows, width].
    batch, row, head, column = result.strides
    result = result._replace(strides=(batch, head, row, column))
    operands: list[k.Operand | None] = [_cut(q, cut), _cut_own(key, cut), _cut_own(value, cut)]
    operands.append(_cut(result, cut))
    operands.append(_cut(_four(rest[0]), cut) if rest else None)
    operands.append(_cut(_of_heads(rest[1]), cut) if len(rest) > 1 else None)
    heads = cut.shared((0, WORD_BYTES)) + (0,)
    outer: tuple[int, ...] = cut
    if rows == 1 and cut.head_share > 1:
        rows, outer = cut.head_share, cut[:3]
        operands = [_with_heads_as_rows(each, place in (1, 2)) for place, each in enumerate(operands)]
        heads = heads[:-1]
    builder.attention(outer, rows, _form(node, types, heads), operands)


def _form(node: Node, types: Sequence[TensorType], heads: Strides) -> k.Attention:
    queries, keys, values, *rest = types
    attributes, key_form, value_form = node.attributes, form_of(keys.dtype), form_of(values.dtype)
    assert key_form is not None and value_form is not None
    slopes: tuple[float, ...] = ()
    if attributes["max_bias"]:
        slopes = tuple(alibi_slopes(numpy, queries.shape[1], attributes["max_bias"]).tolist())
    return k.Attention(
        keys=keys.shape[-2],
        key_width=keys.shape[-1],
        value_width=values.shape[-1],
        key_form=key_form,
        value_form=value_form,
        mask_conversion=MASKS[rest[0].dtype.name] if rest else 0,
        scale=float(attributes["scale"]),
        cap=float(attributes["logit_softcap"]),
        head_strides=heads,
        slopes=slopes,
    )


def _cut(operand: k.Operand, cut: Cut) -> k.Operand:
    return operand._replace(strides=(*cut.shared(operand.strides[:2]), *operand.strides[2:]))


def _cut_own(operand: k.Operand, cut: Cut) -> k.Operand:
    return operand._replace(strides=(*cut.own(operand.strides[:2]), *operand.strides[2:]))


def _four(operand: k.Operand) -> k.Operand:
    return operand._replace(strides=(0,) * (4 - len(operand.strides)) + operand.strides)


def _of_heads(sinks: k.Operand) -> k.Operand:
    """Repeat the one number of each head over its rows."""
    return sinks._replace(strides=(0, *sinks.strides, 0, 0))


def _with_heads_as_rows(operand: k.Operand | None, of_keys: bool) -> k.Operand | None:
    """Turn the heads that share keys into rows, each with one query; rows of keys stay as they
    are."""
    if operand is None:
        return None
    *outer, head, row, column = operand.strides
    return operand._replace(strides=(*outer, row if of_keys else head, column))
