"""The kernels of the CUDA backend: they compile for the GPUs that matter, and compute what the
definition does."""

from __future__ import annotations

import re

import cuda_fixtures
import numpy as np
import nvrtc_library
import pytest
from backend_graphs import Maker, normalised_error, run
from cuda_emulation import why_not
from cuda_emulation.compiling import parameter_bytes

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.driver.operations import CudaOperation
from heliograph_backends.cuda.driver.parameters import (
    ATTENTION,
    COLUMNS,
    CONVOLUTION,
    COPY,
    ELEMENTWISE,
    ELEMENTWISE_FEW,
    GATHER,
    GATHER_BACK,
    LARGEST,
    PLACE,
    POOL,
    PRODUCT,
    RANDOM,
    REDUCE,
    ROPE,
    ROWS,
    RUNNING,
    SORT,
    TRANSPOSE,
    TRIANGLE,
    TYPED,
    TYPES,
    UPSCALE,
)
from heliograph_backends.cuda.driver.sources import MODULES, kernels_of, module_of, options_of, text_of
from heliograph_backends.cuda.lowering import rows, typed
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import Located
from heliograph_proto.graph import Node
from heliograph_proto.quantization import blocks
from heliograph_proto.types import DTYPES, TensorType

emulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
#: The endings of the names of an op's kernels.
ENDINGS = (
    "one|few|many|merge|long|plain|narrow|four|eight|tiles|large|direct|below|floats|i32|i64"
    "|b?f16|f32|(?:i?q|tq|mxfp|nvfp)?[0-9]"
)
PARAMETERS = {
    "elementwise": ELEMENTWISE, "elementwise_few": ELEMENTWISE_FEW, "soft_max": ROWS, "norm": ROWS,
    "reduce": REDUCE, "copy_elements": COPY, "copy_transposed": TRANSPOSE,
    "get_rows": GATHER, "set_rows": GATHER,
    **dict.fromkeys(("add_rows", "mul_rows", "max_rows", "min_rows"), GATHER),
    "rope": ROPE, "philox": RANDOM, "product": PRODUCT, "attention": ATTENTION,
    "convolution": CONVOLUTION, "pool": POOL, "pool_back": POOL, "columns": COLUMNS, "columns_back": COLUMNS,
    "place_elements": PLACE, "upscale": UPSCALE, "sort_rows": SORT, "argmax": LARGEST, "running": RUNNING,
    "get_rows_back": GATHER_BACK, "typed": TYPED, "triangle": TRIANGLE,
}  # fmt: skip


# The source


device = cuda_fixtures.device
definition = cuda_fixtures.definition
rng = cuda_fixtures.rng


@pytest.mark.long
@pytest.mark.skipif(bool(nvrtc_library.why_not()), reason=nvrtc_library.why_not() or "-")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("module", MODULES)
def test_every_module_compiles_to_machine_code_without_a_gpu(module: str, architecture: str) -> None:
    options = (*options_of(module), f"--gpu-architecture={architecture}")
    code = nvrtc_library.compiled(text_of(module), f"{module}.cu", options)
    missing = [name for name in kernels_of(module) if f".text.{name}\0".encode() not in code]
    assert not missing


def test_every_kernel_is_in_one_module() -> None:
    assert sum(len(kernels_of(module)) for module in MODULES) == len(module_of())


def test_every_operation_has_its_formula() -> None:
    rows = re.findall(r"^  ROW\((\w+), ", text_of("elementwise"), re.M)
    assert sorted(rows) == sorted(one.name for one in CudaOperation)


@pytest.mark.parametrize("name", TYPES)
def test_numbers_of_data_types_are_those_of_the_kernels(name: str) -> None:
    listed = re.search(
        r"enum Type \{\s+F32 = 0, F16 = 1, BF16 = 2, (.*?)\s\}", text_of("products"), re.DOTALL
    )
    assert listed is not None
    assert ["F32", "F16", "BF16", *re.split(r",\s+", listed[1])][TYPES[name]] == name.upper()


def test_ops_between_types_have_the_numbers_of_the_kernel() -> None:
    listed = re.search(r"enum Typed \{(.*?)\};", text_of("typed"), re.S)
    assert listed is not None
    assert re.findall(r"T_(\w+)", listed[1]) == [op.upper() for op in typed.OPS]
    numbers = re.search(r"enum Number \{(.*?), N_OTHER", text_of("typed"))
    assert numbers is not None
    found = [name.lower() for name in re.findall(r"N_(\w+)", numbers[1])]
    assert [*FLOATS, *found] == list(typed.NUMBERS)


@pytest.mark.parametrize("name", [one for one in TYPES if DTYPES[one].kind == "quantized"])
def test_kernels_know_the_size_of_blocks(name: str) -> None:
    found = re.search(rf"Stored<{name.upper()}> {{ enum {{ BYTES = (\d+), PARTS = (\d+)", text_of("products"))
    assert found is not None
    assert (int(found[1]), 32 * int(found[2])) == (DTYPES[name].block_bytes, DTYPES[name].block_size)


@emulated
@pytest.mark.parametrize("kernel", sorted(module_of()))
def test_parameters_have_the_size_that_the_kernel_reads(kernel: str) -> None:
    """And at most the 4 KiB that every GPU takes."""
    type = PARAMETERS.get(kernel) or PARAMETERS[re.sub(f"_({ENDINGS}).*", "", kernel)]
    assert parameter_bytes(kernel) == type.itemsize <= 4096


# What kernels compute, on this host


def same(device: CudaDevice, definition: CpuDevice, made: Maker, tolerance: float) -> None:
    """Runs a graph on both and compares every output."""
    for found, wanted in zip(run(device, made), run(definition, made), strict=True):
        assert normalised_error(np.asarray(found), np.asarray(wanted)) <= tolerance


