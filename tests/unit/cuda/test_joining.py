"""Neighbouring steps that the CUDA backend's kernels run as one, with the bits that they had."""

from __future__ import annotations

from typing import Any

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Loaded, Maker, run, same_bits
from cuda_emulation import why_not

from heliograph_backends.cuda import CudaDevice
from heliograph_proto.quantization import blocks

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

SEED = 20251204
TYPES = ("f16", "bf16", "f32")


device = cuda_fixtures.device


class Case:
    """A graph of random inputs of one type."""

    def __init__(self, name: str) -> None:
        print(f"seed {SEED}")
        self.made, self.name, self.rng = Maker(), name, np.random.default_rng(SEED)

    def put(self, *shape: int) -> int:
        array = self.rng.standard_normal(shape, np.float32)
        if self.name == "bf16":
            return self.made.input(blocks.to_bits(array), "bf16")
        return self.made.input(array.astype(self.name.replace("f", "float")))

    def check(self, device: CudaDevice) -> list[str]:
        """Runs it joined and not; the kernels of the joined one."""
        plain = run(device, self.made, fusion=False)
        device.driver.launched.clear()
        joined = run(device, self.made)
        assert all(same_bits(a, b) for a, b in zip(joined, plain, strict=True))
        return [name.split("_")[0] for name in device.driver.launched]


@pytest.mark.parametrize("columns", [48, 130, 1200])
@pytest.mark.parametrize("name", TYPES)
def test_a_norm_reads_a_product_its_bias_and_what_is_added(
    name: str, columns: int, device: CudaDevice
) -> None:
    case = Case(name)
    made, x = case.made, case.put(2, 5, columns)
    product = made.node("matmul", case.put(2, 5, 24), case.put(24, columns))
    sums = made.node("add", made.node("add", product, case.put(columns)), x)
    norm = made.node("mul", made.node("norm", sums, eps=1e-5), case.put(columns))
    made.output(made.node("add", norm, case.put(columns)))
    # cuBLAS is no kernel of ours.
    assert case.check(device) == ["norm"]


@pytest.mark.parametrize("op", ["norm", "rms_norm"])
def test_sums_of_others_than_products_are_read_too(op: str, device: CudaDevice) -> None:
    """One that repeats over matrices, and one of each element."""
    case = Case("f16")
    made = case.made
    sums = made.node("add", case.put(7, 96), made.node("neg", case.put(3, 7, 96)))
    made.output(made.node(op, sums, eps=1e-5))
    assert case.check(device) == ["elementwise", "norm"]


def test_a_sum_that_others_read_too_is_made_by_itself(device: CudaDevice) -> None:
    case = Case("f32")
    made = case.made
    sums = made.node("add", case.put(3, 96), case.put(3, 96))
    made.output(made.node("norm", sums, eps=1e-5), made.node("neg", sums))
    assert sorted(case.check(device)) == ["elementwise", "elementwise", "norm"]


def test_no_more_than_two_sums_are_the_norms(device: CudaDevice) -> None:
    case = Case("f16")
    made, value = case.made, case.put(3, 96)
    for _ in range(4):
        value = made.node("add", value, case.put(3, 96))
    made.output(made.node("norm", value, eps=1e-5))
    assert case.check(device) == ["elementwise", "norm"]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_rows_of_narrow_floats_are_gathered_as_they_are(name: str, device: CudaDevice) -> None:
    case = Case(name)
    made, table = case.made, case.put(9, 20)
    rows = made.node("get_rows", table, made.input(np.array([3, 8, 3, 0], np.int32)))
    wide = made.node("reshape", rows, shape=(2, 2, 20))
    made.output(made.node("cast", wide, dtype=made.type(table).dtype))
    case.check(device)
    assert device.driver.launched == ["get_rows_plain"]


def attended(case: Case, rows: int, *, heads: int = 2, width: int = 32) -> tuple[int, list[int]]:
    """Queries, keys and values of one product with a bias, [2, heads, rows, width] each."""
    made = case.made
    product = made.node("matmul", case.put(2, rows, 16), case.put(16, 3 * heads * width))
    sums = made.node("add", product, case.put(3 * heads * width))
    parts = made.node("reshape", sums, shape=(2, rows, 3, heads, width))
    found = []
    for number in range(3):
        start, stop = (0, 0, number, 0, 0), (2, rows, number + 1, heads, width)
        one = made.node("slice", parts, start=start, stop=stop, step=(1,) * 5)
        flat = made.node("reshape", one, shape=(2, rows, heads, width))
        found.append(made.node("permute", flat, axes=(0, 2, 1, 3)))
    return made.node("flash_attn_ext", *found, scale=0.2), found


@pytest.mark.parametrize("width", [32, 40, 256])
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("name", TYPES)
def test_attention_adds_the_bias_of_what_it_reads(
    name: str, rows: int, width: int, device: CudaDevice
) -> None:
    """And writes its result in the type that it is converted to."""
    case = Case(name)
    value, _ = attended(case, rows, width=width)
    if name != "f32":
        flat = case.made.node("reshape", value, shape=(2, rows, 2 * width))
        value = case.made.node("cast", flat, dtype=case.made.type(0).dtype)
    case.made.output(value)
    assert set(case.check(device)) == {"attention"}


