"""Products of rows with the matrices that ids name: the kernels on the CPU beside the
definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, loaded, nothing_left, run
from kernel_runs import Array, normal, same_bits
from stored_weights import KINDS, native_steps, stored, stored_name, times

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import Stored
from heliograph_proto.errors import OutOfRangeError

#: Experts, columns, k for blocks of 32, tokens, ids of each, rows of each: few rows and many, more
#: ids than experts and fewer, parts of panels, sums of several slices, experts that no id names.
FORMS = [
    (4, 5, 64, 3, 2, 1),
    (8, 70, 1056, 1, 2, 1),
    (6, 133, 1280, 9, 2, 2),
    (3, 40, 96, 70, 2, 1),
    (1, 3, 32, 5, 1, 1),
    (40, 33, 64, 2, 4, 2),
    (2, 65, 1120, 300, 2, 1),
]


def product(kind: Stored, weights: np.ndarray[Any, Any], x: Array, ids: np.ndarray[Any, Any]) -> Maker:
    """mul_mat_id of these operands."""
    made = Maker()
    experts = made.weight(weights, stored_name(kind))
    made.output(made.node("mul_mat_id", experts, made.input(x), made.input(ids)))
    return made


def single(device: CpuDevice, kind: Stored, matrix: np.ndarray[Any, Any], x: Array) -> Array:
    """mul_mat of one expert."""
    made = Maker()
    made.output(made.node("mul_mat", made.weight(matrix, stored_name(kind)), made.input(x)))
    (found,) = run(device, made)
    return np.asarray(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_bits_of_its_product_with_its_expert(
    kind: Stored, form: tuple[int, ...], device: CpuDevice, random: np.random.Generator
) -> None:
    """Other rows, and their order, change nothing."""
    count, n, k, tokens, used, own = form
    k = min(k * times(kind), 1280 if k > 1000 else 8192)
    weights, x = stored(kind, (count, n, k), random), normal(random, tokens, own, k)
    ids = random.integers(0, max(1, count - 1), (tokens, used)).astype(np.int32)
    made = product(kind, weights, x, ids)
    (found,) = run(device, made)
    assert native_steps(device, made) == 1
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        expected = single(device, kind, weights[expert], x[token, slot % own])
        assert same_bits(np.ascontiguousarray(found[token, slot]), expected)


@pytest.mark.parametrize("kind", [Stored.F32, Stored.F16, Stored.Q4_0, Stored.Q6_K])
@pytest.mark.parametrize("tokens", [1, 40])
def test_threads_change_no_bits_of_experts(kind: Stored, tokens: int, random: np.random.Generator) -> None:
    weights, x = stored(kind, (5, 500, 512), random), normal(random, tokens, 1, 512)
    ids = random.integers(0, 5, (tokens, 3)).astype(np.int64)
    results = []
    for threads in (1, 2, 3):
        with nothing_left(CpuDevice(threads=threads, memory_bytes=2**28)) as device:
            results += run(device, product(kind, weights, x, ids))
    assert all(same_bits(each, results[0]) for each in results)


def test_experts_rows_and_ids_may_be_views(
    device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    """Every other expert, rows that run across, and the first of each token's ids."""
    made = Maker()
    weights = made.node(
        "slice", made.input(stored(Stored.Q8_0, (6, 40, 64), random), "q8_0"),
        start=(1, 0, 0), stop=(6, 40, 64), step=(2, 1, 1),
    )  # fmt: skip
    x = made.node("permute", made.input(normal(random, 64, 2, 7)), axes=(2, 1, 0))
    wide = made.input(random.integers(0, 3, (7, 5)).astype(np.int32))
    ids = made.node("slice", wide, start=(0, 0), stop=(7, 4), step=(1, 1))
    made.output(made.node("mul_mat_id", weights, x, ids))
    (found,), (expected,) = run(device, made), run(definition, made)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert native_steps(device, made) == 1


@pytest.mark.parametrize("kind", [Stored.F32, Stored.Q4_K])
@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("tokens", [1, 9])
def test_an_id_outside_is_the_definitions_error(
    kind: Stored,
    wrong: int,
    tokens: int,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    ids = np.zeros((tokens, 2), np.int32)
    ids[-1, 1] = wrong
    made = product(kind, stored(kind, (4, 8, 256), random), normal(random, tokens, 1, 256), ids)
    messages = []
    for each in (device, definition):
        with pytest.raises(OutOfRangeError) as caught:
            run(each, made)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert f"index {wrong} is not one of 4 experts" in messages[0]


def test_a_device_runs_on_after_an_id_outside(device: CpuDevice, random: np.random.Generator) -> None:
    weights, x = stored(Stored.F16, (4, 40, 64), random), normal(random, 3, 1, 64)
    ids = np.array([[0, 1], [3, 9], [2, 2]], np.int32)
    with pytest.raises(OutOfRangeError):
        run(device, product(Stored.F16, weights, x, ids))
    ids[1, 1] = 3
    made = product(Stored.F16, weights, x, ids)
    with loaded(device, made):
        (found,) = run(device, made)
    assert same_bits(found[1, 1][None], single(device, Stored.F16, weights[3], x[1]))


def test_no_tokens_and_no_elements_have_products_too(
    device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    for count, n, k, tokens, used in ((3, 5, 64, 0, 2), (3, 5, 0, 4, 2), (3, 0, 64, 4, 2), (3, 5, 64, 4, 0)):
        ids = np.zeros((tokens, used), np.int32)
        made = product(Stored.F32, normal(random, count, n, k), normal(random, tokens, 1, k), ids)
        (found,), (expected,) = run(device, made), run(definition, made)
        assert found.shape == expected.shape and not found.any()
