"""Cases of the ops of vision, whose references walk over every element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, PLAIN, Case, Cases, Refusal, data, t, wide

from heliograph_proto.types import DTYPES

MIXED = (("f32", "f32"), ("f16", "f32"), ("f16", "f16"), ("f64", "f64"))
#: Sizes, kernel, stride, padding, dilation.
PLANES: list[tuple[tuple[int, ...], ...]] = [
    ((5, 6), (3, 2), (), (), ()), ((1, 1), (1, 1), (), (), ()), ((5, 7), (3, 3), (2, 1), (1, 2), (1, 2)),
    ((4, 3), (1, 1), (3, 2), (5, 2), ()), ((4, 9), (2, 5), (1, 4), (0, 3), (3, 1)),
    ((2, 2), (5, 5), (1, 1), (2, 2), (1, 1)),
]  # fmt: skip
LINES: list[tuple[tuple[int, ...], ...]] = [
    ((7,), (3,), (), (), ()), ((7,), (3,), (2,), (1,), (2,)), ((3,), (5,), (1,), (4,), (1,)),
]  # fmt: skip
SPACES: list[tuple[tuple[int, ...], ...]] = [
    ((3, 4, 3), (2, 2, 2), (), (), ()), ((3, 4, 5), (2, 1, 3), (1, 2, 1), (1, 0, 2), (2, 1, 1)),
]  # fmt: skip


def numbers(form: tuple[tuple[int, ...], ...]) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Stride, padding and dilation in full, and as attributes."""
    count = len(form[0])
    full = [form[2] or (1,) * count, form[3] or (0,) * count, form[4] or (1,) * count]
    return full, dict(zip(("stride", "padding", "dilation"), form[2:], strict=True))


def windows(x: Array, form: tuple[tuple[int, ...], ...]) -> Array:
    """x [n, c, *sizes] to [n, c, *windows, *kernel], element by element; 0 outside."""
    (stride, padding, dilation), _ = numbers(form)
    sizes, kernel = x.shape[2:], form[1]
    counts = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]
    found = np.zeros((*x.shape[:2], *counts, *kernel))
    for place in np.ndindex(*counts, *kernel):
        at = [
            o * s - p + k * d
            for o, k, s, p, d in zip(
                place[: len(counts)], place[len(counts) :], stride, padding, dilation, strict=True
            )
        ]
        if all(0 <= i < size for i, size in zip(at, sizes, strict=True)):
            found[(slice(None), slice(None), *place)] = x[(slice(None), slice(None), *at)]
    return found


def im2col_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, form in itertools.product(FLOATS, (*PLANES, *LINES)):
        x, kernel = data(random, name, (2, 3, *form[0])), data(random, "f32", (4, 3, *form[1]))
        seen = np.moveaxis(windows(wide(x), form), 1, 1 + len(form[0]))
        rows = seen.reshape(*seen.shape[: 1 + len(form[0])], -1)
        for target in ("f32", "f16"):
            yield Case(op, [kernel, x], rows, {**numbers(form)[1], "dtype": DTYPES[target]})


def im2col_3d_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, form, (images, channels) in itertools.product(FLOATS, SPACES, ((1, 1), (2, 3))):
        x = data(random, name, (images * channels, *form[0]))
        kernel = data(random, name, (2 * channels, *form[1]))
        seen = np.moveaxis(windows(wide(x).reshape(images, channels, *form[0]), form), 1, 4)
        rows = seen.reshape(-1, *seen.shape[2:4], channels * math.prod(form[1]))
        yield Case(op, [kernel, x], rows, {**numbers(form)[1], "channels": channels})


