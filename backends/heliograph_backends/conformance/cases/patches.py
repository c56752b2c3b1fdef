"""Cases of rarer ops of vision, and of the gradients of windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from heliograph_backends.conformance.cases.forms import FLOATS, PLAIN, STRIDES, TAKEN, Cases, c, laid
from heliograph_backends.conformance.cases.windows import LINES, PLANES, SPACES, steps
from heliograph_backends.conformance.harness.case import OpCase, t
from heliograph_proto.ops.table import infer


def conv_3d(op: str) -> Iterator[OpCase]:
    """Some images of some channels."""
    yield from laid(c(op, t("f32", 6, 2, 2, 2), t("f32", 6, 3, 4, 3), channels=3), STRIDES)
    for form in SPACES:
        sizes, kernel = form[:2]
        for n, channels, made in ((1, 1, 1), (2, 3, 4), (0, 2, 1)):
            operands = t("f32", made * channels, *kernel), t("f32", n * channels, *sizes)
            yield c(op, *operands, channels=channels, **steps(form))
    for left, right in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("f64", "f64")):
        yield c(op, t(left, 6, 2, 2, 2), t(right, 6, 3, 4, 3), channels=3)


def col2im_1d(op: str) -> Iterator[OpCase]:
    """Columns that are apart, adjacent and overlapping."""
    yield from laid(c(op, t("f32", 5, 12), channels=3, stride=2), STRIDES)
    for tokens, channels, taps, stride, padding in (
        (1, 1, 1, 1, 0),
        (5, 3, 4, 5, 3),
        (7, 1, 9, 1, 4),
        (33, 8, 16, 8, 4),
    ):
        yield c(op, t("f32", tokens, channels * taps), channels=channels, stride=stride, padding=padding)
    for name in FLOATS[1:]:
        yield c(op, t(name, 5, 12), channels=3, stride=2, padding=1)


def win_part(op: str) -> Iterator[OpCase]:
    """Windows that do and do not fill."""
    yield from laid(c(op, t("f32", 5, 7, 2), window=3), STRIDES)
    for shape, window in (((1, 1, 1), 4), ((4, 6, 3), 2), ((3, 5, 2), 1), ((0, 3, 2), 2), ((64, 64, 5), 14)):
        yield c(op, t("f32", *shape), window=window)
    for name in PLAIN[1:]:
        yield c(op, t(name, 5, 7, 2), window=3)


def win_unpart(op: str) -> Iterator[OpCase]:
    """Windows that do and do not fill."""
    yield from laid(c(op, t("f32", 6, 3, 3, 2), height=5, width=7), STRIDES)
    for shape, height, width in (((1, 4, 4, 1), 1, 1), ((6, 2, 2, 3), 4, 6), ((0, 2, 2, 2), 0, 3)):
        yield c(op, t("f32", *shape), height=height, width=width)
    for name in PLAIN[1:]:
        yield c(op, t(name, 6, 3, 3, 2), height=5, width=7)


def get_rel_pos(op: str) -> Iterator[OpCase]:
    """Distances of one place, and of many."""
    yield from laid(c(op, t("f32", 7, 5)), STRIDES)
    for shape in ((1, 3), (27, 64), (3, 0)):
        yield c(op, t("f32", *shape))
    for name in PLAIN[1:]:
        yield c(op, t(name, 7, 5))


def add_rel_pos(op: str) -> Iterator[OpCase]:
    """Scores of some windows."""

    def case(name: str, batch: int, height: int, width: int, size: int) -> OpCase:
        parts = [t(name, batch, height, width, size)] * 2
        return c(op, t(name, batch, height * width, size * size), *parts)

    yield from laid(case("f32", 2, 3, 4, 3), (*STRIDES, *TAKEN))
    for form in ((1, 1, 1, 1), (3, 2, 2, 5), (0, 2, 2, 2), (2, 14, 14, 14)):
        yield case("f32", *form)
    for name in FLOATS[1:]:
        yield case(name, 2, 3, 4, 3)


def im2col_back(op: str) -> Iterator[OpCase]:
    """Windows of one and two dimensions."""

    def case(form: tuple[tuple[int, ...], ...], left: str = "f32", right: str = "f32") -> OpCase:
        kernel, data = t(right, 4, 3, *form[1]), t(left, 2, 3, *form[0])
        forward, _ = infer("im2col", [kernel.type, data.type], steps(form))
        return c(op, t(left, *forward.shape), kernel, shape=data.type.shape, **steps(form))

    yield from laid(case(PLANES[1]), STRIDES, (0,))
    for form in (*PLANES, *LINES):
        yield case(form)
    for name in FLOATS[1:]:
        yield case(PLANES[1], name, "f64" if name == "f64" else "f32")


def pool_2d_back(op: str) -> Iterator[OpCase]:
    """The maximum and the mean."""
    forms: tuple[tuple[tuple[int, ...], ...], ...] = (
        ((5, 6), (3, 2), (), ()), ((5, 7), (3, 3), (2, 1), (1, 2)), ((33, 35), (2, 2), (2, 2), ()),
    )  # fmt: skip
    for average in (False, True):

        def case(name: str, form: tuple[tuple[int, ...], ...], *lead: int, average: bool = average) -> OpCase:
            x, given = t(name, *lead, *form[0]), {**steps((*form, ())), "kernel": form[1], "average": average}
            forward, _ = infer("pool_2d", [x.type], given)
            return c(op, t(name, *forward.shape), x, **given)

        yield from laid(case("f32", forms[0], 3), STRIDES)
        for form in forms:
            yield case("f32", form)
        for name in FLOATS[1:]:
            yield case(name, forms[1], 2, 2)


CASES: Mapping[str, Cases] = {
    "conv_3d": conv_3d, "col2im_1d": col2im_1d, "win_part": win_part, "win_unpart": win_unpart,
    "get_rel_pos": get_rel_pos, "add_rel_pos": add_rel_pos, "im2col_back": im2col_back,
    "pool_2d_back": pool_2d_back,
}  # fmt: skip
