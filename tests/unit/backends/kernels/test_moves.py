"""Copies with conversion and rows by index as native steps: the definition's bits, for every data
type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Maker, loaded, nothing_left, run, same_bits

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import Block, Stored
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.quantization import blocks as bfloat16
from heliograph_proto.quantization.blocks import quantize
from heliograph_proto.types import DTYPES, dtype

FLOATS = ("f32", "f16", "bf16")
BLOCKS = [each.name.lower() for each in Stored if each.name not in ("F16", "BF16")]
PACKED = [each.name.lower() for each in Block]
PLAIN = [name for name, found in DTYPES.items() if found.kind != "quantized"]


def values(random: np.random.Generator, name: str, *shape: int) -> Array:
    """Random elements of a data type, as they are stored."""
    found = dtype(name)
    if found.kind == "quantized":
        return quantize(random.standard_normal(shape, np.float32), name)
    if name == "bf16":
        return np.asarray(bfloat16.to_bits(random.standard_normal(shape, np.float32)))
    if found.is_float:
        return np.asarray(random.standard_normal(shape)).astype(found.numpy)
    return random.integers(0, 2 if name == "bool" else 100, shape).astype(found.numpy)


def leaf(made: Maker, array: Array, name: str) -> int:
    needs_name = name == "bf16" or dtype(name).kind == "quantized"
    return made.input(array, name if needs_name else "")


def is_native(device: CpuDevice, made: Maker) -> bool:
    with loaded(device, made) as it:
        assert isinstance(it.plan, CpuPlan)
        return len(it.plan._native) == len(it.plan._steps) == 1


def check(device: CpuDevice, definition: CpuDevice, made: Maker) -> None:
    """Runs the kernels, which must be all, and compares bit by bit with the definition."""
    assert is_native(device, made)
    (found,), (expected,) = run(device, made), run(definition, made)
    if found.dtype == np.float32:
        # A product of zero has the sign of its factor in the definition, and none in a kernel.
        found, expected = found + np.float32(0), expected + np.float32(0)
    assert same_bits(found, expected)


# Copies


def every_half() -> Array:
    """All f16 but NaN."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return halves[~np.isnan(halves)]


def around_halves() -> Array:
    """f32 at, beside and between all f16, and around the ends of their range."""
    halves = every_half()
    wide = np.sort(halves[np.isfinite(halves)].astype(np.float32))
    between = (wide[1:] + wide[:-1]) / np.float32(2)
    far = np.array([65504, 65519.996, 65520, 1e6, 3e38, np.inf, 1e-30, 2.0**-25, 2.0**-24], np.float32)
    found = np.concatenate([wide, between, far, -far])
    return np.concatenate([found, np.nextafter(found, np.float32(0)), np.nextafter(found, np.float32(9e9))])


def as_stored(x: Array, name: str) -> Array:
    """f32 as another float stores it."""
    with np.errstate(all="ignore"):
        return {"f32": x, "f16": x.astype(np.float16), "bf16": np.asarray(bfloat16.to_bits(x))}[name]


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("op", ["cast", "cpy"])
def test_floats_are_rounded_once_and_to_even(
    op: str, source: str, target: str, device: CpuDevice, definition: CpuDevice
) -> None:
    stored = as_stored(around_halves(), source)
    made = Maker()
    given = leaf(made, stored, source)
    if op == "cpy":
        shape = np.zeros(len(stored), np.uint16 if target == "bf16" else dtype(target).numpy)
        made.output(made.node("cpy", given, leaf(made, shape, target)))
    else:
        made.output(made.node(op, given, **({"dtype": DTYPES[target]} if op == "cast" else {})))
    check(device, definition, made)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_what_is_no_number_stays_none(source: str, target: str, device: CpuDevice) -> None:
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF, 0x7FFFFFFF] * 5, np.uint32)
    x = bits.view(np.float32)
    made = Maker()
    made.output(made.node("cast", leaf(made, as_stored(x, source), source), dtype=DTYPES[target]))
    (found,) = run(device, made)
    assert np.isnan(bfloat16.from_bits(found) if target == "bf16" else found).all()


def test_halves_are_rounded_without_an_instruction_for_it_too() -> None:
    """Some machines have none."""
    from numba import types

    from heliograph_backends.cpu.kernels.matmul.stored_lanes import SHORTS
    from heliograph_backends.cpu.kernels.rows.convert_lanes import half_bits_by_hand
    from heliograph_backends.cpu.kernels.vector.lanes import LANES, Lanes, emitted, jit, pointer

    @emitted(types.void, types.int64, types.int64)
    def narrow(builder: Any, target: Any, source: Any) -> None:
        shorts = half_bits_by_hand(builder, Lanes.load(builder, source))
        builder.store(shorts, pointer(builder, target, SHORTS), align=2)

    @jit
    def narrow_all(target: int, source: int, count: int) -> None:
        for start in range(0, count, LANES):
            narrow(target + 2 * start, source + 4 * start)

    x = around_halves()
    x = np.concatenate([x, np.full(-len(x) % LANES, np.nan, np.float32)])
    found = np.empty(len(x), np.float16)
    narrow_all(found.ctypes.data, x.ctypes.data, len(x))
    number = ~np.isnan(x)
    with np.errstate(over="ignore"):
        assert same_bits(found[number], x[number].astype(np.float16))
    assert np.isnan(found[~number]).all()


