"""Cases of matrix products and attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from heliograph_backends.conformance.cases.forms import (
    EVERY_BLOCK,
    FLOATS,
    INTEGERS,
    STRIDES,
    TAKEN,
    Cases,
    c,
    laid,
    outside,
    width,
)
from heliograph_backends.conformance.harness.case import CaseOperand, OpCase, t
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import dtype

WEIGHT = LeafKind.WEIGHT
#: Data types of two operands of a product.
MIXED = (("f16", "f32"), ("bf16", "f32"), ("f32", "f16"), ("f16", "f16"), ("bf16", "bf16"), ("f64", "f64"))


def matmul(op: str) -> Iterator[OpCase]:
    """The array API's product; with a weight on either side."""
    yield from laid(c(op, t("f32", 7, 33), t("f32", 33, 9)), (*STRIDES, "repeated", *TAKEN))
    forms = (
        ((65, 33), (33, 70)), ((1, 1), (1, 1)), ((1, 129), (129, 1)), ((2, 0), (0, 3)), ((0, 4), (4, 3)),
        ((2, 1, 4, 8), (3, 8, 5)), ((3, 4, 1), (1, 6)), ((2, 3), (4, 3, 40)), ((1, 300), (300, 257)),
        ((2, 1, 2, 1, 2, 1, 3, 4), (2, 1, 2, 1, 3, 4, 5)), ((131, 259), (259, 261)),
    )  # fmt: skip
    for left, right in forms:
        yield c(op, t("f32", *left), t("f32", *right))
        if min(left + right):
            yield c(op, t("f32", *left), t("f32", *right, kind=WEIGHT))
    yield c(op, t("f32", 5, 33, kind=WEIGHT), t("f32", 33, 9))
    for name in FLOATS[1:]:
        yield c(op, t(name, 5, 33), t(name, 33, 9))
        yield c(op, t(name, 5, 33), t(name, 33, 9, kind=WEIGHT))
    for name in INTEGERS:
        yield c(op, t(name, 5, 33, fill="wide"), t(name, 2, 33, 9, fill="wide"))
    yield c(op, t("f32", 6, 37, fill="spoiled"), t("f32", 37, 5))


#: Weights [.., n, k] and activations [.., m, k].
PRODUCTS = (
    ((70, 33), (65, 33)), ((1, 1), (1, 1)), ((129, 1), (1, 1)), ((3, 0), (2, 0)), ((4, 3), (0, 3)),
    ((0, 3), (4, 3)), ((5, 8), (2, 3, 4, 8)), ((2, 5, 8), (4, 3, 8)), ((2, 3, 5, 8), (4, 6, 1, 8)),
    ((0, 2, 3), (0, 1, 3)), ((1, 2, 1, 1, 3, 4), (2, 1, 2, 2, 1, 3, 2, 4)), ((261, 259), (131, 259)),
    ((300, 256), (1, 256)),
)  # fmt: skip


def mul_mat(op: str) -> Iterator[OpCase]:
    """Weights of every type, bound and as inputs; matrices that repeat."""
    yield from laid(c(op, t("f32", 7, 33), t("f32", 5, 33)), (*STRIDES, "repeated", *TAKEN))
    for left, right in PRODUCTS:
        yield c(op, t("f32", *left), t("f32", *right))
        yield c(op, t("f32", *left, kind=WEIGHT), t("f32", *right))
    for (left_name, right_name), kind in product(MIXED, (LeafKind.INPUT, WEIGHT)):
        yield c(op, t(left_name, 19, 33, kind=kind), t(right_name, 5, 33))
        yield c(op, t(left_name, 2, 5, 8, kind=kind), t(right_name, 4, 3, 8))
    for name in EVERY_BLOCK:
        yield from _blocks(op, name)
    for name in EVERY_BLOCK:
        size = max(32, dtype(name).block_size)
        forms = (
            ((7, 2 * size), (5, 2 * size)), ((33, 256), (1, 256)), ((2, 5, 3 * size), (4, 3, 3 * size)),
            ((48, 256), (9, 256)),
        )  # fmt: skip
        for form in forms:
            for kind in (WEIGHT, LeafKind.INPUT):
                yield c(op, t(name, *form[0], kind=kind), t("q8_0", *form[1]))


