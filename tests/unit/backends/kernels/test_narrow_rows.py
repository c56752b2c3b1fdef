"""Kernels along rows beside f16 and bf16: rotary embedding, soft_max with narrow masks, norms of
views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, loaded, op_path
from narrow_views import FLOATS, LENGTHS, NARROW, SPECIAL, WAYS, Devices, Operands

from heliograph_backends.cpu.kernels.program.tiles import STREAM_BYTES
from heliograph_backends.cpu.kernels.program.words import MAXIMUM_NARROW
from heliograph_backends.cpu.lowering.rows import MOST_NARROW
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.devices import OpPath
from heliograph_proto.ops.rope import IMROPE, MROPE, NEOX, NORMAL, SECTIONED, VISION, pairs

YARN: dict[str, Any] = {
    "freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 1.3, "n_ctx_orig": 2048,
}  # fmt: skip


# Rotary embedding


def turning(random: np.random.Generator, mode: int, width: int) -> dict[str, Any]:
    """Attributes of a rope of rows of this width, which may turn a part of them alone."""
    dims = width // 2 if mode == VISION else 2 * int(random.integers(1, width // 2 + 1))
    found = {"mode": mode, "n_dims": dims, **(YARN if random.random() < 0.5 else {})}
    count = pairs({**found})
    found["offset"] = int(random.integers(0, width - 2 * count + 1))
    if mode in SECTIONED:
        found["sections"] = tuple(int(1 + size) for size in random.multinomial(count, [0.4, 0.3, 0.2, 0.1]))
        if sum(found["sections"]) > width:
            found["sections"] = (1, 0, 0, 0) if mode == MROPE else (1, 1, 0, 0)
    return found


def positions_of(operands: Operands, mode: int, tokens: int) -> int:
    """Positions with gaps between them, some below 0; four of each token, perhaps, side by side."""
    shape = (tokens, 4) if mode in SECTIONED else (tokens,)
    wide = operands.made.input(
        operands.random.integers(-50, 5000, tuple(2 * size for size in shape), np.int32)
    )
    ends = {"start": (1,) * len(shape), "stop": [2 * size for size in shape], "step": (2,) * len(shape)}
    some = operands.made.node("slice", wide, **ends)
    return operands.made.node("permute", some, axes=(1, 0)) if mode in SECTIONED else some


def turned(operands: Operands, op: str, mode: int, x: int) -> int:
    """A rope of a value, with factors or without."""
    random, made = operands.random, operands.made
    *_, tokens, _, width = made.type(x).shape
    attributes = turning(random, mode, width)
    factors = random.uniform(0.5, 2, pairs(attributes) + 3).astype(np.float32)
    more = [made.input(factors)] if random.random() < 0.5 else []
    return made.node(op, x, positions_of(operands, mode, tokens), *more, **attributes)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", ["rope", "rope_back"])
@pytest.mark.parametrize("mode", [NORMAL, NEOX, MROPE, VISION, IMROPE])
def test_heads_turn_wherever_they_lie(
    mode: int, op: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    """Heads lie side by side; tokens and batches need not."""
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    for dimensions in range(1, 5):
        for width in (4, 12, 36, 68):
            shape = (*operands.shape(dimensions, 5), int(random.integers(1, 5)), width)
            behind = operands.view("behind", name, *shape)
            # As queries lie among keys and values; the same for all batches; tokens and batches
            # exchanged.
            among = operands.leaf(name, *shape[:-2], 3 * shape[-2], width)
            stop = (*shape[:-2], 2 * shape[-2], width)
            start = (*(0 for _ in shape[:-2]), shape[-2], 0)
            among = made.node("slice", among, start=start, stop=stop, step=(1,) * len(shape))
            same = made.node("broadcast_to", operands.leaf(name, *shape[-3:]), shape=shape)
            axes = (*reversed(range(len(shape) - 2)), len(shape) - 2, len(shape) - 1)
            moved = made.node("permute", operands.leaf(name, *shape), axes=axes)
            made.output(*(turned(operands, op, mode, x) for x in (behind, among, same, moved)))
    devices.check_exactly(made)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("mode", [NORMAL, NEOX])
def test_heads_turn_in_place_and_on_any_number_of_threads(
    mode: int, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    x = made.node("neg", operands.view("sliced", name, 2, 201, 3, 64))
    first = turned(operands, "rope", mode, x)
    made.output(turned(operands, "rope_back", mode, first))
    with loaded(devices.with_kernels[0], made) as it:
        assert isinstance(it.plan, CpuPlan)
        regions = it.plan.storage.regions
        assert regions[made.number(x)] == regions[made.number(first)]
    devices.check_exactly(made, shared=True)


# Soft maximum


def masked(operands: Operands, name: str, way: str, shape: tuple[int, ...]) -> int:
    """A soft_max over a view, with a mask that lies so, perhaps slopes and sinks."""
    random, made = operands.random, operands.made
    some = [size if random.random() < 0.6 else 1 for size in shape[:-1]]
    some = some[int(random.integers(0, len(shape))) :]
    mask = operands.view(way, name, *some, shape[-1])
    sinks = [operands.view("sliced", "f32", shape[-3])] if len(shape) > 2 and random.random() < 0.5 else []
    x = operands.any_view("f32", *shape)
    bias = float(random.choice([0.0, 8.0]))
    return made.node("soft_max", x, mask, *sinks, scale=0.3, max_bias=bias)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("way", WAYS)
def test_soft_max_reads_masks_wherever_they_lie(
    way: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for dimensions in range(2, 7):
        for columns in (1, 15, 16, 17, 33, 64, 100):
            made.output(masked(operands, name, way, operands.shape(dimensions, columns)))
    devices.check_closely(made)


@pytest.mark.parametrize("name", FLOATS)
def test_soft_max_of_masked_rows_ends_where_they_do(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    """The result is 0 under a mask of -inf, and NaN in a row that is all masked."""
    made = Maker()
    for columns in LENGTHS:
        operands = Operands(made, random, (-np.inf,))
        mask = operands.leaf(name, 3, columns)
        operands.special = ()
        made.output(made.node("soft_max", operands.view("behind", "f32", 4, 3, columns), mask, max_bias=8.0))
    devices.check_closely(made)


@pytest.mark.parametrize("name", FLOATS)
def test_threads_share_soft_max_and_change_no_bits(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for shape in ((5, 3, 31, 500), (9, 3, 2500)):
        made.output(*(masked(operands, name, way, shape) for way in ("behind", "repeated")))
    devices.check_closely(made, shared=True)


@pytest.mark.parametrize("name", NARROW)
def test_the_longest_row_of_a_narrow_mask_and_one_that_is_too_long(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    """A row of the result and the mask's are staged side by side where the result goes past the
    caches."""
    for columns, found in ((MAXIMUM_NARROW, OpPath.KERNEL), (MAXIMUM_NARROW + 1, OpPath.DEFINITION)):
        made = Maker()
        operands = Operands(made, random)
        rows = STREAM_BYTES // 4 // MAXIMUM_NARROW
        made.output(
            made.node("soft_max", operands.leaf("f32", rows, columns), operands.leaf(name, 1, columns))
        )
        assert op_path(devices.with_kernels[0], made) is found
        if found is OpPath.KERNEL:
            devices.check_closely(made, shared=True)


# Norms


@pytest.mark.parametrize("op", ["norm", "rms_norm", "l2_norm", "soft_max"])
def test_rows_of_any_view_are_normed_and_end_where_they_do(
    op: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for columns in (*LENGTHS, 257):
        for dimensions in (1, 3, 6):
            x = operands.any_view("f32", *operands.shape(dimensions, columns))
            made.output(made.node(op, x), made.node(op, made.node("neg", x)))
    made.output(made.node(op, operands.view("turned", "f32", 7, 31, 301)))
    devices.check_closely(made, shared=True)


def test_groups_of_channels_are_normed(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random)
    for side in (1, 3, 4, 5, 301):
        for groups in (1, 2, 6):
            x = operands.any_view("f32", 2, 3, 6, side, 11)
            made.output(made.node("group_norm", x, groups=groups))
    devices.check_closely(made, shared=True)


@pytest.mark.parametrize("op", ["norm", "rms_norm", "l2_norm", "soft_max"])
def test_threads_norm_views_without_changing_bits(
    op: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for shape in ((3, 5, 37, 129), (40, 1031), (7001, 9)):
        made.output(*(made.node(op, operands.view(way, "f32", *shape)) for way in ("sliced", "behind")))
    devices.check_closely(made, shared=True)


# Rows of f16 and bf16


NORMS = ["norm", "rms_norm", "l2_norm", "soft_max"]
SUMS = ["sum_rows", "reduce_max", "reduce_sum", "reduce_mean", "sum"]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("op", [*NORMS, *SUMS])
def test_narrow_rows_are_computed_in_float32_and_rounded_once(
    op: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    more = {"axes": (-1,)} if op.startswith("reduce_") else {}
    for columns in (*LENGTHS, 257, 5000):
        for way in ("whole", "behind"):
            made.output(made.node(op, operands.view(way, name, *operands.shape(3, columns)), **more))
    devices.check_closely(made)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_scores_have_masks_slopes_and_sinks(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for mask in ("f32", name):
        for columns in (1, 17, 100, 1000):
            x = operands.view("behind", name, 2, 3, 5, columns)
            bias = operands.view("repeated", mask, 5, columns)
            sinks = operands.leaf("f32", 3)
            made.output(made.node("soft_max", x, bias, sinks, scale=0.3, max_bias=8.0))
            made.output(made.node("soft_max", x, bias), made.node("soft_max", x, scale=0.5))
    devices.check_closely(made)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_groups_of_channels_are_normed(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for side in (1, 4, 61):
        x = operands.view("behind", name, 2, 3, 6, side, 11)
        made.output(*(made.node("group_norm", x, groups=groups) for groups in (1, 2, 6)))
    devices.check_closely(made)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("op", NORMS)
def test_threads_share_narrow_rows_and_change_no_bits(
    op: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for shape in ((40, 1031), (7001, 9), (3, 40_000)):
        made.output(made.node(op, operands.view("behind", name, *shape)))
    devices.check_closely(made, shared=True)


@pytest.mark.parametrize("op", [*NORMS, "sum_rows"])
def test_the_longest_narrow_row_and_one_that_is_too_long(op: str, devices: Devices) -> None:
    """A worker's scratch has room for a row of so many float32."""
    for columns, found in ((MOST_NARROW, OpPath.KERNEL), (MOST_NARROW + 1, OpPath.DEFINITION)):
        made = Maker()
        made.output(made.node(op, made.input(np.ones((1, columns), np.float16))))
        assert op_path(devices.with_kernels[0], made) is found
        if found is OpPath.KERNEL:
            devices.check_closely(made)
