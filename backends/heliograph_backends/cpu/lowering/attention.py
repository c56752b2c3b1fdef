"""Attention as one native step. Pure.

Several heads of the queries may share one of keys and values, so heads are split in two dimensions:
the keys' head, and the query heads that share it. With a single query, the heads that share keys
become the rows of the step and so read the keys once.

Keys and values in pages (flash_attn_paged) belong to no batch: the tables of each row of the batch
name its pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import BYTES, FLOAT32
from heliograph_backends.cpu.lowering.moves import is_dense
from heliograph_backends.cpu.lowering.products import STORED
from heliograph_backends.reference.attention import alibi_slopes
from heliograph_proto.graph import Node
from heliograph_proto.types import F32, DType, TensorType

OPS = ("flash_attn_ext", "flash_attn_paged")
#: Elements of a vector: values are summed by whole vectors.
VECTOR = 16
#: The most heads with slopes: each has a word in the step.
MOST_SLOPES = 4096
#: The largest width of rows whose blocks of keys and values fit into a worker's scratch.
MOST_WIDTH = 1024
MASKS = {"f32": int(BYTES[4]), "f16": int(k.Conversion.F16_F32)}
#: The places of operands that belong to keys: keys, values and tables of pages.
OF_KEYS = (1, 2, 6)
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


class Operands(NamedTuple):
    """The operands of attention by name, as types, strides or places."""

    queries: Any
    keys: Any
    values: Any
    mask: Any = None
    sinks: Any = None
    pages: Any = None


def named(node: Node, found: Sequence[Any]) -> Operands:
    """Return a node's operands, or what belongs to them, by name."""
    if node.op != "flash_attn_paged":
        return Operands(*found)
    q, k, v, mask, pages, *sinks = found
    return Operands(q, k, v, mask, sinks[0] if sinks else None, pages)


def cut_of(found: Operands) -> Cut:
    """Return the split for operands of these types, of which none is empty."""
    queries, (batch, heads, *_) = found.queries.shape, found.keys.shape
    if found.pages is not None:
        batch = queries[0]
    return Cut(batch, queries[0] // batch, heads, queries[1] // heads)


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if the kernel runs attention of operands with these types and strides."""
    queries, keys, values, mask, sinks, pages = named(node, types)
    if queries.dtype is not F32 or node.type.dtype is not F32 or 0 in (*queries.shape, *keys.shape):
        return False
    if values.shape[-1] % VECTOR or max(keys.shape[-1], values.shape[-1]) > MOST_WIDTH:
        return False
    if keys.dtype.name not in STORED or form_of(values.dtype) is None:
        return False
    if not all(is_dense(*pair) for pair in zip(types, strides[:-1], strict=True)):
        return False
    if mask is not None and not _takes_mask(mask, queries):
        return False
    if node.attributes["max_bias"] and queries.shape[1] > MOST_SLOPES:
        return False
    if pages is not None and 0 in pages.shape:
        return False
    return sinks is None or sinks.dtype is F32


def form_of(dtype: DType) -> int | None:
    """Return the kernels' number of a data type of values; None if they have none."""
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
    found, of = named(node, places[:-1]), named(node, types)
    cut, rows = cut_of(of), of.queries.shape[-2]
    # The result is [batch, rows, heads, width], the operands [batch, heads, rows, width].
    batch, row, head, column = places[-1].strides
    result = places[-1]._replace(strides=(batch, head, row, column))
    form = _form(of, node.attributes, cut.shared((0, WORD_BYTES)) + (0,))
    if found.pages is not None:
        form = form._replace(pages=_pages(of, found))
        found = found._replace(keys=_in_page(found.keys), values=_in_page(found.values))
    operands: list[k.Operand | None] = [_cut(found.queries, cut)]
    operands += [_cut_own(each, cut) for each in (found.keys, found.values)]
    operands.append(_cut(result, cut))
    operands.append(_cut(_four(found.mask), cut) if found.mask else None)
    operands.append(_cut(_of_heads(found.sinks), cut) if found.sinks else None)
    operands.append(_cut_own(_of_batch(found.pages), cut) if found.pages else None)
    outer: tuple[int, ...] = cut
    if rows == 1 and cut.head_share > 1:
        rows, outer = cut.head_share, cut[:3]
        operands = [_with_heads_as_rows(each, place in OF_KEYS) for place, each in enumerate(operands)]
        form = form._replace(head_strides=form.head_strides[:-1])
    builder.attention(outer, rows, form, operands)


def _form(of: Operands, attributes: Mapping[str, Any], heads: Strides) -> k.Attention:
    slopes: tuple[float, ...] = ()
    if attributes["max_bias"]:
        slopes = tuple(alibi_slopes(numpy, of.queries.shape[1], attributes["max_bias"]).tolist())
    value_form = form_of(of.values.dtype)
    assert value_form is not None
    return k.Attention(
        keys=of.keys.shape[-2] if of.pages is None else of.mask.shape[-1],
        key_width=of.keys.shape[-1],
        value_width=of.values.shape[-1],
        key_form=STORED[of.keys.dtype.name],
        value_form=value_form,
        mask_conversion=MASKS[of.mask.dtype.name] if of.mask else 0,
        scale=float(attributes["scale"]),
        cap=float(attributes["logit_softcap"]),
        head_strides=heads,
        slopes=slopes,
    )


def _pages(of: Operands, found: Operands) -> k.Pages:
    count, _, keys, _ = of.keys.shape
    tables, of_table = of.pages.shape
    return k.Pages(
        keys=keys,
        pages=count,
        key_bytes=found.keys.strides[0],
        value_bytes=found.values.strides[0],
        tables=tables,
        table_bytes=found.pages.strides[0],
        of_table=of_table,
    )


def _in_page(operand: k.Operand) -> k.Operand:
    """Return keys or values of one page for all of the batch."""
    return operand._replace(strides=(0, *operand.strides[1:]))


def _of_batch(pages: k.Operand) -> k.Operand:
    """Repeat the tables over heads and rows."""
    batch, column = pages.strides
    return pages._replace(strides=(batch, 0, 0, column))


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
