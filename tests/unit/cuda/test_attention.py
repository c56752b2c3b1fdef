"""Attention on the CUDA backend's kernels, whose source this host runs: widths, forms, masks and sharing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Array, Maker, normalised_error, run
from cuda_emulation import why_not

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.lowering.attention import WIDTHS, Tiling, sharing_of
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.quantization import blocks
from heliograph_proto.types import DTYPES, TensorType

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

#: Normalised mean squared errors: of f32, of weights rounded to 11 bits, and to 8.
TOLERANCES = {"f32": 1e-11, "f16": 1e-6, "bf16": 1e-5}


device = cuda_fixtures.device
definition = cuda_fixtures.definition
rng = cuda_fixtures.rng


class Case:
    """Attention of random operands. Sizes: batch, heads, heads of the keys, rows, keys, width, width of the
    values."""

    def __init__(
        self, rng: np.random.Generator, sizes: Sequence[int], types: str, mask: Array | None = None
    ) -> None:
        batch, heads, kv, rows, keys, d, dv = sizes
        self.made, self.rng, self.heads, self.d = Maker(), rng, heads, d
        shapes = (batch, heads, rows, d), (batch, kv, keys, d), (batch, kv, keys, dv)
        pairs = zip(types.split(), shapes, strict=True)
        self.operands = [self.put(name, rng.standard_normal(shape, np.float32)) for name, shape in pairs]
        if mask is not None:
            self.operands.append(self.made.input(mask))

    def put(self, name: str, array: Array) -> int:
        if name == "bf16":
            return self.made.input(blocks.to_bits(array), name)
        if name in ("f16", "f32"):
            return self.made.input(array.astype(name.replace("f", "float")))
        return self.made.input(np.asarray(blocks.quantize(array, DTYPES[name])), name)

    def sinks(self) -> None:
        self.operands.append(self.made.input(self.rng.standard_normal(self.heads, np.float32)))

    def attend(self, **attributes: Any) -> int:
        attributes.setdefault("scale", self.d**-0.5)
        return self.made.node("flash_attn_ext", *self.operands, **attributes)

    def check(self, device: CudaDevice, definition: CpuDevice, form: str, **attributes: Any) -> None:
        """Runs it on both."""
        self.made.output(self.attend(**attributes))
        (found,), (wanted,) = run(device, self.made), run(definition, self.made)
        assert normalised_error(found, wanted) <= TOLERANCES[form]


def hiding(rng: np.random.Generator, *shape: int) -> Array:
    """A mask that hides some, and weighs the others."""
    return np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape))


FORMS = {"f16": "f32 f16 f16", "bf16": "bf16 bf16 bf16", "f32": "f32 f32 f32"}


@pytest.mark.parametrize(("form", "width"), [(form, width) for form in WIDTHS for width in WIDTHS[form]])
def test_many_rows_of_every_width(
    form: str, width: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Rows and keys that end within a tile, and shared keys."""
    Case(rng, (1, 2, 1, 70, 75, width, width), FORMS[form]).check(device, definition, form)
    assert device.driver.launched == [f"attention_{form}_{width}"]


