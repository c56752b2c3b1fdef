"""Attention as one native step: against the definition, and the same bits however it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Maker, loaded, normalised_error, nothing_left, run, same_bits

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import quantize

SIZES = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (40, 16), (16, 48)]
TOLERANCE = 1e-11


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape, np.float32)


def stored(x: Array, name: str) -> tuple[Array, str]:
    """Floats as a data type stores them, and what to call that."""
    if name == "bf16":
        return np.asarray(blocks.to_bits(x)), name
    return (x.astype(name), "") if name.startswith("float") else (quantize(x, name), name)


def causal(rows: int, keys: int, dtype: Any = np.float16) -> Array:
    """Each query sees the keys up to its own; the last one sees all."""
    return np.where(np.arange(keys) > np.arange(keys - rows, keys)[:, None], -np.inf, 0).astype(dtype)


def attention(operands: list[Array], keys: str = "float32", values: str = "", **attributes: float) -> Maker:
    """A graph of nothing else; keys and values are stored in a type."""
    made = Maker()
    q, k, v, *rest = operands
    leaves = [made.input(q), made.input(*stored(k, keys)), made.input(*stored(v, values or keys))]
    leaves += [made.input(each) for each in rest]
    made.output(made.node("flash_attn_ext", *leaves, **{"scale": q.shape[-1] ** -0.5, **attributes}))
    return made


def qkv(
    random: np.random.Generator,
    rows: int,
    keys: int,
    width: int = 64,
    value_width: int = 64,
    heads: tuple[int, int, int] = (1, 4, 2),
) -> list[Array]:
    """Queries, keys and values of (batch, heads, heads of the keys)."""
    batch, many, few = heads
    return [
        normal(random, batch, many, rows, width),
        normal(random, batch, few, keys, width),
        normal(random, batch, few, keys, value_width),
    ]


def is_one_step(device: CpuDevice, made: Maker) -> bool:
    with loaded(device, made) as it:
        assert isinstance(it.plan, CpuPlan)
        return it.plan.steps == len(it.plan._native) == len(it.plan._steps) == 1


def check(device: CpuDevice, definition: CpuDevice, made: Maker, tolerance: float = TOLERANCE) -> Array:
    """Runs the kernel, and compares with the definition."""
    assert is_one_step(device, made)
    (found,), (expected,) = run(device, made), run(definition, made)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert normalised_error(found, expected) < tolerance
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 5, 70])
@pytest.mark.parametrize("keys", ["float32", "float16"])
def test_heads_of_every_usual_size(
    size: tuple[int, int],
    rows: int,
    keys: str,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    check(device, definition, attention(qkv(random, rows, 150, *size), keys))


@pytest.mark.parametrize("keys", ["float32", "float16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_keys_and_values_in_every_storage(
    keys: str, rows: int, device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    operands = [*qkv(random, rows, 300), causal(rows, 300)]
    check(device, definition, attention(operands, keys))
    check(device, definition, attention(operands, keys, "float32"))
    check(device, definition, attention(operands, "float16", keys))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("keys", [1, 13, 128, 131, 400])
def test_masks_slopes_sinks_and_caps(
    dtype: Any,
    rows: int,
    keys: int,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    operands = qkv(random, rows, keys, heads=(2, 6, 3))
    bias = normal(random, rows, keys).astype(dtype)
    sinks = normal(random, 6)
    check(device, definition, attention([*operands, causal(rows, keys, dtype)]))
    check(device, definition, attention([*operands, bias], max_bias=8.0))
    check(device, definition, attention([*operands, bias, sinks], "float16"))
    check(device, definition, attention([*operands, bias], "float16", logit_softcap=2.0))
    every = normal(random, 2, 6, rows, keys).astype(dtype)
    check(device, definition, attention([*operands, every, sinks], max_bias=4.0, logit_softcap=30.0))


@pytest.mark.parametrize("rows", [1, 6])
def test_a_row_that_is_hidden_whole_is_zero(
    rows: int, device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    operands = qkv(random, rows, 300)
    mask = np.zeros((rows, 300), np.float16)
    mask[0] = -np.inf
    for more in ([], [normal(random, 4)]):
        found = check(device, definition, attention([*operands, mask, *more]))
        assert not found[:, 0].any()
    found = check(device, definition, attention([*operands, np.full_like(mask, -np.inf)]))
    assert not found.any() and not np.signbit(found).any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_shows_in_its_row_alone(
    wrong: float, device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    q, k, v = qkv(random, 5, 140)
    q[0, 1, 3, 7] = wrong
    found = check(device, definition, attention([q, k, v]))
    assert np.isnan(found[0, 3, 1]).all() and np.isnan(found).sum() == 64


def test_keys_that_are_hidden_from_all_are_not_read(device: CpuDevice, random: np.random.Generator) -> None:
    """As in a cache of which a part was never written."""
    q, k, v = qkv(random, 2, 512)
    mask = np.zeros((2, 512), np.float16)
    mask[:, 256:] = -np.inf
    (expected,) = run(device, attention([q, k, v, mask]))
    k[..., 256:, :] = np.nan
    v[..., 256:, :] = np.nan
    (found,) = run(device, attention([q, k, v, mask]))
    assert same_bits(found, expected)


@pytest.mark.parametrize("keys", ["float32", "float16", "q8_0"])
def test_a_query_has_the_bits_that_it_has_alone(
    keys: str, device: CpuDevice, random: np.random.Generator
) -> None:
    q, k, v = qkv(random, 70, 300, heads=(2, 4, 2))
    mask = causal(70, 300)
    (whole,) = run(device, attention([q, k, v, mask], keys))
    for first, count in ((0, 1), (3, 2), (10, 4), (20, 5), (69, 1)):
        some = slice(first, first + count)
        (found,) = run(device, attention([q[:, :, some], k, v, mask[some]], keys))
        assert same_bits(found, np.ascontiguousarray(whole[:, some]))


@pytest.mark.parametrize("rows", [1, 130])
def test_threads_change_no_bits(rows: int, random: np.random.Generator) -> None:
    made = attention([*qkv(random, rows, 700, heads=(1, 8, 8)), causal(rows, 700)], "float16")
    found = []
    for threads in (1, 2, 5):
        with nothing_left(CpuDevice(threads=threads, memory_bytes=2**28)) as device:
            found += run(device, made)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


def test_a_cache_in_the_order_of_tokens_is_read_where_it_lies(
    device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    q = made.node("permute", made.input(normal(random, 1, 3, 4, 64)), axes=(0, 2, 1, 3))
    kept = [made.input(normal(random, 1, 50, 2, 64).astype(np.float16)) for _ in range(2)]
    heads = [made.node("permute", each, axes=(0, 2, 1, 3)) for each in kept]
    seen = [
        made.node("slice", each, start=(0, 0, 5, 0), stop=(1, 2, 45, 64), step=(1, 1, 1, 1)) for each in heads
    ]
    made.output(made.node("flash_attn_ext", q, *seen, made.input(causal(3, 40)), scale=0.125))
    check(device, definition, made)


@pytest.mark.parametrize(
    ("width", "mask"), [(20, None), (1040, None), (64, (2, 2, 5, 30)), (64, (3, 1, 5, 30))]
)
def test_what_the_kernel_does_not_take_runs_on_the_definition(
    width: int,
    mask: tuple[int, ...] | None,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    """Values that are no whole vectors, or too wide; masks of which a few serve all heads in
    turn."""
    operands = qkv(random, 5, 30, width, width, heads=(6, 4, 2))
    made = attention([*operands, normal(random, *mask)] if mask else operands)
    assert not is_one_step(device, made)
    (found,), (expected,) = run(device, made), run(definition, made)
    assert same_bits(found, expected)
