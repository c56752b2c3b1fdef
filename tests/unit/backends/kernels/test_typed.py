"""Comparisons, selections, casts and integers on kernels have the definition's bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from backend_graphs import Maker, loaded, run, same_bits
from narrow_views import ENDS, FLOATS, WAYS, Devices, Operands

from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.types import DTYPES

INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32")
WIDE = ("i64", "u64")
PLAIN = (*FLOATS, *INTEGERS)
EVERY = (*PLAIN, "bool")
OF_TWO = {
    **dict.fromkeys(("equal", "not_equal"), (*EVERY, *WIDE)),
    **dict.fromkeys(("less", "less_equal", "greater", "greater_equal"), (*PLAIN, *WIDE)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), ("bool",)),
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum", "floor_divide", "remainder"), INTEGERS),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), INTEGERS),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), INTEGERS),
    "copysign": FLOATS,
}
OF_ONE = {
    **dict.fromkeys(("isnan", "isinf", "isfinite", "signbit"), FLOATS),
    "logical_not": ("bool",),
    **dict.fromkeys(("neg", "abs", "sgn", "sqr", "bitwise_invert"), INTEGERS),
}
#: Casts to integers of numbers that these do not have are not defined.
SAFE = {"u32": (0.0, -0.0, 0.4, 1e9, 4e9, -1.0), "u64": (0.0,)}
CASTS = [
    *((a, b) for a in EVERY for b in (*EVERY, "i64") if a != b),
    *((a, "f64") for a in FLOATS),
    *((a, b) for a in WIDE for b in (*INTEGERS, "bool")),
    *((a, "u64") for a in (*INTEGERS, "bool")),
    ("i64", "f32"),
    ("f64", "f32"),
]


def check(devices: Devices, made: Maker, *, shared: bool = False) -> None:
    """Kernels alone have the definition's bits."""
    pairs = zip(devices.found(made, shared=shared), run(devices.definition, made), strict=True)
    for place, (found, expected) in enumerate(pairs):
        type = made.type(made.outputs[place])
        assert same_bits(found, expected), f"{made.nodes[-1][0]}, output {place}, {type}"


def shapes(operands: Operands, random: np.random.Generator) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Ways in which operands lie, with shapes of up to five dimensions and rows of up to 70."""
    yield "whole", ()
    for dimensions in range(1, 6):
        for way in WAYS:
            yield way, operands.shape(dimensions, int(random.integers(1, 71)))


def narrower(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one."""
    some = tuple(int(random.choice([1, size])) for size in shape)
    return some[int(random.integers(0, len(shape) + 1)) :]


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OF_TWO for name in OF_TWO[op]])
def test_ops_of_two_have_the_bits_of_the_definition(
    op: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for way, shape in shapes(operands, random):
        x, y = operands.view(way, name, *shape), operands.any_view(name, *narrower(random, shape))
        made.output(made.node(op, x, y), made.node(op, y, x))
    check(devices, made)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OF_ONE for name in OF_ONE[op]])