@pytest.mark.parametrize(("form", "width"), [(form, width) for form in WIDTHS for width in WIDTHS[form]])
def test_few_rows_of_every_width(
    form: str, width: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """More lines that share keys than a block has, and keys that several blocks share."""
    Case(rng, (1, 12, 2, 3, 150, width, width), FORMS[form]).check(device, definition, form)
    assert device.driver.launched == [f"attention_{form}_{width}_split", "attention_merge"]


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("width", [40, 80, 112, 192])
def test_rows_narrower_than_a_kernels(
    width: int, rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    Case(rng, (1, 2, 2, rows, 70, width, width - 8), FORMS["f16"]).check(device, definition, "f16")
    assert "attention_few" not in device.driver.launched


@pytest.mark.parametrize("types", ["f32 q8_0 q8_0", "f32 q4_0 q8_0", "f16 f16 q4_0"])
@pytest.mark.parametrize("rows", [2, 70])
def test_keys_and_values_in_blocks(
    types: str, rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    Case(rng, (1, 4, 2, rows, 100, 64, 32), types).check(device, definition, "f16")
    assert device.driver.launched[0].startswith("attention_f16_64")


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("shape", ["rows", "heads", "odd"])
def test_masks_that_hide_some(
    shape: str, dtype: type, rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Of all heads and of each, and with rows that begin anywhere."""
    keys = 131 if shape == "odd" else 136
    mask = hiding(rng, *((1, 4) if shape == "heads" else ()), rows, keys).astype(dtype)
    case = Case(rng, (1, 4, 2, rows, keys, 64, 64), FORMS["f16"], mask)
    case.sinks()
    case.check(device, definition, "f16")


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("rows", [3, 130])
def test_a_mask_that_hides_whole_tiles(
    rows: int, odd: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """The first one, some between, and what is behind each row's own place."""
    keys = 2112 + odd
    mask = np.where(np.arange(keys) > np.arange(1500 - rows, 1500)[:, None], -np.inf, 0)
    mask[:, :70] = mask[:, 128:260] = mask[:, 400:1290] = -np.inf
    case = Case(rng, (1, 2, 2, rows, keys, 32, 32), FORMS["f16"], mask.astype(np.float16))
    case.check(device, definition, "f16")


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_slopes_caps_and_sinks(
    cap: float, rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    mask = hiding(rng, rows, 100).astype(np.float32)
    case = Case(rng, (2, 6, 3, rows, 100, 64, 64), FORMS["f16"], mask)
    case.sinks()
    case.check(device, definition, "f16", max_bias=8.0, logit_softcap=cap)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_turn_the_largest_score_around(
    scale: float, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    case = Case(rng, (1, 2, 2, 20, 100, 32, 32), FORMS["f16"])
    case.check(device, definition, "f16", scale=scale)


def test_rows_that_no_chunk_ends_have_a_kernel_too(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    Case(rng, (2, 4, 2, 5, 33, 18, 21), "f32 f16 bf16").check(device, definition, "f16")
    assert device.driver.launched == ["attention_few"]


def test_a_row_that_is_hidden_whole_gives_0(device: CudaDevice, rng: np.random.Generator) -> None:
    mask = np.zeros((40, 40), np.float32)
    mask[7] = -np.inf
    case = Case(rng, (1, 1, 1, 40, 40, 64, 64), FORMS["f32"], mask)
    case.made.output(case.attend())
    (found,) = run(device, case.made)
    assert not found[0, 7].any() and np.isfinite(found).all()


def test_views_of_one_product_are_read_where_they_lie(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Queries, keys and values of all heads side by side, and a mask that repeats over rows."""
    batch, rows, heads, width = 2, 24, 3, 32
    made = Maker()
    joined = made.input(rng.standard_normal((batch, rows, 3 * heads * width)).astype(np.float16))
    parts = made.node("reshape", joined, shape=(batch, rows, 3, heads, width))
    found = []
    for number in range(3):
        start, stop = (0, 0, number, 0, 0), (batch, rows, number + 1, heads, width)
        one = made.node("slice", parts, start=start, stop=stop, step=(1,) * 5)
        flat = made.node("reshape", one, shape=(batch, rows, heads, width))
        found.append(made.node("permute", flat, axes=(0, 2, 1, 3)))
    mask = made.input(hiding(rng, batch, 1, 1, rows).astype(np.float32))
    wide = made.node("broadcast_to", mask, shape=(batch, 1, rows, rows))
    made.output(made.node("flash_attn_ext", *found, wide, scale=0.2))
    (ours,), (wanted,) = run(device, made), run(definition, made)
    assert normalised_error(ours, wanted) <= TOLERANCES["f16"]
    assert device.driver.launched == ["attention_f16_32"]


# Keys and values in pages


def paged(
    rng: np.random.Generator, sizes: Sequence[int], types: str, page: int, *, sinks: bool = False
) -> tuple[Maker, Array]:
    """Attention over pages in the order of a cache, and their table. Sizes: batch, heads, heads of
    the keys, rows, pages of a row, width."""
    batch, heads, own, rows, used, width = sizes
    count, keys = batch * used + 1, used * page
    case = Case(rng, (batch, heads, own, rows, 1, width, width), types)
    made, found = case.made, []
    for name in types.split()[1:]:
        leaf = case.put(name, rng.standard_normal((count * page, own * width), np.float32))
        apart = made.node("reshape", leaf, shape=(count, page, own, width))
        found.append(made.node("permute", apart, axes=(0, 2, 1, 3)))
    mask = np.where(np.arange(keys) > rng.integers(0, keys, (batch, 1, rows, 1)), -np.inf, 0)
    table = rng.integers(0, count, (batch, used)).astype(np.int32)
    operands = [case.operands[0], *found, made.input(mask.astype(np.float16)), made.input(table)]
    if sinks:
        operands.append(made.input(rng.standard_normal(heads, np.float32)))
    made.output(made.node("flash_attn_paged", *operands, scale=width**-0.5))
    return made, table


@pytest.mark.parametrize("page", [16, 64, 100])
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("types", ["f32 f16 f16", "f32 f32 f32", "f32 q8_0 q4_0", "bf16 bf16 bf16"])
def test_pages_are_read_in_place(
    types: str, rows: int, page: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made, _ = paged(rng, (2, 4, 2, rows, 3, 64), types, page, sinks=rows == 1)
    (found,), (wanted,) = run(device, made), run(definition, made)
    form = {"bf16": "bf16", "f32": "f32"}.get(types.split()[1], "f16")
    assert normalised_error(found, wanted) <= TOLERANCES[form]
    assert device.driver.launched[0].startswith(f"attention_{form}_64")


def test_pages_that_several_blocks_share(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made, _ = paged(rng, (1, 4, 2, 1, 40, 32), FORMS["f16"], 16)
    (found,), (wanted,) = run(device, made), run(definition, made)
    assert normalised_error(found, wanted) <= TOLERANCES["f16"]
    assert device.driver.launched == ["attention_f16_32_split", "attention_merge"]


def test_pages_of_rows_that_no_chunk_ends(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made, _ = paged(rng, (2, 4, 2, 3, 3, 18), "f32 f16 bf16", 7)
    (found,), (wanted,) = run(device, made), run(definition, made)
    assert normalised_error(found, wanted) <= TOLERANCES["f16"]
    assert device.driver.launched == ["attention_few"]


@pytest.mark.parametrize("wrong", [-1, 7])
@pytest.mark.parametrize("width", [18, 32])
def test_a_number_of_no_page_is_reported(
    width: int, wrong: int, device: CudaDevice, rng: np.random.Generator
) -> None:
    made, table = paged(rng, (2, 4, 2, 3, 3, width), FORMS["f16"], 16)
    table[1, 2] = wrong
    message = rf"flash_attn_paged: index {wrong} is not one of 7 pages, at \[1, 2\] of the indices"
    with pytest.raises(OutOfRangeError, match=message):
        run(device, made)


# How blocks share the work


def type_of(*shape: int) -> TensorType:
    return TensorType(DTYPES["f16"], shape)


def test_one_query_over_a_long_cache_has_two_blocks_for_each_multiprocessor() -> None:
    """32 heads of which 4 share keys each: 8 blocks without splits."""
    found = sharing_of(Tiling("f16", 128, True), type_of(1, 32, 1, 128), type_of(1, 8, 32768, 128), 132)
    assert 2 * 132 - 8 <= found.blocks * found.splits * 8 <= 3 * 132


@pytest.mark.parametrize("keys", [1, 64, 65, 129, 1000, 4096, 100_000])
def test_every_split_of_keys_has_some_and_all_have_all(keys: int) -> None:
    found = sharing_of(Tiling("f16", 128, True), type_of(1, 32, 1, 128), type_of(1, 8, keys, 128), 132)
    tiles = -(-keys // 64)
    assert (found.splits - 1) * found.tiles_of_split < tiles <= found.splits * found.tiles_of_split


def test_a_batch_that_fills_the_device_is_not_split() -> None:
    found = sharing_of(Tiling("f16", 32, True), type_of(256, 12, 1, 32), type_of(256, 12, 4096, 32), 132)
    assert found.splits == 1


@pytest.mark.parametrize("form", ["f16", "f32"])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_shared_memory_is_what_a_block_of_any_of_these_gpus_has(form: str, width: int) -> None:
    """Without a mask, 99 KiB but for rows of 1 KiB, which need 163 KiB: that is sm_80's and sm_90's."""
    for split in (False, True):
        most = 163 if (form, width) == ("f32", 256) else 99
        assert Tiling(form, width, split).shared_bytes("", 0) <= most * 1024
