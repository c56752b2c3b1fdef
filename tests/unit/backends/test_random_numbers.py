"""Random numbers by counter: published vectors, and numbers that a seed and a counter name."""

from __future__ import annotations

import numpy as np
import pytest
from backend_graphs import Maker, run, same_bits

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import available
from heliograph_backends.reference import randomness
from heliograph_proto.types import DTYPES

#: Of the authors' own test vectors of philox4x32-10: counter, key, words.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], np.uint64) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_blocks_are_those_of_the_published_vectors(counter: str, key: str, expected: str) -> None:
    assert list(randomness.blocks(np, words(counter), words(key))) == words(expected)


def drawn(
    seed: int, counter: int, count: int, dtype: str = "u32", *, native: bool | None = None, threads: int = 1
) -> np.ndarray:
    made = Maker()
    operands = [made.input(np.array(number, np.int64)) for number in (seed, counter)]
    made.output(made.node("philox", *operands, shape=(count,), dtype=DTYPES[dtype]))
    device = CpuDevice(threads=threads, memory_bytes=2**26, native=native)
    try:
        (found,) = run(device, made)
    finally:
        device.close()
    return found


def test_the_first_numbers_of_seed_and_counter_0_are_the_first_vector() -> None:
    assert [f"{word:08x}" for word in drawn(0, 0, 4)] == VECTORS[0][2].split()


def test_other_seeds_and_counters_name_other_numbers_and_a_shorter_draw_is_the_start_of_a_longer() -> None:
    drawings = [tuple(drawn(seed, counter, 64)) for seed in (0, 1, -1) for counter in (0, 1, 2**40)]
    assert len(set(drawings)) == len(drawings)
    assert tuple(drawn(0, 0, 33)) == drawings[0][:33]


def test_floats_are_uniform_below_1() -> None:
    found = drawn(7, 3, 100_000, "f32")
    assert found.dtype == np.float32 and found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, 10, (0, 1))[0]
    assert abs(counts - 10_000).max() < 500


@pytest.mark.skipif(not available(), reason="numba is not installed")
@pytest.mark.parametrize("dtype", ["u32", "f32"])
@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 33, 100_003])
def test_kernels_give_the_bits_of_the_definition_on_any_number_of_threads(count: int, dtype: str) -> None:
    seed, counter = -(2**62) - 7, 2**33 + 1
    wanted = drawn(seed, counter, count, dtype, native=False)
    for threads in (1, 4):
        assert same_bits(drawn(seed, counter, count, dtype, native=True, threads=threads), wanted)