@emulated
@emulated
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_chain_has_the_same_bits_fused_and_not(
    dtype: type, device: CudaDevice, rng: np.random.Generator
) -> None:
    """With operands that repeat, and a value that is read long after it was made."""
    made = Maker()
    x = made.input(rng.standard_normal((9, 5, 34)).astype(dtype))
    row = made.input(rng.standard_normal(34).astype(dtype))
    product = made.node("mul", x, row)
    value = made.node("silu", made.node("exp", made.node("gelu", made.node("add", x, row))))
    made.output(made.node("tanh", made.node("sub", value, product)))
    fused = run(device, made, fusion=True)
    assert device.driver.launched == ["elementwise_few"]
    plain = run(device, made, fusion=False)
    assert np.asarray(fused[0]).tobytes() == np.asarray(plain[0]).tobytes()


@emulated
def test_rows_that_no_warp_holds_are_a_blocks(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(rng.standard_normal((3, 5000), np.float32))
    row = made.input(rng.standard_normal(5000, np.float32))
    for op in ("soft_max", "rms_norm", "l2_norm"):
        made.output(made.node(op, x))
    made.output(made.node("add", made.node("mul", made.node("norm", x), row), row))
    made.output(made.node("reduce_sum", x, axes=(1,), keepdims=False))
    same(device, definition, made, 1e-10)


@emulated
@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("columns", [128, 256, 384, 512, 768, 1024, 1028, 4096, 33, 1030])
def test_rows_of_every_length_and_type(
    name: str, columns: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Those that a warp or a block holds, and those that do not end with four elements."""
    made = Maker()
    x = put(made, rng.standard_normal((3, 5, columns), np.float32), name)
    row = put(made, rng.standard_normal(columns, np.float32), name)
    mask = made.input(rng.standard_normal((5, columns)).astype(np.float16))
    for op in ("rms_norm", "l2_norm"):
        made.output(made.node(op, x, eps=1e-5))
    made.output(made.node("add", made.node("mul", made.node("norm", x, eps=1e-5), row), row))
    made.output(made.node("soft_max", x, scale=0.5), made.node("soft_max", x, mask, scale=0.5, max_bias=8.0))
    same(device, definition, made, {"f16": 1e-6, "bf16": 1e-4, "f32": 1e-11}[name])


@emulated
def test_a_sum_does_not_depend_on_where_a_row_lies(device: CudaDevice, rng: np.random.Generator) -> None:
    """A weight that begins at an odd place is read element by element, and added up in the same
    order."""
    row = rng.standard_normal(1000, np.float32)
    found = []
    for before in (0, 1):
        made = Maker()
        whole = made.input(np.concatenate([np.zeros(before, np.float32), row]))
        made.output(
            made.node("norm", made.node("slice", whole, start=(before,), stop=(before + 1000,), step=(1,)))
        )
        found += run(device, made)
    assert found[0].tobytes() == found[1].tobytes()


@emulated
@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("width", "dims", "offset"), [(64, 64, 0), (80, 64, 16), (70, 20, 3), (256, 256, 0)])
@pytest.mark.parametrize("mode", [0, 2])
def test_rope_of_many_heads(
    mode: int,
    width: int,
    dims: int,
    offset: int,
    name: str,
    device: CudaDevice,
    definition: CpuDevice,
    rng: np.random.Generator,
) -> None:
    """At positions far from the first, where f32 could not tell the angles."""
    made = Maker()
    x = put(made, rng.standard_normal((2, 3, 11, width), np.float32), name)
    positions = made.input(np.array([0, 70_001, 1_000_003], np.int32))
    factors = made.input((1 + rng.random(dims // 2)).astype(np.float32))
    made.output(made.node("rope", x, positions, n_dims=dims, mode=mode, offset=offset))
    made.output(made.node("rope", x, positions, factors, n_dims=dims, mode=mode, offset=offset))
    same(device, definition, made, {"f16": 1e-6, "bf16": 1e-4, "f32": 1e-11}[name])
    assert device.driver.launched == ["rope", "rope"]


def put(made: Maker, array: np.ndarray, name: str) -> int:
    """An input of a float type."""
    if name == "bf16":
        return made.input(blocks.to_bits(array), "bf16")
    return made.input(array.astype(name.replace("f", "float")))


# What a launch asks of a device


@pytest.mark.parametrize(("results", "has_kernel"), [(2**31 - 1, True), (2**31, False)])
def test_reductions_have_kernels_as_far_as_blocks_are_counted(results: int, has_kernel: bool) -> None:
    """A grid has 2^31 - 1 of them, of which a long result has one for each element."""
    source, result = (TensorType(DTYPES["f16"], shape) for shape in ((results, 4096), (results,)))
    node = Node("reduce_max", (0,), result, {"axes": (1,), "keepdims": False})
    assert rows.is_reduction(node, source) is has_kernel
    if has_kernel:
        launch = rows.reduction(node, located(source), located(result))
        assert launch.grid[0] < 2**31


def located(type: TensorType) -> Located:
    return Located(type, 0, 0, type.strides)


@emulated
@pytest.mark.parametrize("name", ["u32", "f32"])
def test_random_numbers_have_the_bits_of_the_definition(
    name: str, device: CudaDevice, definition: CpuDevice
) -> None:
    made = Maker()
    seed, counter = (made.input(np.array(number, np.int64)) for number in (-(2**62) - 5, 2**40 + 3))
    made.output(made.node("philox", seed, counter, shape=(7, 301), dtype=DTYPES[name]))
    (found,), (wanted,) = run(device, made), run(definition, made)
    assert np.array_equal(np.asarray(found).view(np.uint32), np.asarray(wanted).view(np.uint32))
