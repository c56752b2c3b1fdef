"""Products with stored weights on the CUDA backend: the kernels on this host, beside the
definition."""

from __future__ import annotations

from collections.abc import Iterator

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Array, Maker, normalised_error, run
from cuda_emulation import EmulatedDriver, why_not

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.driver.parameters import TYPES
from heliograph_backends.cuda.lowering import stored as lowered
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.quantization import blocks as quantization
from heliograph_proto.types import DTYPES, TensorType

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

NAMES = [name for name in TYPES if name != "f32"]
#: By the number of rows: the kernel, and the most that its error may be of the sum of squares:
#: activations are fixed-point numbers of 15 bits, or two bf16.
KERNELS = {
    1: ("one", 2e-9),
    3: ("four", 2e-9),
    8: ("eight", 2e-9),
    20: ("tiles", 2e-10),
    70: ("large", 2e-10),
}
#: The shared memory of a block on GPUs with little of it, on A100, on H100.
SHARED_BYTES = (101376, 166912, 232448)


device = cuda_fixtures.device
definition = cuda_fixtures.definition
rng = cuda_fixtures.rng


@pytest.fixture
def small_device() -> Iterator[CudaDevice]:
    """One whose blocks have little shared memory."""
    yield from cuda_fixtures.closing(CudaDevice("cuda0", EmulatedDriver(shared_bytes=min(SHARED_BYTES))))


def stored(values: Array, name: str) -> Array:
    """Weights in the form of a data type."""
    if name == "f16":
        return values.astype(np.float16)
    if name == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(quantization.quantize(values, DTYPES[name]))


def stored_name(name: str) -> str:
    """What a leaf is told of an array that only holds the bits of a type."""
    return "" if name == "f16" else name


def block_size(name: str) -> int:
    return max(32, DTYPES[name].block_size)


def product(rng: np.random.Generator, name: str, n: int, x: Array) -> Maker:
    """x times random weights [n, k]."""
    made = Maker()
    values = rng.standard_normal((n, x.shape[-1]), np.float32)
    weight = made.weight(stored(values, name), stored_name(name))
    made.output(made.node("mul_mat", weight, made.input(x)))
    return made


def error(device: CudaDevice, definition: CpuDevice, made: Maker) -> float:
    """The error of the one output."""
    (found,), (wanted,) = run(device, made), run(definition, made)
    return normalised_error(np.asarray(found), np.asarray(wanted))


def kernel(device: CudaDevice) -> str:
    """The one that ran last."""
    assert isinstance(device.driver, EmulatedDriver)
    return device.driver.launched[-1]


# Types, shapes and places


