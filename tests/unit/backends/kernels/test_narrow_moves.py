"""Copies, conversions and rows by index of f16 and bf16 on kernels, however their operands lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Maker, run
from kernel_runs import over
from kernel_runs import run as run_program
from narrow_views import ENDS, FLOATS, LENGTHS, NARROW, WAYS, Devices, Operands, stored

from heliograph_backends.cpu.kernels import Conversion, ProgramBuilder
from heliograph_proto.types import DTYPES


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions_read_any_view(
    source: str, target: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for dimensions in range(1, 7):
        for way in WAYS:
            shape = operands.shape(dimensions, int(random.choice([1, 15, 16, 17, 40, 97])))
            x = operands.view(way, source, *shape)
            made.output(made.node("cast", x, dtype=DTYPES[target]))
            like = (
                operands.any_view(target, int(np.prod(shape)))
                if dimensions % 2
                else operands.any_view(target, *shape)
            )
            made.output(made.node("cpy", x, like))
    devices.check_exactly(made)


@pytest.mark.parametrize("name", NARROW)
def test_conversions_end_where_rows_do(name: str, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for columns in LENGTHS:
        for source, target in ((name, "f32"), ("f32", name), (name, "f16"), (name, "bf16")):
            for way in ("whole", "sliced", "behind"):
                x = operands.view(way, source, 3, columns)
                made.output(made.node("cast", x, dtype=DTYPES[target]))
    devices.check_exactly(made)


@pytest.mark.parametrize("name", NARROW)
def test_what_is_moved_keeps_its_bits_nan_s_too(name: str, devices: Devices) -> None:
    """All there are: a copy by way of f32 would make quiet ones of signalling ones."""
    every = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    given = every.view(np.float16) if name == "f16" else every
    made = Maker()
    x, kept = (kind(given, "bf16" if name == "bf16" else "") for kind in (made.input, made.variable))
    which = made.input(np.arange(256, dtype=np.int32)[::-1].copy())
    turned = made.node("permute", x, axes=(1, 0))
    made.output(made.node("cont", x), made.node("cont", turned), made.node("cpy", x, x))
    made.output(made.node("concat", turned, x, axis=0), made.node("cont", made.node("assign", kept, turned)))
    made.output(made.node("set_rows", turned, x, which))
    expected = [every, every.T, every, np.concatenate([every.T, every]), every.T, every[::-1]]
    for found, wanted in zip(devices.found(made), expected, strict=True):
        assert np.array_equal(found.view(np.uint16), wanted)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_copies_read_any_view(way: str, name: str, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for dimensions in range(1, 7):
        *leading, columns = operands.shape(dimensions, int(random.integers(1, 50)))
        axis = int(random.integers(0, dimensions))
        x = operands.view(way, name, *leading, columns)
        made.output(made.node("cont", x))
        made.output(made.node("cont", made.node("reshape", x, shape=(-1,))))
        longer = [3 if place == axis else size for place, size in enumerate((*leading, columns))]
        made.output(made.node("concat", x, operands.any_view(name, *longer), x, axis=axis))
        kept = made.variable(*without_data(name, *leading, columns))
        made.output(made.node("cont", made.node("assign", kept, x)))
    devices.check_exactly(made)


def without_data(name: str, *shape: int) -> tuple[Array, str]:
    return stored(np.zeros(shape, np.float32), name), "bf16" if name == "bf16" else ""


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_rows_are_written_from_any_view(
    source: str, target: str, index: Any, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for columns in (1, 7, 16, 33, 300):
        for way in WAYS:
            leading = operands.shape(int(random.integers(1, 4)), 2)
            kept = operands.any_view(target, *leading, 9, columns)
            rows = operands.view(way, source, *leading, 5, columns)
            # The same rows for all of the first dimension; a row may come twice.
            which = made.input(random.integers(0, 9, (1, *leading[1:], 5)).astype(index))
            made.output(made.node("set_rows", kept, rows, which))
    devices.check_exactly(made)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_found_in_any_view(
    way: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for columns in (1, 7, 16, 33, 300):
        leading = operands.shape(int(random.integers(1, 4)), 2)
        rows = operands.view(way, name, *leading, 9, columns)
        which = random.integers(0, 9, (*leading, 2 * 6), np.int32)
        some = made.node(
            "slice",
            made.input(which),
            start=(0,) * which.ndim,
            stop=which.shape,
            step=(1,) * len(leading) + (2,),
        )
        made.output(made.node("get_rows", rows, some))
    devices.check_exactly(made)


@pytest.mark.parametrize("name", NARROW)
def test_threads_share_moves_and_change_no_bits(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    x = operands.view("sliced", name, 5, 61, 701)
    wide = made.node("cast", x, dtype=DTYPES["f32"])
    which = made.input(random.integers(0, 61, (5, 40), np.int64))
    turned = made.node("permute", wide, axes=(2, 0, 1))
    made.output(wide, made.node("cont", x), made.node("cast", turned, dtype=DTYPES[name]))
    made.output(made.node("get_rows", x, which))
    made.output(made.node("set_rows", x, operands.view("turned", "f32", 5, 40, 701), which))
    devices.check_exactly(made, shared=True)


@pytest.mark.parametrize("name", NARROW)
def test_conversions_walk_backwards_too(name: str, random: np.random.Generator) -> None:
    """No graph has negative strides; the kernels take them."""
    x = random.standard_normal((5, 40, 37), np.float32)[::-1, ::-3, ::-2]
    target = np.zeros((19, 14, 5), np.uint16).T
    builder = ProgramBuilder()
    builder.convert(x.shape, over(0, x), over(1, target), Conversion[f"F32_{name.upper()}"])
    run_program(builder, [x, target])
    assert np.array_equal(target, stored(x, name).view(np.uint16))


def test_nothing_is_moved_of_nothing(devices: Devices) -> None:
    made = Maker()
    x = made.input(np.zeros((3, 0, 5), np.float16))
    made.output(made.node("cast", x, dtype=DTYPES["f32"]), made.node("concat", x, x, axis=1))
    assert [each.shape for each in run(devices.with_kernels[0], made)] == [(3, 0, 5), (3, 0, 5)]
