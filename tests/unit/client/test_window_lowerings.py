"""Convolutions in other forms than the ops have: in three dimensions, and transposed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph.lowerings.windows import Window, convolve, convolve_transposed

RNG = np.random.default_rng(17)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape, np.float32)


def run(x: np.ndarray[Any, Any], build: Any) -> np.ndarray[Any, Any]:
    graph = hg.Graph()
    graph.output("y", build(graph, graph.input("x", x.shape, "f32")))
    with hg.connect("local:") as session:
        found: np.ndarray[Any, Any] = session.compile(graph).run(x=x)["y"]
    return found


SPACES = [
    (Window((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)), 1),
    (Window((3, 2, 3), (2, 1, 2), (1, 2, 1), (1, 0, 1), (0, 1, 1)), 2),
    (Window((1, 1, 1), (2, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0)), 4),
    (Window((2, 1, 1), (1, 1, 1), (3, 1, 1), (2, 0, 0), (1, 0, 0)), 1),
]


@pytest.mark.parametrize(("window", "groups"), SPACES, ids=str)
def test_a_convolution_in_space_is_the_sum_over_its_positions(window: Window, groups: int) -> None:
    x, weights = normal(2, 4, 7, 9, 8), normal(8, 4 // groups, *window.kernel)
    wide = np.pad(x, ((0, 0), (0, 0), *zip(window.low, window.high, strict=True))).astype(np.float64)
    outputs, parts = window.outputs(x.shape[2:]), []
    for data, kernel in zip(np.split(wide, groups, 1), np.split(weights, groups), strict=True):
        total: Any = 0
        for offset in window.offsets():
            seen = data[(slice(None), slice(None), *window.places(offset, outputs))]
            tap = kernel[(slice(None), slice(None), *offset)]
            total = total + np.einsum("nczyx,oc->nozyx", seen, tap)
        parts.append(total)
    found = run(x, lambda g, v: convolve(v, g.weight("w", weights), window, groups))
    assert np.allclose(found, np.concatenate(parts, 1), atol=1e-4)


#: Sizes, kernel, stride, padding before and behind, and elements added at the end.
TRANSPOSED = [
    ((5, 6), (2, 2), (2, 2), (0, 0), (0, 0), (0, 0)),
    ((5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
    ((5, 6), (4, 3), (3, 2), (1, 0), (2, 1), (0, 1)),
    ((5, 6), (1, 1), (2, 2), (0, 0), (0, 0), (1, 1)),
    ((3, 3), (2, 2), (5, 4), (0, 0), (0, 0), (2, 3)),
    ((5, 6), (3, 2), (1, 1), (1, 0), (0, 1), (0, 0)),
    ((7,), (4,), (2,), (1,), (1,), (0,)),
    ((3, 4, 3), (2, 3, 2), (2, 1, 2), (0, 1, 0), (1, 0, 0), (0, 0, 1)),
]


@pytest.mark.parametrize(("sizes", "kernel", "stride", "low", "high", "extra"), TRANSPOSED)
def test_a_transposed_convolution_adds_a_kernel_at_each_stride(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    low: tuple[int, ...],
    high: tuple[int, ...],
    extra: tuple[int, ...],
) -> None:
    x, weights = normal(2, 3, *sizes), normal(3, 5, *kernel)
    steps = zip(sizes, stride, kernel, extra, strict=True)
    whole = [(size - 1) * step + width + more for size, step, width, more in steps]
    expected = np.zeros((2, 5, *whole))
    for tap in itertools.product(*map(range, kernel)):
        spans = zip(tap, sizes, stride, strict=True)
        key = tuple(slice(at, at + (size - 1) * step + 1, step) for at, size, step in spans)
        matrix = weights[(slice(None), slice(None), *tap)]
        expected[(slice(None), slice(None), *key)] += np.einsum("nc...,co->no...", x, matrix)
    edges = zip(low, high, whole, strict=True)
    expected = expected[(slice(None), slice(None), *(slice(a, size - b) for a, b, size in edges))]
    window = Window(kernel, stride, (1,) * len(kernel), low, high)
    found = run(x, lambda g, v: convolve_transposed(v, g.weight("w", weights), window, extra))
    assert found.shape == expected.shape and np.allclose(found, expected, atol=1e-4)
