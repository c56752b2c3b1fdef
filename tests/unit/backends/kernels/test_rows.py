"""The CPU kernels along the last axis."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import by_rows, nmse, normal, over, run, same_bits
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels import ProgramBuilder
from heliograph_backends.cpu.kernels.program.tiles import STREAM_BYTES


def soft_max64(x: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 31, 32, 33, 47, 49, 384, 1000])
def test_row_kernels_are_close_to_float64(columns: int, random: np.random.Generator) -> None:
    x, weight, bias = (
        3 + normal(random, 4, 7, columns),
        normal(random, columns),
        normal(random, columns),
    )
    mask = normal(random, 7, columns)
    wide = x.astype(np.float64)
    deviation = wide - wide.mean(-1, keepdims=True)
    unit = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5)
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    pairs = [
        (by_rows("layer_norm", x, weight, bias, epsilon=1e-5), unit * weight + bias),
        (by_rows("layer_norm", x, weight, epsilon=1e-5), unit * weight),
        (by_rows("layer_norm", x, epsilon=1e-5), unit),
        (by_rows("rms_norm", x, weight, epsilon=1e-5), rms * weight),
        (by_rows("rms_norm", x, epsilon=1e-5), rms),
        (by_rows("l2_norm", x), wide / np.sqrt((wide**2).sum(-1, keepdims=True))),
        (by_rows("soft_max", x, scale=0.7), soft_max64(wide * 0.7)),
        (by_rows("soft_max", x, mask, scale=0.7), soft_max64(wide * 0.7 + mask)),
        (by_rows("sum_rows", x), wide.sum(-1)),
        (by_rows("mean_rows", x), wide.mean(-1)),
        (by_rows("max_rows", x), wide.max(-1)),
    ]
    for number, (value, reference) in enumerate(pairs):
        assert nmse(value, reference) <= 1e-12, number


def test_row_kernels_take_strided_rows(random: np.random.Generator) -> None:
    x = normal(random, 5, 6, 40)[::-1, ::2, 4:].transpose(1, 0, 2)
    assert same_bits(by_rows("soft_max", x), by_rows("soft_max", np.ascontiguousarray(x)))
    assert same_bits(by_rows("layer_norm", x), by_rows("layer_norm", np.ascontiguousarray(x)))


def test_soft_max_of_infinite_and_nan_rows_follows_its_definition() -> None:
    x = np.zeros((4, 21), np.float32)
    x[0], x[1, 20], x[2, :20], x[3, 3] = -np.inf, np.nan, -np.inf, np.inf
    result = by_rows("soft_max", x)
    assert np.isnan(result[:2]).all() and np.isnan(result[3, 3])
    assert result[2].tolist() == [0.0] * 20 + [1.0]
    assert np.isnan(by_rows("max_rows", x)).tolist() == [False, True, False, False]


def test_a_reduction_of_empty_rows_is_as_in_numpy() -> None:
    x = np.empty((3, 0), np.float32)
    assert by_rows("sum_rows", x).tolist() == [0, 0, 0]
    assert np.isnan(by_rows("mean_rows", x)).all()
    with pytest.raises(ValueError, match="empty row"):
        by_rows("max_rows", x)


def test_l2_norm_of_zeros_is_zero() -> None:
    assert not by_rows("l2_norm", np.zeros((2, 9), np.float32)).any()


@pytest.mark.parametrize("columns", [4096, 1003])
@pytest.mark.parametrize("method", ["soft_max", "rms_norm", "layer_norm", "l2_norm"])
def test_rows_of_large_results_have_the_bits_that_they_have_alone(
    method: str, columns: int, random: np.random.Generator
) -> None:
    """With 1003 columns most rows begin between two cache lines."""
    x = normal(random, STREAM_BYTES // 4 // columns + 1, columns)
    whole = by_rows(method, x)
    for start in range(0, len(x), 1000):
        assert same_bits(whole[start : start + 1000], by_rows(method, x[start : start + 1000]))


def test_a_soft_max_row_sums_up_to_one_however_long_it_is(random: np.random.Generator) -> None:
    """The longest rows have no room in the scratch."""
    for columns in (5, 64, 1000, 40_000, STREAM_BYTES // 4):
        total = float(by_rows("soft_max", normal(random, 1, columns)).astype(np.float64).sum())
        assert abs(total - 1) < 2e-7


@pytest.mark.parametrize("method", ["soft_max", "rms_norm"])
def test_row_kernels_may_run_in_place(method: str, random: np.random.Generator) -> None:
    x = normal(random, 40, 333)
    expected = by_rows(method, x)
    builder = ProgramBuilder()
    getattr(builder, method)(x.shape, over(0, x), over(1, x))
    run(builder, [x, x])
    assert same_bits(x, expected)