@pytest.mark.parametrize("rows", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_every_type_is_read_as_it_is_stored(
    name: str, rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Rows and columns that end within a tile, and a depth that ends within a step."""
    wanted, tolerance = KERNELS[rows]
    made = product(rng, name, 133, rng.standard_normal((rows, 768), np.float32))
    assert error(device, definition, made) <= tolerance
    assert kernel(device) == f"product_{wanted}_{name}"


@pytest.mark.parametrize("rows", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_rows_may_lie_anywhere(
    name: str, rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Parts of rows, so that they begin at multiples of two bytes, and activations at odd ones of
    four."""
    size, blocks, n = block_size(name), 7, 5
    made, depth = Maker(), (blocks - 2) * block_size(name)
    values = rng.standard_normal((n + 1, blocks * size), np.float32)
    whole = made.input(stored(values, name), stored_name(name))
    weights = made.node("slice", whole, start=(1, size), stop=(n + 1, (blocks - 1) * size), step=(1, 1))
    wide = made.input(rng.standard_normal((rows, depth + 3), np.float32))
    x = made.node("slice", wide, start=(0, 1), stop=(rows, depth + 1), step=(1, 1))
    made.output(made.node("mul_mat", weights, x))
    assert error(device, definition, made) <= 5e-9
    assert kernel(device) == f"product_{KERNELS[rows][0]}_{name}"


@pytest.mark.parametrize("name", [name for name in NAMES if DTYPES[name].kind == "quantized"])
def test_any_bytes_are_gathered_as_the_floats_of_the_definition(
    name: str, device: CudaDevice, rng: np.random.Generator
) -> None:
    made, dtype = Maker(), DTYPES[name]
    rows = rng.integers(0, 256, (40, 2 * dtype.block_bytes), np.uint8)
    made.output(made.node("get_rows", made.input(rows, name), made.input(np.arange(40, dtype=np.int32))))
    (found,), wanted = run(device, made), quantization.from_blocks(rows, dtype)
    assert kernel(device) == f"get_rows_{name}"
    are_numbers = np.isfinite(wanted).all(1)
    assert are_numbers.any()
    np.testing.assert_array_equal(np.asarray(found)[are_numbers], wanted[are_numbers])


@pytest.mark.parametrize("form", [(1, 32), (5, 96), (2, 16640), (300, 4096), (63, 2080)])
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "bf16"])
def test_warps_share_rows_of_any_number_and_length(
    name: str, form: tuple[int, int], device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Fewer rows than warps, so that several have one; more; rows that end with half of what a lane
    has."""
    n, depth = form
    made = product(rng, name, n, rng.standard_normal((1, depth), np.float32))
    # Of few sums one may be nearly 0, which says little of the others.
    assert error(device, definition, made) <= (2e-9 if n > 5 else 1e-6)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", ["q4_0", "q6_k", "f16"])
def test_activations_come_in_chunks_where_shared_memory_is_short(
    name: str, rows: int, small_device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = product(rng, name, 9, rng.standard_normal((rows, 20480), np.float32))
    assert error(small_device, definition, made) <= 5e-9
    assert kernel(small_device) == f"product_{KERNELS[rows][0]}_{name}"


def test_tiles_are_small_where_shared_memory_is_short(
    small_device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = product(rng, "q4_0", 9, rng.standard_normal((70, 96), np.float32))
    assert error(small_device, definition, made) <= 2e-10
    assert kernel(small_device) == "product_tiles_q4_0"


def test_rows_of_many_matrices_share_their_weights(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Eight matrices of one row are one of eight rows: the weights are read once."""
    made = product(rng, "q5_1", 33, rng.standard_normal((4, 2, 1, 64), np.float32))
    assert error(device, definition, made) <= 2e-9
    assert kernel(device) == "product_eight_q5_1"


@pytest.mark.parametrize("rows", [1, 9])
def test_matrices_may_have_weights_of_their_own(
    rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    weight = made.weight(stored(rng.standard_normal((3, 7, 64), np.float32), "q4_1"), "q4_1")
    made.output(made.node("mul_mat", weight, made.input(rng.standard_normal((6, rows, 64), np.float32))))
    assert error(device, definition, made) <= 2e-9


# Numbers


@pytest.mark.parametrize("rows", KERNELS)
@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q2_k", "f16"])
def test_what_is_not_finite_stays_in_its_row(
    name: str, rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """And makes all of it not finite, as in the definition."""
    x = rng.standard_normal((rows, 512), np.float32)
    x[0, 300] = np.inf
    if rows > 1:
        x[1, 77] = np.nan
    made = product(rng, name, 40, x)
    (found,), (wanted,) = run(device, made), run(definition, made)
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted))
    assert normalised_error(np.asarray(found), np.asarray(wanted)) <= 2e-9


@pytest.mark.parametrize("rows", [1, 20])
def test_sizes_of_elements_may_differ_as_much_as_f32_allows(
    rows: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """From one group of elements to the next; nothing overflows, and a row of zeros gives zeros."""
    x = rng.standard_normal((rows, 1024), np.float32)
    x *= np.repeat(10.0 ** rng.integers(-30, 30, (rows, 16)), 64, axis=1).astype(np.float32)
    made = product(rng, "q8_0", 40, x)
    assert error(device, definition, made) <= 2e-8
    (found,) = run(device, product(rng, "q4_0", 40, np.zeros((rows, 1024), np.float32)))
    assert not np.asarray(found).any()


# Experts

#: Experts, columns, blocks of a row, tokens, ids of each, rows of each.
FORMS = {
    "one": [(4, 5, 2, 3, 2, 1), (16, 70, 1, 1, 4, 1), (40, 33, 1, 2, 4, 2)],
    "tiles": [(3, 40, 1, 70, 2, 1), (1, 3, 1, 5, 1, 1), (2, 35, 3, 40, 2, 2)],
    "large": [(2, 130, 1, 80, 2, 1)],
}


def expert_product(rng: np.random.Generator, name: str, form: tuple[int, ...], ids: Array) -> Maker:
    """mul_mat_id of random experts and rows."""
    count, n, blocks, tokens, _, own = form
    depth, made = blocks * block_size(name), Maker()
    values = rng.standard_normal((count, n, depth), np.float32)
    experts = made.weight(stored(values, name), stored_name(name))
    x = made.input(rng.standard_normal((tokens, own, depth), np.float32))
    made.output(made.node("mul_mat_id", experts, x, made.input(ids)))
    return made


@pytest.mark.parametrize("wanted", FORMS)
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "bf16"])
def test_experts_are_read_where_they_lie(
    name: str, wanted: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """By each row for itself, or by all that want an expert, which some experts nobody does."""
    for form in FORMS[wanted]:
        count, _, _, tokens, used, _ = form
        ids = rng.integers(0, max(1, count - 1), (tokens, used))
        made = expert_product(rng, name, form, ids.astype(rng.choice([np.int32, np.int64])))
        assert error(device, definition, made) <= 5e-9
        assert kernel(device) == f"product_{wanted}_{name}"


def test_more_ids_than_one_list_holds_are_taken_in_turn(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    form = (2, 5, 1, 1100, 2, 1)
    made = expert_product(rng, "q8_0", form, rng.integers(0, 2, (1100, 2)).astype(np.int32))
    assert error(device, definition, made) <= 2e-10


def test_experts_rows_and_ids_may_be_views(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Every other expert, some of the rows, and the first of each token's ids, for both ways to
    compute."""
    for tokens in (2, 40):
        made = Maker()
        experts = made.node(
            "slice", made.input(stored(rng.standard_normal((6, 9, 64), np.float32), "q8_0"), "q8_0"),
            start=(1, 2, 0), stop=(6, 8, 64), step=(2, 1, 1),
        )  # fmt: skip
        x = made.node(
            "slice", made.input(rng.standard_normal((tokens, 2, 70), np.float32)),
            start=(0, 0, 3), stop=(tokens, 2, 67), step=(1, 1, 1),
        )  # fmt: skip
        wide = made.input(rng.integers(0, 3, (tokens, 5)).astype(np.int32))
        ids = made.node("slice", wide, start=(0, 0), stop=(tokens, 4), step=(1, 1))
        made.output(made.node("mul_mat_id", experts, x, ids))
        assert error(device, definition, made) <= 5e-9
        assert kernel(device).startswith("product_")


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("tokens", [1, 9])
def test_an_id_outside_is_the_definitions_error(
    wrong: int, tokens: int, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    ids = rng.integers(0, 4, (tokens, 4)).astype(np.int32)
    ids[-1, 2] = wrong
    made = expert_product(rng, "q4_0", (4, 5, 1, tokens, 4, 1), ids)
    messages = []
    for one in (device, definition):
        with pytest.raises(OutOfRangeError) as caught:
            run(one, made)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# What a launch asks of a device


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_fit_into_the_shared_memory_of_a_device(name: str, shared_bytes: int) -> None:
    for depth in (256, 4096, 32768, 2**20):
        type = TensorType(DTYPES[name], (4096, depth))
        step = lowered.step_of(type)
        for held in lowered.HELD:
            warps, steps = lowered.fitted(step, held, depth, shared_bytes)
            assert steps >= 1 and lowered.few_bytes(step, held, warps, steps) <= shared_bytes
            assert warps >= 4
    assert lowered.TILES["tiles"].shared_bytes(type) <= min(SHARED_BYTES)


@pytest.mark.parametrize("count", [1, 2, 8, 80, 140, 5000])
def test_every_multiprocessor_has_work_where_there_is_enough(count: int) -> None:
    """The last round of blocks is nearly as long as the others, or blocks are short."""
    for n in (64, 1024, 4096, 8192, 32768):
        groups, each = n // 2, 2 * 4608
        blocks = lowered.blocks_of(groups, count, each, 132)
        rounds = -(-count * blocks // 132)
        taken = rounds * (-(-groups // blocks) * each + lowered.START_BYTES)
        assert 1 <= blocks <= groups
        assert taken <= 1.25 * (count * groups * each / 132 + rounds * lowered.START_BYTES) + each * 40