def conv_2d_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for (left, right), form in itertools.product(MIXED, PLANES):
        x, kernel = data(random, right, (2, 3, *form[0])), data(random, left, (4, 3, *form[1]))
        expected = np.einsum("ncyxij,ocij->noyx", windows(wide(x), form), wide(kernel))
        yield Case(op, [kernel, x], expected, numbers(form)[1])
    for groups, form in itertools.product((2, 4), PLANES):
        x, kernel = data(random, "f32", (2, 4, *form[0])), data(random, "f32", (8, 4 // groups, *form[1]))
        seen = windows(wide(x), form)
        parts = zip(np.split(seen, groups, 1), np.split(wide(kernel), groups), strict=True)
        expected = np.concatenate([np.einsum("ncyxij,ocij->noyx", *part) for part in parts], 1)
        yield Case(op, [kernel, x], expected, {**numbers(form)[1], "groups": groups})
    nothing = [np.zeros((4, 0, 2, 2), np.float32), np.zeros((1, 0, 3, 3), np.float32)]
    yield Case(op, nothing, np.zeros((1, 4, 2, 2)))


def conv_2d_dw_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for (left, right), form in itertools.product(MIXED, PLANES):
        x, kernel = data(random, right, (2, 3, *form[0])), data(random, left, (3, 1, *form[1]))
        expected = np.einsum("ncyxij,cij->ncyx", windows(wide(x), form), wide(kernel)[:, 0])
        yield Case(op, [kernel, x], expected, numbers(form)[1])


def conv_transpose_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [((4, 3), (3, 2)), ((1, 1), (1, 1)), ((2, 5), (4, 4))]
    for (left, right), (sizes, taps), step in itertools.product(MIXED, forms, (1, 2, 5)):
        flat = op == "conv_transpose_1d"
        sizes, taps = (sizes[1:], taps[1:]) if flat else (sizes, taps)
        x, kernel = (
            data(random, right, (*(() if flat else (2,)), 3, *sizes)),
            data(random, left, (3, 4, *taps)),
        )
        images = wide(x)[None] if flat else wide(x)
        grown = [(size - 1) * step + tap for size, tap in zip(sizes, taps, strict=True)]
        expected = np.zeros((len(images), 4, *grown))
        for place, tap in itertools.product(np.ndindex(*sizes), np.ndindex(*taps)):
            at = tuple(p * step + k for p, k in zip(place, tap, strict=True))
            added = (
                images[(slice(None), slice(None), *place)] @ wide(kernel)[(slice(None), slice(None), *tap)]
            )
            expected[(slice(None), slice(None), *at)] += added
        yield Case(op, [kernel, x], expected[0] if flat else expected, {"stride": step})


def pool_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = LINES if op == "pool_1d" else PLANES
    for name, form, lead, average in itertools.product(FLOATS, forms, ((), (3,), (2, 2)), (False, True)):
        x = data(random, name, (*lead, *form[0]))
        plain = (*form[:4], ())
        sizes, kernel = form[0], form[1]
        if any(s + 2 * p < k for s, k, p in zip(sizes, kernel, numbers(plain)[0][1], strict=True)):
            continue
        axes = tuple(range(-len(kernel), 0))
        seen = windows(wide(x).reshape(1, -1, *sizes), plain)
        there = windows(np.ones((1, 1, *sizes)), plain)
        lowest = float(np.finfo(np.float64 if name == "f64" else np.float32).min)
        counted = np.maximum(there.sum(axes), 1) if op == "pool_1d" else math.prod(kernel)
        pooled = seen.sum(axes) / counted if average else np.where(there > 0, seen, lowest).max(axes)
        expected = pooled.reshape(*lead, *pooled.shape[2:])
        attributes = {k: v for k, v in numbers(plain)[1].items() if k != "dilation"}
        # The lowest number is no reference for an error relative to all elements.
        if average or not (there.sum(axes) == 0).any():
            yield Case(op, [x], expected, {**attributes, "kernel": kernel, "average": average})


def upscale_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [((3, 4), (6, 8)), ((3, 4), (7, 9)), ((5, 6), (2, 3)), ((1, 1), (3, 2)),
             ((2, 1, 3, 4), (4, 3, 5, 8)), ((4, 3), (1, 1)), ((2, 3, 3), (2, 3, 3))]  # fmt: skip
    for name, (shape, target), mode, corners in itertools.product(FLOATS, forms, (0, 1, 2), (False, True)):
        x = data(random, name, shape)
        expected = np.zeros(target)
        for place in np.ndindex(target):
            expected[place] = upscaled(wide(x), place, target, mode, corners)
        yield Case(op, [x], expected, {"shape": target, "mode": mode, "align_corners": corners})
    for (shape, target), corners in itertools.product([*forms, ((9, 13), (3, 2))], (False, True)):
        x = data(random, "f32", shape)
        expected = np.zeros(target)
        for place in np.ndindex(target):
            expected[place] = antialiased(wide(x), place, target, corners)
        attributes = {"shape": target, "mode": 1, "align_corners": corners, "antialias": True}
        yield Case(op, [x], expected, attributes)


def upscaled(x: Array, place: Sequence[int], target: Sequence[int], mode: int, corners: bool) -> float:
    """One element, as ggml computes it."""
    factors = [size / have for size, have in zip(target, x.shape, strict=True)]
    for axis in (-1, -2):
        if corners and target[axis] > 1 and x.shape[axis] > 1:
            factors[axis] = (target[axis] - 1) / (x.shape[axis] - 1)
    at = [int(i / factor + 1e-9) for i, factor in zip(place, factors, strict=True)]
    if mode == 0:
        return float(x[tuple(at)])
    offset, total = 0.0 if corners else 0.5, 0.0
    sides = []
    for axis in (-2, -1):
        y = (place[axis] + offset) / factors[axis] - offset
        if mode == 2:
            sides.append(cubic(y, x.shape[axis]))
            continue
        low = min(max(math.floor(y), 0), x.shape[axis] - 1)
        high = min(max(math.floor(y) + 1, 0), x.shape[axis] - 1)
        part = min(max(y - low, 0.0), 1.0)
        sides.append([(low, 1 - part), (high, part)])
    for (row, down), (column, across) in itertools.product(*sides):
        total += float(x[(*at[:-2], row, column)]) * down * across
    return total


def antialiased(x: Array, place: Sequence[int], target: Sequence[int], corners: bool) -> float:
    """One element of ggml's bilinear mode with its antialiasing flag."""
    at = [i * have // size for i, have, size in zip(place, x.shape, target, strict=True)]
    offset, sides = 0.0 if corners else 0.5, []
    for axis in (-2, -1):
        have, size = x.shape[axis], target[axis]
        factor = (size - 1) / (have - 1) if corners and min(have, size) > 1 else size / have
        centre, support = (place[axis] + offset) / factor, max(1.0, 1 / factor)
        covered = range(max(0, int(centre - support + offset)), min(have, int(centre + support + offset)))
        weights = [(i, max(0.0, 1 - abs((i - centre + offset) / support))) for i in covered]
        sides.append(weights)
    value = total = 0.0
    for (row, down), (column, across) in itertools.product(*sides):
        value += float(x[(*at[:-2], row, column)]) * down * across
        total += down * across
    return value / total if total else value


def cubic(y: float, size: int) -> list[tuple[int, float]]:
    """The neighbours of a place and their weights, as in ggml's bicubic."""
    a, low = -0.75, math.floor(y)
    d = y - low
    near = [((a + 2) * z - (a + 3)) * z * z + 1 for z in (d, 1 - d)]
    far = [((a * z - 5 * a) * z + 8 * a) * z - 4 * a for z in (d + 1, 2 - d)]
    weights = (far[0], near[0], near[1], far[1])
    return [(min(max(low + i - 1, 0), size - 1), weight) for i, weight in enumerate(weights)]


def pad_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [((3, 4), (1, 0), (2, 5)), ((3,), (7,), (8,)), ((), (), ()), ((2, 1, 2), (0, 2, 1), (0, 0, 1)),
             ((1, 1, 1, 1, 2), (1, 0, 0, 1, 0), (0, 0, 2, 0, 0))]  # fmt: skip
    for name, (shape, left, right), circular in itertools.product(PLAIN, forms, (False, True)):
        x = data(random, name, shape)
        widths = list(zip(left, right, strict=True))
        around = {"mode": "wrap"} if circular else {"mode": "constant"}
        expected = wide(np.pad(x, widths, **around)) if shape else wide(x)  # type: ignore[call-overload]
        yield Case(op, [x], expected, {"left": left, "right": right, "circular": circular})
    empty = {"left": (0, 2), "right": (0, 2**30)}
    yield Case(op, [np.zeros((0, 3), np.float32)], np.zeros((0, 5 + 2**30)), empty)
    yield Case(op, [np.zeros((0, 3), np.float32)], np.zeros((2, 3)), {"left": (1, 0), "right": (1, 0)})


def pad_reflect_1d_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (shape, left, right) in itertools.product(
        PLAIN, [((5,), 4, 4), ((2, 3), 0, 1), ((2, 1), 0, 0)]
    ):
        x = data(random, name, shape)
        widths = [(0, 0)] * (len(shape) - 1) + [(left, right)]
        yield Case(op, [x], wide(np.pad(x, widths, mode="reflect")), {"left": left, "right": right})


def roll_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        ((5,), (2,)),
        ((5,), (-12,)),
        ((3, 4), (1, -1)),
        ((2, 0), (5, 5)),
        ((), ()),
        ((4, 3), (2**63 - 1, 0)),
    ]
    for name, (shape, shifts) in itertools.product(PLAIN, forms):
        x = data(random, name, shape)
        expected = wide(x).copy() if shape else wide(x)
        for place in np.ndindex(shape if shape else (0,)):
            to = tuple((p + s) % size for p, s, size in zip(place, shifts, shape, strict=True))
            expected[to] = wide(x)[place]
        yield Case(op, [x], expected, {"shifts": shifts})


CASES: dict[str, Cases] = {
    "im2col": im2col_cases,
    "im2col_3d": im2col_3d_cases,
    "conv_2d": conv_2d_cases,
    "conv_2d_dw": conv_2d_dw_cases,
    "conv_transpose_1d": conv_transpose_cases,
    "conv_transpose_2d": conv_transpose_cases,
    "pool_1d": pool_cases,
    "pool_2d": pool_cases,
    "upscale": upscale_cases,
    "pad": pad_cases,
    "pad_reflect_1d": pad_reflect_1d_cases,
    "roll": roll_cases,
}

F = "f32"
K, X = t(F, 4, 3, 2, 2), t(F, 1, 3, 5, 5)


def conv(what: str, message: str, *types: Any, **attributes: Any) -> Refusal:
    return (what, "conv_2d", list(types or (K, X)), attributes, message)


REFUSED: list[Refusal] = [
    conv("a stride of 0", "stride is 0", stride=(1, 0)),
    conv("a stride back", "stride is -1", stride=(-1, 1)),
    conv("a huge stride", "stride is 2147483648", stride=(2**31, 1)),
    conv("a negative pad", "padding is -1", padding=(0, -1)),
    conv("a huge pad", "padding is 2147483648", padding=(0, 2**31)),
    conv("a dilation of 0", "dilation is 0", dilation=(0, 1)),
    conv("a stride for one side", "2 numbers needed", stride=(1,)),
    conv("a window too large", "does not fit", dilation=(5, 1)),
    conv("a kernel of nothing", "does not fit", t(F, 4, 3, 0, 2), X),
    conv("an image of nothing", "does not fit", K, t(F, 1, 3, 0, 5), padding=(9, 9)),
    conv("other channels", "3 and 2 channels", K, t(F, 1, 2, 5, 5)),
    conv("no group", "groups is 0", groups=0),
    conv("groups that do not divide", "are not 3 equal groups", groups=3),
    conv("channels of groups", "6 and 3 channels", groups=2),
    conv("a kernel as a matrix", "4 dimensions needed", t(F, 2, 2), X),
    conv("an image of integers", "takes float", K, t("i32", 1, 3, 5, 5)),
    conv("a result past 2**63", "passes 2**63", t(F, 2**20, 3, 1, 1), X, padding=(2**30, 2**30)),
    ("a depthwise kernel of two", "conv_2d_dw", [t(F, 3, 2, 1, 1), X], {}, "must be 1"),
    ("depthwise channels", "conv_2d_dw", [t(F, 4, 1, 1, 1), X], {}, "4 and 3 channels"),
    ("a window of 2 and 3 dimensions", "im2col", [t(F, 1, 1, 2), X], {}, "3 or 4 dimensions"),
    ("windows of integers", "im2col", [K, X], {"dtype": DTYPES["i8"]}, "a float is needed"),
    ("no channels", "im2col_3d", [K, X], {"channels": 0}, "channels is 0"),
    ("channels that do not divide", "im2col_3d", [K, X], {"channels": 3}, "do not have 3 channels"),
    ("a transposed stride of 0", "conv_transpose_2d", [t(F, 3, 4, 2, 2), X], {"stride": 0}, "stride is 0"),
    ("transposed channels", "conv_transpose_2d", [t(F, 4, 3, 2, 2), X], {}, "4 and 3 channels"),
    ("a transposed nothing", "conv_transpose_1d", [t(F, 3, 4, 0), t(F, 3, 5)], {}, "no size may be 0"),
    ("a transposed batch", "conv_transpose_1d", [t(F, 3, 4, 2), t(F, 1, 3, 5)], {}, "needed"),
    ("a pool of two sizes", "pool_1d", [t(F, 5)], {"kernel": (2, 2)}, "1 numbers needed"),
    ("a pool of 0", "pool_2d", [t(F, 5, 5)], {"kernel": (0, 2)}, "kernel is 0"),
    ("a huge pool", "pool_1d", [t(F, 5)], {"kernel": (2**31,), "padding": (2**31 - 1,)}, "kernel is"),
    ("a pool that does not fit", "pool_1d", [t(F, 5)], {"kernel": (8,), "padding": (1,)}, "does not fit"),
    ("a pool of a row", "pool_2d", [t(F, 5)], {"kernel": (1, 1)}, "at least 2"),
    ("a scale of no mode", "upscale", [t(F, 2, 2)], {"shape": (4, 4), "mode": 3}, "mode is 3"),
    ("antialias of no mode", "upscale", [t(F, 2, 2)], {"shape": (4, 4), "antialias": True}, "mode 0"),
    ("a scale to nothing", "upscale", [t(F, 2, 2)], {"shape": (4, 0)}, "as many sizes"),
    ("a scale of nothing", "upscale", [t(F, 2, 0)], {"shape": (4, 1)}, "as many sizes"),
    ("a scale to other dimensions", "upscale", [t(F, 2, 2)], {"shape": (4,)}, "as many sizes"),
    ("a negative pad left", "pad", [t(F, 2)], {"left": (-1,), "right": (0,)}, "left is -1"),
    ("a huge pad right", "pad", [t(F, 2)], {"left": (0,), "right": (2**31,)}, "right is 2147483648"),
    ("a pad for one side", "pad", [t(F, 2, 2)], {"left": (0, 0), "right": (0,)}, "for each dimension"),
    ("a circle of nothing", "pad", [t(F, 0)], {"left": (1,), "right": (0,), "circular": True}, "empty"),
    ("a mirror too long", "pad_reflect_1d", [t(F, 3)], {"left": 3, "right": 0}, "left is 3"),
    ("a mirror of nothing", "pad_reflect_1d", [t(F, 0)], {"left": 0, "right": 0}, "left is 0"),
    ("a mirror before", "pad_reflect_1d", [t(F, 3)], {"left": 0, "right": -1}, "right is -1"),
    ("a shift for one side", "roll", [t(F, 3, 3)], {"shifts": (1,)}, "one for each dimension"),
]  # fmt: skip
