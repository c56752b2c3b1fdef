"""`hg.conv`, `hg.max_pool` and `hg.avg_pool` against loops over windows, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg

Array = np.ndarray[Any, Any]
SEED = 3


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def compute(session: hg.Session, build: Callable[..., hg.Value], *arrays: Array) -> Array:
    g = hg.Graph()
    values = [g.input(f"x{place}", one.shape, one.dtype) for place, one in enumerate(arrays)]
    y = build(*values)
    g.output("y", y)
    found: Array = session.compute(g, {f"x{place}": one for place, one in enumerate(arrays)})["y"]
    assert found.shape == y.shape
    return found


def windows(
    x: Array, kernel: tuple[int, ...], stride: Any = 1, padding: Any = 0, dilation: Any = 1, fill: float = 0
) -> Array:
    """x [n, c, ...] as [n, c, *windows, *kernel], one window after the other."""
    count = len(kernel)
    stride, padding, dilation = (
        one if isinstance(one, tuple) else (one,) * count for one in (stride, padding, dilation)
    )
    wide = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=fill)
    outputs = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(wide.shape[2:], kernel, stride, dilation, strict=True)
    ]
    found = np.empty((*x.shape[:2], *outputs, *kernel))
    for place in np.ndindex(*outputs):
        key = tuple(
            slice(o * s, o * s + d * (k - 1) + 1, d)
            for o, s, d, k in zip(place, stride, dilation, kernel, strict=True)
        )
        found[(slice(None), slice(None), *place)] = wide[(slice(None), slice(None), *key)]
    return found


def convolved(x: Array, w: Array, b: Array | None = None, groups: int = 1, **how: Any) -> Array:
    count = w.ndim - 2
    outer, inner = w.shape[0] // groups, w.shape[1]
    seen = windows(x, w.shape[2:], **how)
    parts = []
    for group in range(groups):
        axes = ([1, *range(2 + count, 2 + 2 * count)], [1, *range(2, 2 + count)])
        part = np.tensordot(
            seen[:, group * inner : (group + 1) * inner], w[group * outer : (group + 1) * outer], axes
        )
        parts.append(np.moveaxis(part, -1, 1))
    found = np.concatenate(parts, 1)
    return found if b is None else found + b.reshape(-1, *(1,) * count)


HOW: list[dict[str, Any]] = [
    {}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"stride": 2, "padding": 1, "dilation": 2},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_convolutions_are_sums_over_windows(
    local: hg.Session, random: np.random.Generator, count: int, dtype: str
) -> None:
    numpy = dtype.replace("f", "float")
    for how, (groups, kernel) in itertools.product(HOW, ((1, 3), (2, 2), (4, 3), (1, 1))):
        x = random.standard_normal((2, 4, *(7, 6, 5)[:count])).astype(numpy)
        w = random.standard_normal((8, 4 // groups, *(kernel,) * count)).astype(numpy)
        b = random.standard_normal(8).astype(numpy)
        found = compute(local, lambda *v, how=how, groups=groups: hg.conv(*v, **how, groups=groups), x, w, b)
        expected = convolved(x.astype(float), w.astype(float), b.astype(float), groups, **how)
        tolerance = 1e-4 if dtype == "f32" else 1e-10
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_arguments_come_in_the_order_of_the_field(local: hg.Session, random: np.random.Generator) -> None:
    x, w = random.standard_normal((1, 4, 6, 7)), random.standard_normal((4, 2, 3, 2))
    found = compute(local, lambda x, w: hg.conv(x, w, None, (1, 2), (1, 0), (2, 1), 2), x, w)
    how = {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}
    np.testing.assert_allclose(found, convolved(x, w, groups=2, **how), rtol=1e-9, atol=1e-12)


def test_padding_may_keep_the_sizes(local: hg.Session, random: np.random.Generator) -> None:
    x, w = random.standard_normal((1, 2, 6, 7)), random.standard_normal((3, 2, 3, 2))
    found = compute(local, lambda x, w: hg.conv(x, w, padding="same"), x, w)
    wide = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 1)])
    np.testing.assert_allclose(found, convolved(wide, w), rtol=1e-9, atol=1e-12)
    assert compute(local, lambda x, w: hg.conv(x, w, padding="valid"), x, w).shape == (1, 3, 4, 6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pools_are_those_of_their_windows(local: hg.Session, random: np.random.Generator, count: int) -> None:
    axes = tuple(range(-count, 0))
    for dtype in (np.float32, np.float64):
        x = random.standard_normal((2, 3, *(7, 6, 8)[:count])).astype(dtype)
        wide = x.astype(float)
        for how in ({}, {"stride": 1}, {"padding": 1}, {"stride": 2, "padding": 1}):
            kernel, full = (3,) * count, {"stride": 3, **how}
            found = compute(local, lambda x, how=how: hg.max_pool(x, 3, **how), x)
            expected = windows(wide, kernel, **full, fill=-np.inf).max(axes)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            found = compute(local, lambda x, how=how: hg.avg_pool(x, (3,) * count, **how), x)
            np.testing.assert_allclose(found, windows(wide, kernel, **full).mean(axes), rtol=1e-4, atol=1e-6)
            found = compute(local, lambda x, how=how: hg.avg_pool(x, 3, **how, count_include_pad=False), x)
            counted = windows(np.ones_like(wide), kernel, **full).sum(axes)
            np.testing.assert_allclose(
                found, windows(wide, kernel, **full).sum(axes) / counted, rtol=1e-4, atol=1e-6
            )
        found = compute(local, lambda x: hg.max_pool(x, 2, 1, 0, 2), x)
        np.testing.assert_allclose(found, windows(wide, (2,) * count, 1, 0, 2).max(axes), rtol=1e-6)


def test_networks_of_them_have_gradients(local: hg.Session, random: np.random.Generator) -> None:
    x, w = random.standard_normal((1, 2, 5, 5)), random.standard_normal((2, 2, 3, 3))
    g = hg.Graph()
    image, kernel = g.input("x", x.shape, "f64"), g.input("w", w.shape, "f64")
    loss = hg.sum(hg.avg_pool(hg.max_pool(hg.conv(image, kernel, padding=1), 2, 1), 2) ** 2)
    g.output("loss", loss)
    g.output("slope", hg.grad(loss, kernel))
    plan = local.compile(g)
    slope = plan.run(x=x, w=w)["slope"]
    direction, length = random.standard_normal(w.shape), 1e-6
    ends = [float(plan.run(x=x, w=w + sign * length * direction)["loss"]) for sign in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * length) == pytest.approx(float((slope * direction).sum()), rel=1e-5)


def test_arguments_that_do_not_fit_are_refused() -> None:
    g = hg.Graph()
    x, w = g.input("x", (1, 4, 6, 6), "f32"), g.input("w", (8, 4, 3, 3), "f32")
    n = g.input("n", (1, 4, 6, 6), "i32")
    for message, call in {
        "conv of f32": lambda: hg.conv(x[0], w),
        "conv of i32": lambda: hg.conv(n, n),
        "does not fit 4 channels": lambda: hg.conv(x, w, groups=2),
        "bias": lambda: hg.conv(x, w, x[0, 0, 0]),
        "stride is 0": lambda: hg.conv(x, w, stride=0),
        r"padding is \(1,\)": lambda: hg.conv(x, w, padding=(1,)),
        "padding is 'some'": lambda: hg.conv(x, w, padding="some"),
        "'same' with stride": lambda: hg.conv(x, w, stride=2, padding="same"),
        r"window of \(3, 3\) does not fit": lambda: hg.conv(x[:, :, :2], w),
        "kernel_size is 1.5": lambda: hg.max_pool(x, 1.5),
        "max_pool of": lambda: hg.max_pool(x[0, 0], 2),
        "avg_pool of i32": lambda: hg.avg_pool(n, 2),
    }.items():
        with pytest.raises(hg.InvalidGraphError, match=message) as caught:
            call()
        assert "test_convolutions.py" in caught.value.origin.source
