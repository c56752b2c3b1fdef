"""Pieces of tensors at equal distances, copies that tell their transport, and random work on one buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import heliograph as hg
from heliograph.procedures.transfer import pieces
from heliograph.raw import read_bytes, write_bytes
from heliograph_proto.commands import Chunks
from heliograph_proto.sessions import Limits
from heliograph_server.runtime.host import Host

BIG = np.random.default_rng(3).random((900, 1000)).astype(np.float32)


def test_pieces_are_written_and_read(session: hg.Session) -> None:
    t = session.empty((6, 8), "f32")
    columns = np.arange(12, dtype=np.float32).reshape(6, 2)
    t.set_2d(columns, offset_bytes=8, stride_bytes=32)
    expected = np.zeros((6, 8), np.float32)
    expected[:, 2:4] = columns
    assert np.array_equal(t.get(), expected)
    found = t.get_2d(3, 8, 8, 64)
    assert found.dtype == np.uint8 and np.array_equal(found.view(np.float32), columns[::2])
    out = np.empty((6, 2), np.float32)
    assert t.get_2d(6, 8, 8, 32, out) is out and np.array_equal(out, columns)


def test_pieces_may_be_bytes_or_lists(session: hg.Session) -> None:
    t = session.empty(4, "i32")
    t.set_2d([[1], [2]], stride_bytes=8)
    t.set_2d(np.array([[1, 2], [3, 4]], np.uint8), 6, 8)
    assert t.get().tolist() == [1, 0x02010000, 2, 0x04030000]
    t.set_2d([5, 6], 4)
    assert t.get().tolist() == [1, 5, 6, 0x04030000]
    assert t.get_2d(2, 4).tolist() == [[1, 0, 0, 0], [5, 0, 0, 0]]


def test_pieces_without_gaps_make_bytes_whole_again(session: hg.Session) -> None:
    """As a write of all of them does."""
    t = session.empty(4, "i32")
    t.copy_to(session.empty((2**45,), "i32")[:4])
    session.empty((2**45,), "i32")[:4].copy_to(t)
    with pytest.raises(hg.OutOfMemoryError):
        t.get()
    t.set_2d([[1, 2], [3, 4]])
    assert t.get().tolist() == [1, 2, 3, 4]
    with pytest.raises(hg.OutOfMemoryError):
        session.synchronize(timeout=10)


def test_no_pieces_are_nothing(session: hg.Session) -> None:
    t = session.empty(4, "i32")
    t.set_2d(np.empty((0, 3), np.int32), 0, 4)
    t.set_2d(np.empty((3, 0), np.int32), 4, 4)
    assert t.get_2d(0, 8, 0, 8).shape == (0, 8) and t.get_2d(2, 0).shape == (2, 0)
    assert not t.get().any()


@pytest.mark.parametrize("width", [900, 10])
def test_large_pieces_go_in_several_transfers(session: hg.Session, width: int) -> None:
    t = session.empty(BIG.shape, "f32")
    t.set_2d(BIG[:, :width], stride_bytes=4000)
    expected = np.zeros_like(BIG)
    expected[:, :width] = BIG[:, :width]
    assert np.array_equal(t.get(), expected)
    assert np.array_equal(t.get_2d(900, 4 * width, 0, 4000).view(np.float32), BIG[:, :width])


@pytest.mark.parametrize(
    ("use", "kind", "words"),
    [
        (lambda t: t.get_2d(2, 8, 0, 4), hg.OutOfRangeError, "at least the size"),
        (lambda t: t.get_2d(3, 8, 0, 16), hg.OutOfRangeError, "0 to 40"),
        (lambda t: t.get_2d(-1, 8), hg.OutOfRangeError, "0 or more"),
        (lambda t: t.get_2d(1, 8, -1), hg.OutOfRangeError, "-1"),
        (lambda t: t.get_2d(2, 4, 0, 8, np.empty(3, np.int32)), hg.InvalidArgumentError, "12 bytes for 8"),
        (lambda t: t.set_2d(np.zeros((2, 1)), 0, 8), hg.InvalidInputError, "f64"),
        (lambda t: t.set_2d(5, 0, 8), hg.InvalidInputError, "no rows"),
        (lambda t: t[::2].set_2d([[1]], 0, 8), hg.InvalidArgumentError, "view with gaps"),
    ],
)
def test_pieces_that_do_not_fit(
    session: hg.Session, use: Callable[[hg.Tensor], object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        use(session.empty(8, "i32"))


def test_a_copy_tells_its_transport(session: hg.Session) -> None:
    a, b = session.put(BIG), session.empty(BIG.shape, "f32")
    assert a.copy_and_wait(b, timeout=30) in hg.CopyPath
    assert np.array_equal(b.get(), BIG)
    with pytest.raises(hg.InvalidArgumentError, match="types differ"):
        a.copy_and_wait(session.empty(3, "f32"))
    with pytest.raises(hg.OutOfMemoryError):
        session.empty((2**45,), "f64")[:1].copy_and_wait(session.empty(1, "f64"))
    session.synchronize(timeout=10)


def test_bytes_of_other_libraries_go_without_an_array(session: hg.Session) -> None:
    """What a server that uses other servers needs."""
    data = bytes(range(256)) * 4096
    t = session.empty(len(data), "u8")
    write_bytes(t, 0, memoryview(data))
    out = bytearray(len(data))
    read_bytes(t, 0, memoryview(out))
    assert out == data
    write_bytes(t, len(data), memoryview(np.empty((0, 3))))
    write_bytes(t, 2, memoryview(b"abcd"), Chunks(2, 2, 6))
    part = bytearray(4)
    read_bytes(t, 2, memoryview(part), Chunks(1, 4, 3))
    assert bytes(part) == bytes([97, 5, 99, 11]) and t.get()[2:10].tobytes() == b"ab\4\5\6\7cd"
    with pytest.raises(hg.OutOfRangeError):
        write_bytes(t, len(data) - 1, memoryview(b"ab"))


@pytest.mark.parametrize("seed", range(3))
def test_random_work_on_one_buffer_is_done_in_order(session: hg.Session, seed: int) -> None:
    """Tensors that overlap, filled, written, copied and read in any order, against an array of bytes."""
    rng, size = np.random.default_rng(seed), 4096
    mine, buffer = np.zeros(size, np.uint8), session.buffer(size)
    for step in range(60):
        start = int(rng.integers(0, size // 64)) * 64
        length = int(rng.integers(1, size - start + 1))
        t, part = buffer.place(length, "u8", start), mine[start : start + length]
        match int(rng.integers(0, 5)):
            case 0:
                value = int(rng.integers(0, 256))
                t.memset(value)
                part[:] = value
            case 1:
                part[:] = rng.integers(0, 256, length)
                t.set(part)
            case 2:
                width = int(rng.integers(1, min(length, 40) + 1))
                stride = width + int(rng.integers(0, 9))
                count = (length - width) // stride + 1
                rows = rng.integers(0, 256, (count, width)).astype(np.uint8)
                for row in range(count):
                    part[row * stride : row * stride + width] = rows[row]
                t.set_2d(rows, 0, stride)
            case 3 if start + 2 * length <= size and length % 64 == 0:
                mine[start + length : start + 2 * length] = part
                t.copy_to(buffer.place(length, "u8", start + length))
            case _:
                assert np.array_equal(t.get(), part), f"seed {seed}, step {step}"
    assert np.array_equal(buffer.place(size, "u8").get(), mine), f"seed {seed}"


@pytest.mark.parametrize(("width", "stride"), [(100, 130), (3, 1000), (20_000, 20_001), (8192, 8192)])
def test_pieces_pass_a_server_that_holds_little(
    monkeypatch: pytest.MonkeyPatch, width: int, stride: int
) -> None:
    """In many transfers of 8 KiB each, of which few are on their way at once."""
    limits = Limits(in_flight_bytes=64 * 1024, inline_bytes=512)
    monkeypatch.setattr("heliograph_server.runtime.host.Host", lambda registry: Host(registry, limits))
    rows = np.random.default_rng(width).integers(0, 256, (40, width)).astype(np.uint8)
    with hg.connect("local:") as session:
        assert session.info.limits.piece_bytes == 8192
        t = session.empty(40 * stride, "u8")
        t.set_2d(rows, 0, stride)
        expected = np.zeros((40, stride), np.uint8)
        expected[:, :width] = rows
        assert np.array_equal(t.get().reshape(40, stride), expected)
        assert np.array_equal(t.get_2d(40, width, 0, stride), rows)
        assert np.array_equal(t.get_2d(20, width, stride, 2 * stride), rows[1::2])


@pytest.mark.parametrize(
    ("chunks", "piece_bytes"),
    [(Chunks(3, 7, 5), 100), (Chunks(3, 7, 5), 7), (Chunks(10, 3, 12), 4), (Chunks(4, 1, 0), 4)],
)
def test_pieces_cover_their_chunks_once(chunks: Chunks, piece_bytes: int) -> None:
    """Each byte of the whole goes where its chunk lies, in transfers of at most so many bytes."""
    there: dict[int, int] = {}
    for piece in pieces(chunks.total_bytes, chunks, piece_bytes, 1):
        assert 0 < piece.size_bytes <= piece_bytes
        inner = piece.chunks or Chunks(piece.size_bytes)
        for byte in range(piece.size_bytes):
            row, column = divmod(byte, inner.size_bytes)
            assert piece.start + byte not in there
            there[piece.start + byte] = piece.offset_bytes + row * inner.stride_bytes + column
    expected = [
        row * chunks.stride_bytes + at for row in range(chunks.count) for at in range(chunks.size_bytes)
    ]
    assert [there[byte] for byte in range(chunks.total_bytes)] == expected