def test_ops_of_one_have_the_bits_of_the_definition(
    op: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for way, shape in shapes(operands, random):
        made.output(made.node(op, operands.view(way, name, *shape)))
    check(devices, made)


@pytest.mark.parametrize("name", EVERY)
def test_where_keeps_all_bits(name: str, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for way, shape in shapes(operands, random):
        condition = operands.any_view("bool", *narrower(random, shape))
        x, y = operands.view(way, name, *shape), operands.any_view(name, *narrower(random, shape))
        made.output(made.node("where", condition, x, y), made.node("where", condition, y, x))
    check(devices, made)


def test_where_keeps_the_digits_of_nan(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    condition = made.input(random.random(70) < 0.5)
    for bits, kind in ((np.uint32, np.float32), (np.uint16, np.float16)):
        ends = np.iinfo(bits).max
        x, y = (made.input(random.integers(0, ends, 70, bits, endpoint=True).view(kind)) for _ in range(2))
        made.output(made.node("where", condition, x, y))
    check(devices, made)


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_have_the_bits_of_the_definition(
    source: str, target: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, SAFE.get(target, ENDS))
    for way, shape in shapes(operands, random):
        x = operands.view(way, source, *shape)
        if target == "u32" and source in FLOATS:
            x = made.node("abs", x)
        made.output(made.node("cast", x, dtype=DTYPES[target]))
    check(devices, made)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70])
def test_rows_of_any_length(size: int, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for name in EVERY:
        x, y = operands.leaf(name, 3, size), operands.leaf(name, size)
        made.output(made.node("equal", x, y), made.node("where", made.node("equal", x, y), x, y))
    if size:
        check(devices, made)
    else:
        assert all(map(same_bits, run(devices.with_kernels[0], made), run(devices.definition, made)))


@pytest.mark.parametrize("shape", [(3, 17, 1301), (1301, 3, 17), (40_000, 2)])
def test_threads_share_ops_and_change_no_bits(
    shape: tuple[int, ...], devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for way in ("sliced", "turned", "repeated"):
        for name in ("f32", "i32", "u8"):
            x, y = operands.view(way, name, *shape), operands.view(way, name, *shape)
            mask = made.node("less", x, y)
            made.output(made.node("where", mask, x, y), made.node("logical_not", mask))
    check(devices, made, shared=True)


def steps(devices: Devices, made: Maker) -> int:
    with loaded(devices.with_kernels[0], made) as it:
        assert isinstance(it.plan, CpuPlan)
        return sum(group.role != "other" for group in it.plan._groups)


def test_a_chain_of_floats_masks_and_integers_is_one_step(
    devices: Devices, random: np.random.Generator
) -> None:
    """Leaky relu by hand, a causal mask, and a product with a mask."""
    made = Maker()
    operands = Operands(made, random, ENDS)
    x, zero = operands.leaf("f32", 70, 70), made.node("fill", shape=(), value=0.0, dtype=DTYPES["f32"])
    below = made.node("fill", shape=(), value=float("-inf"), dtype=DTYPES["f32"])
    chain = made.node("where", made.node("greater", x, zero), made.node("exp", x), made.node("neg", x))
    row, column = operands.leaf("i32", 70, 1), operands.leaf("i32", 70)
    causal = made.node("where", made.node("less_equal", column, row), zero, below)
    masked = made.node("mul", made.node("cast", operands.leaf("bool", 70, 70), dtype=DTYPES["f32"]), x)
    made.output(chain, made.node("add", causal, x), masked)
    assert steps(devices, made) == 3
    devices.check_closely(made)


def test_fusion_does_not_change_bits(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    two, zero = made.input(np.int32([2])), made.input(np.int32([0]))
    for shape in ((5, 70), (70, 5)):
        x, y = operands.leaf("f32", *shape), operands.any_view("f32", *shape)
        number, mask = operands.any_view("i16", *shape), operands.any_view("bool", shape[-1])
        whole = made.node("cast", number, dtype=DTYPES["i32"])
        even = made.node("equal", made.node("remainder", whole, two), zero)
        picked = made.node("where", made.node("logical_and", even, mask), made.node("mul", x, y), y)
        made.output(made.node("isnan", picked))
        made.output(made.node("add", picked, made.node("cast", whole, dtype=DTYPES["f32"])))
        ids, pad = operands.any_view("i64", *shape), operands.leaf("i64")
        made.output(made.node("where", made.node("less", ids, pad), x, y))
        square = made.input(random.standard_normal((shape[1], shape[1]), np.float32))
        sums = made.node("add", made.node("matmul", x, square), x)
        made.output(made.node("where", mask, sums, y))
    device = devices.with_kernels[0]
    pairs = zip(run(device, made), run(device, made, fusion=False), strict=True)
    assert all(same_bits(found, expected) for found, expected in pairs)


def test_the_place_of_the_largest_becomes_i64(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    place = made.node("argmax", Operands(made, random).leaf("f32", 9, 70))
    made.output(made.node("cast", place, dtype=DTYPES["i64"]))
    check(devices, made)
