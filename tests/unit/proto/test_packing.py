"""Packed pieces of transfers: encodings, the choice among them, and hostile pieces."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

import heliograph as hg
from heliograph_proto.codec import packing
from heliograph_proto.codec.packing import Encoding, Packer, check_piece, encodings_of, pack, unpack

MIB = 2**20
#: All that this package packs; zstd's library is among the tests' dependencies.
ALL = (Encoding.UPPER_HALVES, Encoding.PLANES_ZSTD)
#: Bytes per second.
SLOW, FAST = 12.5e6, 1e12


def floats() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(MIB // 4, np.float32)


def exact_in_bf16() -> np.ndarray:
    return (floats().view(np.uint32) & 0xFFFF0000).view(np.float32)


def noise() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, MIB, np.uint8)


def view(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class Clock:
    """Each look at it is so many seconds later."""

    def __init__(self, step: float) -> None:
        self.now, self._step = 0.0, step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("size", [4, 64, 4096, MIB])
def test_bytes_come_back_as_they_were(encoding: Encoding, size: int) -> None:
    data = view(np.zeros(size, np.uint8) if size < 4096 else exact_in_bf16())[:size]
    packed = pack(encoding, data)
    if packed is None:
        assert size < 64
        return
    check_piece(encoding, size, len(packed), size, ALL)
    assert unpack(encoding, memoryview(packed), size) == data


@pytest.mark.parametrize("size", [4097, 4098, 4099])
def test_zstd_takes_sizes_that_are_no_whole_words(size: int) -> None:
    data = view(exact_in_bf16())[1 : size + 1]
    packed = pack(Encoding.PLANES_ZSTD, data)
    assert packed is not None
    assert unpack(Encoding.PLANES_ZSTD, memoryview(packed), size) == data
    assert pack(Encoding.UPPER_HALVES, data) is None


def test_what_does_not_get_smaller_is_not_packed() -> None:
    for encoding in ALL:
        assert pack(encoding, view(noise())) is None


def test_a_slow_link_gets_the_smallest_piece_and_a_faster_one_what_is_quick() -> None:
    chosen = {}
    # A sample takes a tenth of a millisecond: 655 MB/s.
    for rate in (0.0, SLOW, 400e6, FAST):
        packer = Packer(ALL, Clock(0.0001))
        chosen[rate], _ = packer.pack(view(exact_in_bf16()), rate)
    assert chosen == {
        0.0: Encoding.PLANES_ZSTD,
        SLOW: Encoding.PLANES_ZSTD,
        400e6: Encoding.UPPER_HALVES,
        FAST: Encoding.PLAIN,
    }


def test_nothing_is_packed_before_the_rate_is_known_nor_without_an_encoding() -> None:
    data = view(np.zeros(MIB, np.uint8))
    assert Packer(ALL, Clock(0.0)).pack(data, None) == (Encoding.PLAIN, data)
    assert Packer((), Clock(0.0)).pack(data, 0.0) == (Encoding.PLAIN, data)


def test_a_choice_that_no_longer_fits_is_made_again() -> None:
    packer = Packer((Encoding.UPPER_HALVES,), Clock(0.0))
    fits, does_not = view(exact_in_bf16()), view(floats())
    found = [packer.pack(one, SLOW)[0] for one in (fits, does_not, does_not, fits)]
    assert found == [Encoding.UPPER_HALVES, Encoding.PLAIN, Encoding.PLAIN, Encoding.PLAIN]
    # After a while another sample is taken.
    for _ in range(packing.SAMPLED_PIECES):
        last, _ = packer.pack(fits, SLOW)
    assert last is Encoding.UPPER_HALVES


def test_without_the_library_only_halves_are_agreed_on() -> None:
    assert encodings_of(("packing",)) == (Encoding.UPPER_HALVES,)
    assert encodings_of(("zstd",)) == ()


@pytest.mark.parametrize(
    ("encoding", "plain", "packed", "most"),
    [(0, 8, 4, 8), (3, 8, 4, 8), (1, 8, 8, 8), (1, 8, 0, 8), (1, 16, 4, 8), (2, 2**40, 4, MIB), (1, 0, 0, 8)],
)
def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(
    encoding: int, plain: int, packed: int, most: int
) -> None:
    with pytest.raises(hg.ProtocolError):
        check_piece(encoding, plain, packed, most, ALL)


def test_pieces_that_were_not_agreed_on_and_ones_above_the_largest_are_refused() -> None:
    with pytest.raises(hg.ProtocolError, match="not agreed on"):
        check_piece(Encoding.PLANES_ZSTD, 8, 4, 8, (Encoding.UPPER_HALVES,))
    largest = packing.LARGEST_PIECE_BYTES
    check_piece(Encoding.PLANES_ZSTD, largest, 4, 2**40, ALL)
    with pytest.raises(hg.ProtocolError, match="the most is 16,777,216"):
        check_piece(Encoding.PLANES_ZSTD, largest + 1, 4, 2**40, ALL)


def test_pieces_above_the_largest_go_as_they_are() -> None:
    data = memoryview(bytes(packing.LARGEST_PIECE_BYTES + 1))
    assert Packer(ALL, Clock(0.0)).pack(data, 0.0) == (Encoding.PLAIN, data)


def test_a_piece_that_holds_more_than_it_announces_takes_no_more_memory() -> None:
    bomb = pack(Encoding.PLANES_ZSTD, memoryview(bytes(256 * MIB)))
    assert bomb is not None and len(bomb) < 64 * 1024
    tracemalloc.start()
    try:
        with pytest.raises(hg.ProtocolError):
            unpack(Encoding.PLANES_ZSTD, memoryview(bomb), MIB)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_a_frame_with_a_large_window_is_refused() -> None:
    zstd = packing._zstd()
    parameter = zstd.CompressionParameter
    made = zstd.ZstdCompressor(options={parameter.compression_level: 1, parameter.window_log: 27})
    # Without the size in the frame the window counts.
    frame = made.compress(bytes(4096)) + made.flush()
    with pytest.raises(hg.ProtocolError):
        unpack(Encoding.PLANES_ZSTD, memoryview(frame), 4096)


def test_changed_pieces_are_typed_errors_or_as_many_bytes() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    data = view(exact_in_bf16())[: 64 * 1024]
    packed = pack(Encoding.PLANES_ZSTD, data)
    assert packed is not None
    for _ in range(500):
        changed = bytearray(packed)
        for _ in range(chosen.randrange(1, 4)):
            at = chosen.randrange(len(changed))
            match chosen.randrange(3):
                case 0:
                    changed[at] = chosen.randrange(256)
                case 1:
                    del changed[at:]
                    changed += b"\0"
                case _:
                    changed[at:at] = chosen.randbytes(chosen.randrange(1, 16))
        try:
            found = unpack(Encoding.PLANES_ZSTD, memoryview(changed), data.nbytes)
        except hg.ProtocolError:
            continue
        assert len(found) == data.nbytes