@pytest.mark.parametrize("name", [*PLAIN, "q8_0", "q4_k"])
@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 0, 256), (2, 3, 2, 256)])
def test_every_data_type_is_copied_by_the_byte(
    name: str,
    shape: tuple[int, ...],
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    made = Maker()
    made.output(made.node("cont", leaf(made, values(random, name, *shape), name)))
    assert 0 in shape or is_native(device, made)
    (found,), (expected,) = run(device, made), run(definition, made)
    assert same_bits(found, expected)


@pytest.mark.parametrize("target", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("source", ["f16", "bf16", "f32"])
def test_copies_walk_any_strides(
    source: str,
    target: str,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    for axes in ((2, 0, 1), (1, 0, 2), (2, 1, 0)):
        made = Maker()
        x = leaf(made, values(random, source, 5, 40, 37), source)
        some = made.node("slice", x, start=(1, 0, 3), stop=(5, 40, 37), step=(1, 3, 2))
        made.output(made.node("cast", made.node("permute", some, axes=axes), dtype=DTYPES[target]))
        check(device, definition, made)


def test_views_concatenations_and_assignments_of_other_types_are_native(
    device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(values(random, "f16", 6, 10))
    turned = made.node("reshape", made.node("permute", x, axes=(1, 0)), shape=(4, 15))
    made.output(made.node("concat", turned, made.input(values(random, "f16", 2, 15)), axis=0))
    check(device, definition, made)


@pytest.mark.parametrize("name", PACKED)
def test_floats_become_the_definitions_blocks(
    name: str, device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    x = random.standard_normal((50, 96), np.float32) * np.float32(10) ** random.integers(-6, 4, (50, 1))
    x = x.astype(np.float32)
    x[0], x[1, 5], x[2, :32] = 0, -x[1, 4], np.float32(0.5)
    x[3] = np.round(random.standard_normal(96, np.float32) * 4) / 4 + np.float32(0.125)  # sizes that repeat
    x[4] = np.linspace(-127.5, 127.5, 96)
    made = Maker()
    made.output(made.node("cast", made.input(x), dtype=DTYPES[name]))
    check(device, definition, made)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("blocks", [1, 3, 16, 33, 70])
def test_blocks_become_the_definitions_floats(
    name: str,
    blocks: int,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    made = Maker()
    rows = values(random, name, 3, blocks * dtype(name).block_size)
    made.output(made.node("cast", leaf(made, rows, name), dtype=DTYPES["f32"]))
    check(device, definition, made)


# Rows by index


@pytest.mark.parametrize("name", [*PLAIN, *BLOCKS])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_rows_of_every_data_type_are_found(
    name: str,
    index: Any,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    width = max(37, 2 * dtype(name).block_size) if dtype(name).kind != "quantized" else 512
    for lead, count in (((), 5), ((2, 3), 4), ((1, 2), 1)):
        made = Maker()
        rows = leaf(made, values(random, name, *lead, 9, width), name)
        made.output(made.node("get_rows", rows, made.input(random.integers(0, 9, (*lead, count), index))))
        check(device, definition, made)


@pytest.mark.parametrize("target", [*FLOATS, *PACKED, "f64", "i32", "bool"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_rows_are_written_and_the_others_stay(
    target: str,
    index: Any,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    source = target if target in ("f64", "i32", "bool") else "f32"
    for lead, count, width in (((), 4, 64), ((2, 3), 5, 96), ((1,), 7, 2048)):
        made = Maker()
        kept = leaf(made, values(random, target, *lead, 9, width), target)
        rows = leaf(made, values(random, source, *lead, count, width), source)
        # The same index may come twice: the later row stays.
        which = made.input(random.integers(0, 9, (*lead, count), index))
        made.output(made.node("set_rows", kept, rows, which))
        check(device, definition, made)


@pytest.mark.parametrize("pair", [("f16", "bf16"), ("bf16", "f16"), ("f32", "f16"), ("f32", "bf16")])
def test_rows_of_one_float_are_written_into_another(
    pair: tuple[str, str], device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    into, source = pair
    made = Maker()
    kept, rows = (
        leaf(made, values(random, name, 3, 8, 33), name) for name, _ in zip(pair, "ab", strict=True)
    )
    some = made.node("slice", rows, start=(0, 1, 0), stop=(3, 8, 33), step=(1, 3, 1))
    made.output(made.node("set_rows", kept, some, made.input(np.array([6, 0, 6], np.int32))))
    check(device, definition, made)


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0"])
def test_a_cache_is_written_in_place(name: str, device: CpuDevice, random: np.random.Generator) -> None:
    made = Maker()
    before = values(random, name, 9, 64)
    needs_name = name == "q8_0"
    cache = made.variable(before, name if needs_name else "")
    rows = random.standard_normal((2, 64), np.float32)
    written = made.node("set_rows", cache, made.input(rows), made.input(np.array([7, 2], np.int64)))
    made.output(made.node("cont", made.node("assign", cache, written)))
    with loaded(device, made) as it:
        assert isinstance(it.plan, CpuPlan)
        assert it.plan.steps == 2 and len(it.plan._native) == len(it.plan._steps) == 1
        (found,) = it.run()
    expected = before.copy()
    expected[[7, 2]] = quantize(rows, name) if needs_name else rows.astype(before.dtype)
    assert found is not None and same_bits(found, expected)


@pytest.mark.parametrize("op", ["get_rows", "set_rows"])
@pytest.mark.parametrize("wrong", [9, -1, 2**31 - 1, -(2**31)])
def test_an_index_outside_is_an_error_that_names_it_and_nothing_is_written(
    op: str, wrong: int, device: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(values(random, "f32", 4, 40))
    kept = made.variable(values(random, "f16", 9, 40))
    which = made.input(np.array([3, wrong, 20, 1], np.int32))
    first = made.node("exp", x)
    if op == "set_rows":
        made.output(made.node("cont", made.node("assign", kept, made.node("set_rows", kept, first, which))))
    else:
        made.output(made.node("add", made.node("get_rows", kept, which), first))
    with loaded(device, made) as it:
        for _ in range(2):
            with pytest.raises(OutOfRangeError, match=f"{op}: index {wrong} is not one of 9 rows") as caught:
                it.run()
            assert caught.value.origin is not None and caught.value.origin.op == op
        assert same_bits(np.array(it.tensors[1].array), made.arrays[1])
        it.inputs[-1].array[...] = (3, 0, 8, 1)
        assert it.run()[0] is not None
        it.inputs[-1].array[...] = made.arrays[2]


def test_threads_change_no_bits(random: np.random.Generator) -> None:
    made = Maker()
    kept = made.input(values(random, "f16", 700, 1024))
    rows = made.input(values(random, "f32", 600, 1024))
    which = made.input(random.integers(0, 700, 600, np.int32))
    written = made.node("set_rows", kept, rows, which)
    made.output(made.node("cast", made.node("get_rows", written, which), dtype=DTYPES["bf16"]))
    found = []
    for threads in (1, 2, 5):
        with nothing_left(CpuDevice(threads=threads, memory_bytes=2**28)) as device:
            found += run(device, made)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


COMBINED = {"add_rows": np.add, "mul_rows": np.multiply, "max_rows": np.maximum, "min_rows": np.minimum}


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("shape", [(9, 1), (7, 33), (3, 600)])
@pytest.mark.parametrize("op", COMBINED)
def test_rows_are_combined_in_the_order_of_their_indices_whatever_the_threads(
    op: str, shape: tuple[int, int], threads: int, definition: CpuDevice, random: np.random.Generator
) -> None:
    """Each index occurs often, and sums and products in another order have other bits."""
    count, width = shape
    target = random.standard_normal(shape, np.float32)
    rows = random.uniform(0.9, 1.1, (400, width)).astype(np.float32) * random.choice([-1, 1], (400, 1))
    rows = rows.astype(np.float32)
    rows[7, 0] = np.nan
    indices = random.integers(0, count, 400)
    expected = target.copy()
    for index, row in zip(indices, rows, strict=True):
        expected[index] = COMBINED[op](expected[index], row)
    made = Maker()
    made.output(made.node(op, made.input(target), made.input(rows), made.input(indices)))
    with nothing_left(CpuDevice(threads=threads, memory_bytes=2**28)) as native:
        (found,), (defined,) = run(native, made), run(definition, made)
    np.testing.assert_array_equal(found, expected)
    assert same_bits(found[1:], defined[1:])


@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_gradient_of_a_gather_has_the_bits_of_the_definition(
    lead: tuple[int, ...], definition: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    gradient = made.input(random.standard_normal((*lead, 300, 37), np.float32))
    indices = made.input(random.integers(0, 11, (*lead, 300)))
    made.output(made.node("get_rows_back", gradient, indices, rows=12))
    (defined,) = run(definition, made)
    for threads in (1, 4):
        with nothing_left(CpuDevice(threads=threads, memory_bytes=2**28)) as native:
            (found,) = run(native, made)
        assert same_bits(found, defined)
    assert not found[..., 11, :].any()