def test_keys_that_blocks_share_have_a_workspace_where_the_result_is_converted(device: CudaDevice) -> None:
    case = Case("f16")
    made = case.made
    value = made.node(
        "flash_attn_ext", case.put(1, 2, 1, 32), case.put(1, 2, 600, 32), case.put(1, 2, 600, 32)
    )
    made.output(made.node("cast", value, dtype=made.type(0).dtype))
    case.check(device)
    assert device.driver.launched == ["attention_f16_32_split", "attention_merge"]


def test_a_biased_product_that_others_read_too_is_made_by_itself(device: CudaDevice) -> None:
    case = Case("f16")
    value, (query, *_) = attended(case, 5)
    case.made.output(value, case.made.node("neg", query))
    assert sorted(case.check(device)) == ["attention", "elementwise", "elementwise"]


def test_a_bias_that_differs_by_row_is_added_before(device: CudaDevice) -> None:
    """Tokens and heads are not where attention takes them for."""
    case = Case("f16")
    made = case.made
    product = made.node("matmul", case.put(1, 64, 16), case.put(16, 96))
    sums = made.node("add", product, case.put(96))
    parts = made.node("reshape", sums, shape=(1, 3, 64, 32))
    found = []
    for number in range(3):
        start, stop = (0, number, 0, 0), (1, number + 1, 64, 32)
        found.append(made.node("slice", parts, start=start, stop=stop, step=(1,) * 4))
    made.output(made.node("flash_attn_ext", *found, scale=0.2))
    assert case.check(device) == ["elementwise", "attention"]


def test_what_is_joined_takes_no_more_memory(device: CudaDevice) -> None:
    case = Case("f16")
    value, _ = attended(case, 70)
    case.made.output(case.made.node("cast", value, dtype=case.made.type(0).dtype))

    def taken(fusion: bool) -> int:
        loaded = Loaded(device, case.made, fusion=fusion)
        found: int = loaded.plan.compute_bytes
        loaded.free()
        return found

    assert taken(True) <= taken(False)


@pytest.mark.parametrize(
    ("kernel", "data", "attributes", "kernels"),
    [
        ((20, 3, 3, 3), (2, 3, 9, 7), {"padding": (1, 1)}, ["convolution_f32_tiles"]),
        ((20, 61, 3, 3), (2, 61, 5, 6), {}, ["convolution_f32_tiles", "convolution_merge"]),
        ((6, 1, 3, 3), (2, 6, 9, 7), {"groups": 6}, ["convolution_direct"]),
        ((6, 1, 3, 3), (2, 6, 30, 31), {"groups": 6}, ["convolution_below_3_1"]),
    ],
)
@pytest.mark.parametrize("ending", ["bias", "relu", "bias addend relu", "addend clamp"])
def test_a_convolution_adds_its_bias_and_an_addend_and_bounds_the_sums(
    ending: str,
    kernel: tuple[int, ...],
    data: tuple[int, ...],
    attributes: dict[str, Any],
    kernels: list[str],
    device: CudaDevice,
) -> None:
    case = Case("f32")
    made = case.made
    value = made.node("conv_2d", case.put(*kernel), case.put(*data), **attributes)
    shape = made.type(value).shape
    for step in ending.split():
        if step == "relu":
            value = made.node("relu", value)
        elif step == "clamp":
            value = made.node("clamp", value, min=-0.5, max=0.75)
        else:
            other = {"bias": (shape[1], 1, 1), "addend": shape, "row": shape[-1:]}[step]
            value = made.node("add", case.put(*other), value)
    made.output(value)
    case.check(device)
    assert device.driver.launched == kernels


def test_other_ops_after_a_convolution_are_a_chain_in_its_memory(device: CudaDevice) -> None:
    """Those that its kernels do not know, in another order, and those after a product for cuBLAS."""
    case = Case("f32")
    made = case.made
    sums = made.node("conv_2d", case.put(5, 3, 3, 3), case.put(1, 3, 8, 8))
    made.output(made.node("silu", made.node("add", sums, case.put(5, 1, 1))))
    sums = made.node("conv_2d", case.put(5, 3, 3, 3), case.put(1, 3, 8, 8))
    made.output(made.node("add", made.node("relu", sums), case.put(5, 1, 1)))
    product = made.node("conv_2d", case.put(5, 3, 1, 1), case.put(1, 3, 8, 8))
    made.output(made.node("relu", made.node("add", product, case.put(5, 1, 1))))
    assert case.check(device) == ["convolution", "elementwise", "convolution", "elementwise", "elementwise"]


def test_a_convolution_of_volumes_has_an_ending_too(device: CudaDevice) -> None:
    case = Case("f32")
    made = case.made
    sums = made.node("conv_3d", case.put(8, 2, 3, 2), case.put(4, 4, 5, 6), channels=2, padding=(1, 0, 1))
    shape = made.type(sums).shape
    made.output(
        made.node("relu", made.node("add", made.node("add", sums, case.put(shape[0], 1, 1, 1)), sums))
    )
    made.output(made.node("relu", made.node("add", sums, case.put(*shape))))
    other = made.node("conv_3d", case.put(8, 2, 3, 2), case.put(4, 4, 5, 6), channels=2)
    shape = made.type(other).shape
    made.output(made.node("relu", made.node("add", other, case.put(shape[0], 1, 1, 1))))
    assert case.check(device)[-1] == "convolution"
