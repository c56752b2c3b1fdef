"""Cases of the ops of vision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from heliograph_backends.conformance.cases.forms import (
    EVERY_BLOCK,
    FLOATS,
    NARROW,
    PLAIN,
    STRIDES,
    Cases,
    c,
    laid,
    width,
)
from heliograph_backends.conformance.harness.case import OpCase, t
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import DTYPES

MIXED = (("f16", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f64", "f64"))
#: Sizes, kernel, stride, padding, dilation.
PLANES = (
    ((1, 1), (1, 1), (), (), ()), ((5, 7), (3, 3), (2, 1), (1, 2), (1, 2)),
    ((4, 3), (1, 1), (3, 2), (5, 2), ()), ((4, 9), (2, 5), (1, 4), (0, 3), (3, 1)),
    ((2, 2), (5, 5), (1, 1), (2, 2), (1, 1)), ((33, 35), (3, 3), (), (1, 1), ()),
)  # fmt: skip
LINES = (((7,), (3,), (), (), ()), ((7,), (3,), (2,), (1,), (2,)), ((3,), (5,), (1,), (4,), (1,)))
SPACES = (((3, 4, 3), (2, 2, 2), (), (), ()), ((3, 4, 5), (2, 1, 3), (1, 2, 1), (1, 0, 2), (2, 1, 1)))


def steps(form: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Return the given ones of stride, padding and dilation as attributes."""
    named = zip(("stride", "padding", "dilation"), form[2:], strict=True)
    return {name: numbers for name, numbers in named if numbers}


def im2col(op: str) -> Iterator[OpCase]:
    """Windows of one and two dimensions."""
    yield from laid(c(op, t("f32", 4, 3, 3, 2), t("f32", 2, 3, 5, 6)), STRIDES, (1,))
    for sizes, kernel, *rest in (*PLANES, *LINES):
        attributes = steps((sizes, kernel, *rest))
        yield c(op, t("f32", 4, 3, *kernel), t("f32", 2, 3, *sizes), **attributes)
    for name, target in product(FLOATS, ("f32", "f16")):
        yield c(op, t("f32", 4, 3, 3, 3), t(name, 2, 3, 5, 7), padding=(1, 2), dtype=DTYPES[target])
    for name in (*NARROW, *EVERY_BLOCK):
        size = width(name)
        yield c(op, t(name, 4, 3, 2, size, kind=LeafKind.WEIGHT), t("f32", 2, 3, 3, size + 1))


def im2col_3d(op: str) -> Iterator[OpCase]:
    """Windows of three dimensions."""
    yield from laid(c(op, t("f32", 6, 2, 2, 2), t("f32", 6, 3, 4, 3), channels=3), STRIDES, (1,))
    for name, form in product(FLOATS, SPACES):
        sizes, kernel = form[:2]
        yield c(op, t(name, 2, *kernel), t(name, 2, *sizes), channels=1, **steps(form))
    for name, target in product(("f16", "q8_0", "q4_k"), ("f32", "f16")):
        stored = t(name, 2, 1, 2, width(name))
        yield c(op, stored, t("f32", 2, 2, 3, width(name) + 2), channels=1, dtype=DTYPES[target])


