"""Windows, places and rows in order on the CUDA backend, emulated: shapes that the conformance
suite leaves out, and the bits of sums."""

from __future__ import annotations

from typing import Any

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Maker, normalised_error, run
from cuda_emulation import why_not

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.lowering import ordering
from heliograph_backends.cuda.lowering.target import CudaTarget
from heliograph_proto.errors import OutOfRangeError

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

device = cuda_fixtures.device
definition = cuda_fixtures.definition
rng = cuda_fixtures.rng

#: The shared memory of a block of an A100, of an RTX 4090, and what needs no asking.
BLOCKS = (163 * 2**10, 99 * 2**10, 48 * 2**10)


def same_bits(device: CudaDevice, definition: CpuDevice, made: Maker) -> bool:
    found, wanted = run(device, made), run(definition, made)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(found, wanted, strict=True))


def quarters(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers many of which are equal, with both zeros, infinities and what is no number."""
    found = (rng.integers(-9, 9, shape) / 4).astype(np.float32)
    for special in (-0.0, np.inf, -np.inf, np.nan):
        found[rng.random(shape) < 0.05] = special
    return found


# Windows


@pytest.mark.parametrize("average", [False, True])
def test_large_windows_have_a_warp_each(
    average: bool, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(rng.standard_normal((2, 3, 33, 45), np.float32))
    for kernel, padding in (((33, 45), (0, 0)), ((17, 16), (5, 7))):
        made.output(made.node("pool_2d", x, kernel=kernel, padding=padding, stride=(3, 4), average=average))
    found, wanted = run(device, made), run(definition, made)
    for one, other in zip(found, wanted, strict=True):
        assert normalised_error(np.asarray(one), np.asarray(other)) < 1e-11


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((3, 3), (2, 2), (1, 1)), ((4, 2), (1, 3), (3, 0))]
)
def test_gradients_of_windows_have_the_definitions_bits(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    average: bool,
    device: CudaDevice,
    definition: CpuDevice,
    rng: np.random.Generator,
) -> None:
    """Of equal elements the first has the gradient, and of those that are no numbers."""
    made = Maker()
    x = made.input(quarters(rng, 3, 2, 13, 11))
    attributes: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "average": average}
    shape = made.type(made.node("pool_2d", x, **attributes)).shape
    gradient = made.input(rng.standard_normal(shape, np.float32))
    made.output(made.node("pool_2d_back", gradient, x, **attributes))
    assert same_bits(device, definition, made)
    assert device.driver.launched == ["pool_back"]


def test_windows_too_large_to_compare_for_each_element_are_the_definitions(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(rng.standard_normal((1, 70, 70), np.float32))
    gradient = made.input(rng.standard_normal((1, 1, 1), np.float32))
    for average in (False, True):
        made.output(made.node("pool_2d_back", gradient, x, kernel=(70, 70), average=average))
    assert same_bits(device, definition, made)
    assert device.driver.launched == ["pool_back"]


def test_overlapping_rows_are_added_in_the_definitions_order(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    kernel = made.input(np.zeros((4, 3, 3, 2), np.float32))
    attributes: dict[str, Any] = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}
    data = made.input(rng.standard_normal((2, 3, 9, 8), np.float32))
    rows = made.node("im2col", kernel, data, **attributes)
    made.output(made.node("im2col_back", rows, kernel, shape=(2, 3, 9, 8), **attributes))
    columns = made.input(rng.standard_normal((7, 12), np.float32))
    made.output(made.node("col2im_1d", columns, channels=3, stride=2, padding=1))
    assert same_bits(device, definition, made)
    assert device.driver.launched == ["columns", "columns_back", "columns_back"]


# Places


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
def test_places_change_without_arithmetic(
    dtype: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Of views too, and far around."""
    made = Maker()
    x = made.input(rng.integers(-100, 100, (3, 5, 4, 7)).astype(dtype))
    turned = made.node("permute", x, axes=(0, 2, 3, 1))
    for one in (x, turned):
        made.output(made.node("pad", one, left=(0, 2, 1, 0), right=(0, 0, 3, 0)))
        made.output(made.node("pad", one, left=(0, 9, 1, 0), right=(0, 0, 13, 0), circular=True))
        made.output(made.node("pad_reflect_1d", one, left=3, right=4))
        made.output(made.node("roll", one, shifts=(0, -11, 3, 0)))
        made.output(made.node("repeat", one, shape=(6, *(2 * size for size in made.type(one).shape[1:]))))
    assert same_bits(device, definition, made)
    assert {"place_elements", "copy_elements"} >= set(device.driver.launched)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("corners", [False, True])
def test_resampled_places_are_those_of_the_definition(
    corners: bool, mode: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """At every ratio of small sizes, whose places are often whole."""
    made = Maker()
    for have in range(1, 8):
        x = made.input(rng.standard_normal((2, have, 12 - have), np.float32))
        for size in (1, 2, 3, 5, 6, 12, 21):
            made.output(made.node("upscale", x, shape=(3, size, 7), mode=mode, align_corners=corners))
    assert same_bits(device, definition, made)


# Rows in order


@pytest.mark.parametrize("columns", [1, 2, 31, 129, 1000, 4097])
def test_sorts_keep_equal_elements_in_order(
    columns: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(quarters(rng, 3, columns))
    whole = made.input(rng.integers(-(2**31), 2**31 - 1, (2, columns)).astype(np.int32))
    for one in (x, whole):
        for descending in (False, True):
            made.output(made.node("argsort", one, descending=descending))
        made.output(made.node("argmax", one), made.node("top_k", one, k=min(columns, 50)))
    assert same_bits(device, definition, made)
    assert set(device.driver.launched) == {"sort_rows", "argmax"}


@pytest.mark.parametrize("k", [1, 40, 700])
def test_the_largest_of_a_vocabulary_are_found_chunk_by_chunk(
    k: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Of which the second pass has more than a block sorts where many are kept."""
    made = Maker()
    x = made.input(quarters(rng, 2, 4096 * 24 + 77))
    made.output(made.node("top_k", x, k=k))
    assert same_bits(device, definition, made)
    assert device.driver.launched == ["sort_rows"] * (3 if k == 700 else 2)


@pytest.mark.parametrize("shared", BLOCKS)
@pytest.mark.parametrize("kept", [1, 256, 1024])
@pytest.mark.parametrize("columns", [100, 5000, 151_936, 2**31 - 1])
def test_sorts_fit_the_shared_memory_of_a_block(columns: int, kept: int, shared: int) -> None:
    found = ordering.passes(columns, min(kept, columns), CudaTarget(shared))
    assert found is not None
    for one, after in zip(found, found[1:], strict=False):
        assert one.chunks * one.kept == after.columns < one.columns
    assert found[-1].chunks == 1
    assert all(one.padded * ordering.KEY_BYTES <= shared and one.kept <= one.padded for one in found)


@pytest.mark.parametrize("columns", [1, 5, 128, 129, 1024, 2500])
def test_sums_so_far_have_the_same_bits_wherever_a_row_lies(
    columns: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    values = rng.standard_normal((5, columns), np.float32)
    together, apart = Maker(), Maker()
    together.output(together.node("cumsum", together.input(values)))
    apart.output(
        apart.node("cumsum", apart.node("permute", apart.input(values.T[:, 3:4].copy()), axes=(1, 0)))
    )
    (found,), (one,) = run(device, together), run(device, apart)
    assert np.asarray(found)[3].tobytes() == np.asarray(one)[0].tobytes()
    assert normalised_error(np.asarray(found), np.float64(values).cumsum(-1)) < 1e-11


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_whole_numbers_so_far_wrap_around(
    dtype: type, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    limits = np.iinfo(dtype)
    x = made.input(rng.integers(limits.min, limits.max, (3, 1500), dtype))
    made.output(made.node("cumsum", x), made.node("cumprod", x))
    assert same_bits(device, definition, made)


def test_gradients_of_rows_are_added_in_the_order_of_their_indices(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    gradient = made.input(rng.standard_normal((2, 50, 70), np.float32))
    indices = made.input(rng.integers(0, 7, (2, 50)).astype(np.int64))
    made.output(made.node("get_rows_back", gradient, indices, rows=9))
    assert same_bits(device, definition, made)
    assert device.driver.launched == ["get_rows_back"]


def test_an_index_outside_of_a_gradients_rows_is_an_error(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    gradient = made.input(rng.standard_normal((3, 4), np.float32))
    made.output(made.node("get_rows_back", gradient, made.input(np.array([1, 5, 0], np.int32)), rows=5))
    with pytest.raises(OutOfRangeError, match="index 5 is not one of 5 rows"):
        run(device, made)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
def test_triangles_keep_elements_as_they_are(
    dtype: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(rng.integers(-100, 100, (3, 5, 7, 7)).astype(dtype))
    for one in (x, made.node("permute", x, axes=(1, 0, 3, 2))):
        made.output(*(made.node("tri", one, type=kind) for kind in range(4)))
        if dtype.startswith("float"):
            made.output(made.node("diag_mask_inf", one, n_past=2), made.node("diag_mask_zero", one, n_past=0))
    assert same_bits(device, definition, made)
    assert set(device.driver.launched) == {"triangle"}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_blocks_are_set_and_added_where_they_lie(
    dtype: type, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(rng.standard_normal((6, 9)).astype(dtype))
    block, one = (made.input(rng.standard_normal(shape).astype(dtype)) for shape in ((3, 4), (1,)))
    for op in ("set", "acc"):
        made.output(made.node(op, x, block, start=(1, 0), step=(2, 2)))
        made.output(made.node(op, made.node("permute", x, axes=(1, 0)), block, start=(5, 2)))
    made.output(made.node("add1", x, one))
    assert same_bits(device, definition, made)
    assert {"copy_elements", "elementwise_few"} == set(device.driver.launched)
