"""Sorts, searches and running sums along rows as native steps: the definition's elements for any
numbers, views, and numbers of threads."""

from __future__ import annotations

import numpy as np
import pytest
from backend_graphs import Array, Maker, op_path
from narrow_views import ENDS, FLOATS, SPECIAL, WAYS, Devices, Operands, stored

from heliograph_backends.cpu.kernels.program.encoding_searches import HELD, MOST_HELD
from heliograph_backends.cpu.kernels.program.words import KEYS_AT_ONCE as CHUNK
from heliograph_backends.cpu.kernels.program.words import MOST_SORTED
from heliograph_proto.devices import OpPath
from heliograph_proto.types import dtype

#: Around vectors, the words that are held, and the keys that are made at once.
WIDTHS = (
    1,
    2,
    15,
    16,
    17,
    33,
    255,
    256,
    257,
    1000,
    1023,
    1024,
    1025,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    3 * CHUNK + 5,
)
#: Orders of rows that are the most awkward for a search that keeps the best of what it has seen.
ORDERS = ("rising", "falling", "equal", "few", "saw", "nan")


def ordered(order: str, rows: int, columns: int, random: np.random.Generator) -> Array:
    place = np.arange(columns, dtype=np.float32)
    match order:
        case "rising":
            row = place
        case "falling":
            row = -place
        case "equal":
            row = np.zeros(columns, np.float32)
        case "few":
            row = random.choice(np.array([0.0, -0.0, 1.0], np.float32), columns)
        case "saw":
            row = place % 97
        case _:
            row = np.where(random.random(columns) < 0.9, np.float32(np.nan), place)
    return np.tile(row, (rows, 1)).astype(np.float32)


def searches(made: Maker, x: int, random: np.random.Generator) -> None:
    columns = made.type(x).shape[-1]
    made.output(made.node("argsort", x, descending=False), made.node("argsort", x, descending=True))
    made.output(made.node("argmax", x))
    for kept in {1, min(columns, 8), min(columns, 40), int(random.integers(1, columns + 1)), columns}:
        made.output(made.node("top_k", x, k=kept))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_are_sorted_as_the_definition_sorts_them(
    columns: int, name: str, devices: Devices, random: np.random.Generator
) -> None:
    """With equal elements, zeros of both signs, infinities and NaN."""
    made = Maker()
    for special in (SPECIAL, ENDS):
        operands = Operands(made, random, special)
        searches(made, operands.view("behind", name, 3, columns), random)
    devices.check_exactly(made)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_sorted_wherever_they_lie(
    way: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    for dimensions in range(1, 6):
        for columns in (1, 5, 37, 300):
            searches(made, operands.view(way, name, *operands.shape(dimensions, columns)), random)
    devices.check_exactly(made)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_in_any_order_are_searched(order: str, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    for columns in (100, 2 * CHUNK + 3):
        searches(made, made.input(ordered(order, 2, columns, random)), random)
    devices.check_exactly(made)


def test_integers_are_sorted_over_all_their_range(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    ends = np.array([-(2**31), 2**31 - 1, -1, 0, 1], np.int32)
    for columns in (1, 7, 100, CHUNK + 100):
        some = random.integers(-(2**31), 2**31, (3, columns), np.int32)
        searches(
            made, made.input(np.where(random.random(some.shape) < 0.2, random.choice(ends), some)), random
        )
    devices.check_exactly(made)


def test_the_largest_of_a_vocabulary_are_found_in_one_pass(
    devices: Devices, random: np.random.Generator
) -> None:
    """Words for a few times the kept places are all that a worker's scratch has."""
    columns = 152_064
    logits = np.clip(random.standard_normal((4, columns), np.float32), -6, 6)
    made = Maker()
    x = made.input(logits)
    made.output(made.node("argmax", x))
    made.output(*(made.node("top_k", x, k=kept) for kept in (1, 40, 256, MOST_HELD)))
    devices.check_exactly(made, shared=True)


def test_rows_that_need_too_much_scratch_are_sorted_by_the_definition(devices: Devices) -> None:
    wide = np.zeros(MOST_SORTED + 1, np.float32)
    paths = []
    for op, attributes in (("argsort", {}), ("top_k", {"k": MOST_HELD + 1}), ("top_k", {"k": MOST_HELD})):
        made = Maker()
        made.output(made.node(op, made.input(wide), **attributes))
        paths.append(op_path(devices.with_kernels[0], made))
    assert paths == [OpPath.DEFINITION, OpPath.DEFINITION, OpPath.KERNEL]
    assert HELD > 1


@pytest.mark.parametrize("name", [*FLOATS, "f64", "i32", "i64"])
@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_running_numbers_are_those_of_the_definition(
    op: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    """One element after the other, as any other order rounds otherwise."""
    made = Maker()
    operands = Operands(made, random, ENDS)
    for columns in (1, 2, 31, 500, CHUNK + 3):
        for rows in (1, 3, 4, 9):
            if name in FLOATS:
                made.output(made.node(op, operands.any_view(name, rows, columns)))
                continue
            some = 2 * random.standard_normal((columns, rows))
            some = some if name == "f64" else np.round(2**20 * some)
            x = made.input(some.astype(dtype(name).numpy))
            made.output(made.node(op, made.node("permute", x, axes=(1, 0))))
    devices.check_exactly(made)


def test_running_sums_keep_the_sign_of_a_first_zero(devices: Devices) -> None:
    row = np.array([-0.0, -0.0, 0.0, -0.0, np.nan, 1.0], np.float32)
    made = Maker()
    x = made.input(np.tile(row, (5, 1)))
    made.output(made.node("cumsum", x), made.node("cumprod", x))
    with np.errstate(invalid="ignore"):
        expected = [np.cumsum(row), np.cumprod(row)]
    for found, wanted in zip(devices.found(made), expected, strict=True):
        assert np.signbit(found[:, :4]).tolist() == 5 * [np.signbit(wanted[:4]).tolist()]
        assert np.isnan(found[:, 4:]).all()


def test_long_rows_of_halves_do_not_overflow(devices: Devices) -> None:
    made = Maker()
    ones = made.input(stored(np.full((2, 70_000), 0.5, np.float32), "f16"))
    made.output(made.node("cumsum", ones))
    (found,) = devices.found(made)
    assert found[0, -1] == np.float16(35_000)