def _blocks(op: str, name: str) -> Iterator[OpCase]:
    size = max(32, dtype(name).block_size)
    for kind in (WEIGHT, LeafKind.INPUT):
        yield c(op, t(name, 64, 256, kind=kind), t("f32", 5, 256))
        yield c(op, t(name, 7, size, kind=kind), t("f32", 1, size))
        yield c(op, t(name, 2, 5, 3 * size, kind=kind), t("f32", 4, 3, 3 * size))
    yield c(op, t(name, 1, size, kind=WEIGHT), t("f32", 3, size))
    # More than one slice of k.
    depth = 17 * 32 if size == 32 else 5 * size
    yield c(op, t(name, 131, depth, kind=WEIGHT), t("f32", 33, depth))
    yield c(op, t(name, 9, 2 * size, kind=WEIGHT), t("f16", 5, 2 * size))
    yield c(op, t(name, 0, size, kind=WEIGHT), t("f32", 3, size))
    yield from laid(c(op, t(name, 9, 2 * size, kind=WEIGHT), t("f32", 5, 2 * size)), (*STRIDES, *TAKEN), (1,))


def mul_mat_id(op: str) -> Iterator[OpCase]:
    """Experts, some of them unused."""
    first = _experts(op, "f32", "f32", (4, 5, 33, 3, 2, 1))
    yield from laid(first, ("spaced", "permute", *TAKEN))
    forms = (
        (4, 5, 6, 3, 2, 2),
        (1, 3, 2, 1, 1, 1),
        (8, 2, 33, 7, 4, 2),
        (3, 2, 2, 0, 2, 1),
        (6, 65, 130, 33, 2, 1),
    )
    for form in forms:
        yield _experts(op, "f32", "f32", form)
        yield _experts(op, "f32", "f32", form, WEIGHT)
    for left, right in MIXED:
        yield _experts(op, left, right, (4, 5, 33, 3, 2, 1), WEIGHT)
    for name in EVERY_BLOCK:
        size = max(32, dtype(name).block_size)
        yield _experts(op, name, "f32", (4, 5, 2 * size, 3, 2, 1), WEIGHT)
        yield _experts(op, name, "f32", (6, 33, 256, 9, 2, 2), WEIGHT)
        yield _experts(op, name, "f32", (16, 70, size, 1, 4, 1), WEIGHT)
    for name in EVERY_BLOCK:
        yield _experts(op, name, "q8_0", (4, 5, 512, 3, 2, 1), WEIGHT)
        yield _experts(op, name, "q8_0", (6, 32, 256, 9, 2, 2), WEIGHT)


def _experts(
    op: str, left: str, right: str, form: tuple[int, ...], kind: LeafKind = LeafKind.INPUT
) -> OpCase:
    count, n, k, tokens, used, own = form
    ids = t("i32", tokens, used, fill=f"below {count}")
    return c(op, t(left, count, n, k, kind=kind), t(right, tokens, own, k), ids)


def out_prod(op: str) -> Iterator[OpCase]:
    """Sums of outer products."""
    yield from laid(c(op, t("f32", 33, 7), t("f32", 33, 5)), (*STRIDES, *TAKEN))
    forms = (
        ((1, 1), (1, 1)), ((0, 2), (0, 3)), ((2, 5, 3), (4, 5, 2)), ((5, 3), (2, 2, 5, 4)),
        ((1, 2, 9, 17), (3, 4, 9, 16)), ((131, 65), (131, 129)),
    )  # fmt: skip
    for first, second in forms:
        yield c(op, t("f32", *first), t("f32", *second))
    for left, right in MIXED:
        yield c(op, t(left, 33, 7), t(right, 33, 5))
    for name in EVERY_BLOCK:
        yield c(op, t(name, 5, width(name), kind=WEIGHT), t("f32", 5, 3))


def _attention(form: tuple[int, ...], name: str = "f32", keys: str = "") -> tuple[CaseOperand, ...]:
    """Return q, k and v; the form is batch, heads, heads of the keys, rows, keys, width, width of
    the values."""
    batch, heads, kv, m, n, d, dv = form
    keys = keys or name
    return t(name, batch, heads, m, d), t(keys, batch, kv, n, d), t(keys, batch, kv, n, dv)