def convolution(op: str) -> Iterator[OpCase]:
    """Kernels as inputs and as weights."""
    kernel, data = ((3, 1), (2, 3)) if op == "conv_2d_dw" else ((4, 3), (2, 3))
    yield from laid(c(op, t("f32", *kernel, 3, 2), t("f32", *data, 5, 6)), STRIDES)
    for form in PLANES:
        sizes, taps = form[:2]
        for kind in (LeafKind.INPUT, LeafKind.WEIGHT):
            yield c(op, t("f32", *kernel, *taps, kind=kind), t("f32", *data, *sizes), **steps(form))
    for left, right in MIXED:
        yield c(op, t(left, *kernel, 3, 3), t(right, *data, 5, 7), padding=(1, 1))
    for groups in (2, 4) if op == "conv_2d" else ():
        yield c(op, t("f32", 8, 4 // groups, 3, 3), t("f32", 2, 4, 5, 7), groups=groups)


def transposed(op: str) -> Iterator[OpCase]:
    """Strides smaller than, equal to and larger than the kernel."""
    flat = op == "conv_transpose_1d"

    def case(
        sizes: tuple[int, ...], taps: tuple[int, ...], step: int, left: str = "f32", right: str = "f32"
    ) -> OpCase:
        if flat:
            return c(op, t(left, 3, 4, taps[1]), t(right, 3, sizes[1]), stride=step)
        return c(op, t(left, 3, 4, *taps), t(right, 2, 3, *sizes), stride=step)

    yield from laid(case((4, 5), (3, 2), 2), STRIDES)
    for (sizes, taps), step in product((((4, 3), (3, 2)), ((1, 1), (1, 1)), ((2, 17), (4, 4))), (1, 2, 5)):
        yield case(sizes, taps, step)
    for left, right in MIXED:
        yield case((3, 4), (3, 2), 2, left, right)


def pool(op: str) -> Iterator[OpCase]:
    """The maximum and the mean."""
    forms: tuple[tuple[tuple[int, ...], ...], ...] = (
        (((7,), (3,), (), ()), ((7,), (3,), (2,), (1,)), ((3,), (3,), (1,), (1,)))
        if op == "pool_1d"
        else (((5, 6), (3, 2), (), ()), ((5, 7), (3, 3), (2, 1), (1, 2)), ((33, 35), (2, 2), (2, 2), ()))
    )
    for average in (False, True):
        sizes, kernel = forms[0][:2]
        yield from laid(c(op, t("f32", 3, *sizes), kernel=kernel, average=average), STRIDES)
        for form in forms:
            for lead in ((), (2, 2)):
                attributes = {**steps((*form, ())), "average": average}
                yield c(op, t("f32", *lead, *form[0]), kernel=form[1], **attributes)
        for name in FLOATS[1:]:
            yield c(op, t(name, 3, *sizes), kernel=kernel, average=average)


def upscale(op: str) -> Iterator[OpCase]:
    """To larger and smaller sizes, in all modes."""
    forms = (
        ((3, 4), (7, 9)),
        ((5, 6), (2, 3)),
        ((1, 1), (3, 2)),
        ((2, 1, 3, 4), (4, 3, 5, 8)),
        ((4, 3), (1, 1)),
    )
    for mode, corners in product((0, 1, 2), (False, True)):
        first = c(op, t("f32", 3, 4), shape=(6, 8), mode=mode, align_corners=corners)
        yield from laid(first, () if corners else ("spaced", "permute"))
        for shape, target in forms:
            yield c(op, t("f32", *shape), shape=target, mode=mode, align_corners=corners)
    for name in FLOATS[1:]:
        yield c(op, t(name, 3, 4), shape=(7, 9), mode=1)


def pad(op: str) -> Iterator[OpCase]:
    """Zeros, or copies of the tensor itself."""
    forms = (
        ((3,), (7,), (8,)), ((), (), ()), ((2, 1, 2), (0, 2, 1), (0, 0, 1)),
        ((1, 1, 1, 1, 2), (1, 0, 0, 1, 0), (0, 0, 2, 0, 0)), ((65, 33), (3, 1), (2, 5)),
    )  # fmt: skip
    for circular in (False, True):
        yield from laid(c(op, t("f32", 3, 4), left=(1, 0), right=(2, 5), circular=circular), STRIDES)
        for shape, left, right in forms:
            yield c(op, t("f32", *shape), left=left, right=right, circular=circular)
    for name in PLAIN[1:]:
        yield c(op, t(name, 3, 4), left=(1, 0), right=(2, 5))
    yield c(op, t("f32", 0, 3), left=(1, 0), right=(1, 0))


def pad_reflect_1d(op: str) -> Iterator[OpCase]:
    """Mirrored rows."""
    yield from laid(c(op, t("f32", 3, 7), left=4, right=6), STRIDES)
    for shape, left, right in (((5,), 4, 4), ((2, 3), 0, 1), ((2, 1), 0, 0), ((0, 3), 1, 1)):
        yield c(op, t("f32", *shape), left=left, right=right)
    for name in PLAIN[1:]:
        yield c(op, t(name, 2, 5), left=1, right=4)


def roll(op: str) -> Iterator[OpCase]:
    """Shifts of any size and sign."""
    yield from laid(c(op, t("f32", 7, 33), shifts=(2, -5)), STRIDES)
    for shape, shifts in (
        ((5,), (-12,)),
        ((3, 4), (1, -1)),
        ((2, 0), (5, 5)),
        ((), ()),
        ((4, 3), (2**63 - 1, 0)),
    ):
        yield c(op, t("f32", *shape), shifts=shifts)
    for name in PLAIN[1:]:
        yield c(op, t(name, 3, 4), shifts=(1, 2))


CASES: Mapping[str, Cases] = {
    "im2col": im2col, "im2col_3d": im2col_3d, **dict.fromkeys(("conv_2d", "conv_2d_dw"), convolution),
    **dict.fromkeys(("conv_transpose_1d", "conv_transpose_2d"), transposed),
    **dict.fromkeys(("pool_1d", "pool_2d"), pool), "upscale": upscale, "pad": pad,
    "pad_reflect_1d": pad_reflect_1d, "roll": roll,
}  # fmt: skip
