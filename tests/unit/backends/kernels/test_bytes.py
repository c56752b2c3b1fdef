"""Elements that lie side by side are computed as they lie: four or two of a result as one word."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from backend_graphs import Array, Maker, loaded

from heliograph_backends.cpu import CpuDevice

INTEGERS = ("add", "sub", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
SHORTS = (*INTEGERS, "mul")
LOGICAL = ("logical_and", "logical_or", "logical_xor", "equal", "not_equal")
#: Elements of a word, of a vector and of several chunks, a word more, and less than a word.
SIZES = (1, 3, 4, 64, 68, 70, 9000)


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[CpuDevice, CpuDevice]]:
    """A device with kernels, and one that runs the definition."""
    native, plain = (CpuDevice(threads=1, native=native) for native in (True, False))
    yield native, plain
    native.close()
    plain.close()


def values(name: str, *shape: int) -> Array:
    random = np.random.default_rng(int(np.prod(shape)))
    if name == "bool":
        return random.random(shape) < 0.5
    if name == "float32":
        found = random.integers(-2, 3, shape).astype(np.float32)
        return np.where(random.random(shape) < 0.2, np.float32("nan"), found)
    # Equal numbers, and such as differ in their highest or their lowest bits alone.
    kind = np.dtype(name)
    bits = random.integers(0, 256, shape) * random.choice([1, 2 ** (8 * kind.itemsize - 8)], shape)
    return bits.astype(f"u{kind.itemsize}").view(kind)


def result(device: CpuDevice, made: Maker, *, fusion: bool = True) -> Array:
    with loaded(device, made, fusion=fusion) as it:
        (found,) = it.run()
    assert found is not None
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", INTEGERS + COMPARISONS)
@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_integers_have_the_bits_of_the_definition(
    name: str, op: str, size: int, sides: tuple[CpuDevice, CpuDevice]
) -> None:
    made = Maker()
    x, y = made.input(values(name, size)), made.input(values(name, size)[::-1].copy())
    made.output(made.node(op, x, y))
    found, expected = (result(device, made) for device in sides)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", SHORTS)
@pytest.mark.parametrize("name", ["int16", "uint16"])
def test_shorts_have_the_bits_of_the_definition(
    name: str, op: str, size: int, sides: tuple[CpuDevice, CpuDevice]
) -> None:
    test_integers_have_the_bits_of_the_definition(name, op, size, sides)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("name", ["int16", "uint16", "int32", "uint32", "int64", "uint64", "float32"])
def test_elements_of_any_size_are_compared(
    name: str, op: str, size: int, sides: tuple[CpuDevice, CpuDevice]
) -> None:
    test_integers_have_the_bits_of_the_definition(name, op, size, sides)


def test_comparisons_of_several_types_are_one_step(sides: tuple[CpuDevice, CpuDevice]) -> None:
    made = Maker()
    pairs = [[made.input(values(name, 3, 500)) for _ in "ab"] for name in ("int64", "float32", "uint16")]
    found = [made.node("less_equal", *pair) for pair in pairs]
    both = made.node("logical_and", found[0], made.node("logical_not", found[1]))
    made.output(made.node("logical_or", both, found[2]))
    native, plain = sides
    with loaded(native, made) as it:
        assert it.plan.steps == 1
    assert np.array_equal(result(native, made), result(plain, made))


@pytest.mark.parametrize("op", ["neg", "bitwise_invert", "sqr"])
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
def test_ops_of_one_operand_have_them_too(name: str, op: str, sides: tuple[CpuDevice, CpuDevice]) -> None:
    made = Maker()
    made.output(made.node(op, made.input(values(name, 12, 17))))
    found, expected = (result(device, made) for device in sides)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("op", LOGICAL)
def test_any_byte_but_0_is_true_whether_or_not_words_are_whole(
    op: str, sides: tuple[CpuDevice, CpuDevice]
) -> None:
    found = []
    for size in (256, 257):
        made = Maker()
        first, second = (np.arange(size) * step // 7 % 256 for step in (1, 3))
        pair = [each.astype(np.uint8).view(np.bool_) for each in (first, second)]
        made.output(made.node(op, *map(made.input, pair)))
        found.append(result(sides[0], made).view(np.uint8))
    assert set(found[0]) <= {0, 1}
    assert np.array_equal(found[0], found[1][:256])


def test_a_chain_of_truth_values_has_the_bits_of_its_nodes(sides: tuple[CpuDevice, CpuDevice]) -> None:
    made = Maker()
    x, y, z = (made.input(values("bool", 5, 8 * more)[:, :16].copy()) for more in (2, 3, 4))
    both = made.node("logical_and", made.node("logical_not", x), y)
    made.output(made.node("logical_xor", both, made.node("logical_or", z, x)))
    native, plain = sides
    expected = result(plain, made)
    assert np.array_equal(result(native, made), expected)
    assert np.array_equal(result(native, made, fusion=False), expected)


def test_views_and_shapes_that_differ_are_computed_one_by_one(
    sides: tuple[CpuDevice, CpuDevice],
) -> None:
    made = Maker()
    x, row = made.input(values("uint8", 8, 12)), made.input(values("uint8", 12))
    turned = made.node("permute", made.input(values("uint8", 12, 8)), axes=(1, 0))
    sliced = made.node("slice", x, start=(0, 1), stop=(8, 9), step=(1, 1))
    made.output(made.node("add", made.node("add", x, row), turned))
    made.output(made.node("sub", sliced, made.node("slice", x, start=(0, 3), stop=(8, 11), step=(1, 1))))
    native, plain = sides
    with loaded(native, made) as mine, loaded(plain, made) as theirs:
        for found, expected in zip(mine.run(), theirs.run(), strict=True):
            assert found is not None
            assert np.array_equal(found, expected)