def flash_attn_ext(op: str) -> Iterator[OpCase]:
    """Heads that share keys, masks, slopes, caps, sinks."""
    form = (2, 4, 2, 5, 9, 24, 16)
    shown = t("f16", 5, 9, fill="mask")
    yield from laid(
        c(op, *_attention(form), scale=0.25), ("transposed", "spaced", "permute", "slice", *TAKEN)
    )
    yield from laid(c(op, *_attention(form), shown, scale=0.25), ("spaced", "permute", "repeated"), (3,))
    yield c(op, *_attention(form), t("f32", 2, 1, 5, 9, fill="bias"), scale=0.25, max_bias=8.0)
    yield c(op, *_attention(form), shown, t("f32", 4), scale=0.25)
    yield c(op, *_attention(form), t("f16", 5, 9, fill="hiding"), scale=0.25)
    yield c(op, *_attention(form), scale=0.25, logit_softcap=2.0)
    for other in (
        (1, 1, 1, 1, 1, 1, 1),
        (2, 4, 2, 5, 9, 16, 8),
        (1, 3, 1, 1, 65, 64, 64),
        (0, 2, 1, 3, 4, 8, 8),
        (1, 8, 2, 65, 129, 64, 64),
    ):
        yield c(op, *_attention(other), scale=0.5)
    for size in (64, 80, 96, 112, 128, 192, 256):
        for keys, rows in (("f32", 1), ("f16", 1), ("f32", 6), ("f16", 6)):
            mask = t("f16", rows, 150, fill="mask")
            yield c(op, *_attention((1, 4, 2, rows, 150, size, size), "f32", keys), mask, scale=size**-0.5)
    for name, keys in (("f32", "f16"), ("f16", "f16"), ("bf16", "bf16"), ("f64", "f64")):
        mask = t("f64" if name == "f64" else "f16", 5, 9, fill="mask")
        yield c(op, *_attention(form, name, keys), mask, scale=0.25)
    for blocks in EVERY_BLOCK:
        size = width(blocks)
        for rows in (1, 5):
            yield c(op, *_attention((1, 4, 2, rows, 33, size, size), "f32", blocks), scale=size**-0.5)
        q, k, v = _attention((1, 4, 2, 5, 33, size, size), "f32", blocks)
        mask = t("f16", 5, 33, fill="mask")
        yield c(op, q, k, v, mask, t("f32", 4), scale=size**-0.5, max_bias=4.0, logit_softcap=2.0)


def flash_attn_paged(op: str) -> Iterator[OpCase]:
    """Pages of several sizes, in the order of a cache and in their own; tables that share pages."""
    plain = _pages(op, (2, 4, 2, 5, 3, 16, 4, 7))
    yield from laid(plain, ("transposed", "spaced", "permute", "slice", *TAKEN), (0, 1, 2))
    yield from laid(plain, ("spaced", "permute", "repeated"), (3, 4))
    for form in (
        (1, 1, 1, 1, 1, 8, 1, 1),
        (3, 8, 2, 1, 9, 64, 32, 5),
        (8, 4, 4, 1, 20, 64, 16, 9),
        (2, 4, 2, 70, 4, 64, 32, 5),
        (1, 6, 3, 3, 7, 24, 5, 30),
        (2, 2, 1, 1, 5, 64, 128, 3),
        (0, 2, 1, 3, 4, 8, 8, 2),
    ):
        yield _pages(op, form)
        yield _pages(op, form, "f16")
    form = (3, 4, 2, 2, 6, 64, 16, 5)
    for keys in ("f16", "bf16", "q8_0", "q4_0"):
        for mask in ("mask", "hiding", "bias"):
            yield _pages(op, form, keys, mask)
        yield _pages(op, form, keys, sinks=True, max_bias=4.0, logit_softcap=2.0)
    yield _pages(op, form, table="zero")
    for wrong in (6, -1, 2**31 - 1):
        yield from outside(_pages(op, form, table=f"outside {wrong}"))


def _pages(
    op: str,
    form: tuple[int, ...],
    keys: str = "f32",
    mask: str = "mask",
    *,
    table: str = "",
    sinks: bool = False,
    **attributes: float,
) -> OpCase:
    """The form is batch, heads, heads of the keys, rows, pages in all, width, positions of a page,
    pages of a row."""
    batch, heads, kv, m, count, d, page, used = form
    operands = [t("f32", batch, heads, m, d), t(keys, count, kv, page, d), t(keys, count, kv, page, d)]
    operands.append(t("f16", batch, 1, m, used * page, fill=mask))
    operands.append(t("i32", batch, used, fill=table or f"below {count}"))
    operands += [t("f32", heads)] if sinks else []
    return c(op, *operands, scale=d**-0.5, **attributes)


CASES: Mapping[str, Cases] = {
    "matmul": matmul, "mul_mat": mul_mat, "mul_mat_id": mul_mat_id, "out_prod": out_prod,
    "flash_attn_ext": flash_attn_ext, "flash_attn_paged": flash_attn_paged,
}  # fmt: skip
