"""Files of the state folder: the same bytes, with and without the cache of the system."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import SnapshotFailedError
from heliograph_server.state.files import (
    BLOCK_BYTES,
    LEAST_DIRECT_BYTES,
    READ_BYTES,
    ReadSpace,
    ahead,
    aligned_bytes,
    read_blocks,
    touch,
    write_new,
)
from heliograph_server.state.folder import FolderMedium
from heliograph_server.state.store import StateStore

BIG = 3 * READ_BYTES + 5


def random_bytes(size_bytes: int) -> memoryview:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    made = aligned_bytes(size_bytes)
    made[:] = random.Random(seed).randbytes(size_bytes)
    return made


def read_back(path: Path) -> bytes:
    spaces = ReadSpace()
    return b"".join(bytes(one(spaces)[0]) for one in read_blocks(path))


@pytest.fixture(params=["as it is", "without O_DIRECT", "with larger blocks"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that let programs pass the cache, that do not, and that want larger blocks."""
    control, write, preadv = fcntl.fcntl, os.write, os.preadv

    def without(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, flags)

    def refuse_direct(file: int) -> None:
        if control(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")

    def writing(file: int, data: memoryview) -> int:
        refuse_direct(file)
        return write(file, data)

    def reading(file: int, spaces: list[memoryview], offset: int) -> int:
        refuse_direct(file)
        return preadv(file, spaces, offset)

    if request.param == "without O_DIRECT":
        monkeypatch.setattr(fcntl, "fcntl", without)
    elif request.param == "with larger blocks":
        monkeypatch.setattr(os, "write", writing)
        monkeypatch.setattr(os, "preadv", reading)
    return str(request.param)


@pytest.mark.parametrize(
    "size_bytes",
    [0, 1, BLOCK_BYTES, LEAST_DIRECT_BYTES - 1, LEAST_DIRECT_BYTES, READ_BYTES - 1, READ_BYTES, BIG],
)
@pytest.mark.usefixtures("file_system")
def test_a_file_has_the_bytes_that_were_written(tmp_path: Path, size_bytes: int) -> None:
    data = random_bytes(size_bytes)
    write_new(tmp_path / "one", (data,))
    assert read_back(tmp_path / "one") == (tmp_path / "one").read_bytes() == data
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("file_system")
def test_pieces_of_any_size_and_place_in_memory_follow_each_other(tmp_path: Path) -> None:
    data = random_bytes(BIG)
    cuts = [0, 2**20, 2**20 + 3, 2 * 2**20, 5 * 2**20, BIG]
    pieces = [data[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    write_new(tmp_path / "one", pieces)
    assert read_back(tmp_path / "one") == data


def test_a_write_that_takes_a_part_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: max(1, len(data) // 3)]))
    data = random_bytes(2**20)
    write_new(tmp_path / "one", (data,))
    assert (tmp_path / "one").read_bytes() == data


def test_a_file_is_never_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"before")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "one", (memoryview(b"after"),))
    assert (tmp_path / "one").read_bytes() == b"before"


def test_memory_that_was_touched_is_there() -> None:
    space = aligned_bytes(BIG)
    touch(space)
    assert len(space) == BIG and not any(space[::BLOCK_BYTES])


def test_results_come_in_order_and_an_error_ends_them() -> None:
    assert list(ahead([lambda number=number: number for number in range(50)])) == list(range(50))  # type: ignore[misc]

    def calls() -> Iterator[object]:
        yield lambda: 1
        yield lambda: [][0]

    with pytest.raises(IndexError):
        list(ahead(calls()))  # type: ignore[arg-type]


def test_pieces_with_the_same_bytes_are_written_once(tmp_path: Path) -> None:
    store = StateStore(FolderMedium(tmp_path / "state"))
    data = random_bytes(READ_BYTES)
    with store.pinned() as pins:
        digests = {one.result() for one in [pins.add(data) for _ in range(8)]}
        assert digests == {digest_of(data)} and pins.written_bytes == len(data)
        assert len(list(tmp_path.glob("state/parts/*"))) == 1
    assert not list(tmp_path.glob("state/parts/*"))
    store.close()


def test_a_disk_that_is_full_in_the_middle_of_a_snapshot_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(FolderMedium(tmp_path / "state"))
    data, write, left = random_bytes(8 * 2**20), os.write, [5 * 2**20]

    def filling(file: int, piece: memoryview) -> int:
        left[0] -= len(piece)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, piece)

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(SnapshotFailedError, match="No space left"), store.pinned() as pins:
        for one in [pins.add(data[start : start + 2**20]) for start in range(0, len(data), 2**20)]:
            one.result()
    assert not list(tmp_path.glob("state/parts/*")) and not list(tmp_path.glob("state/contents/*/*"))
    store.close()


def test_a_large_content_that_is_torn_in_any_block_is_refused(tmp_path: Path) -> None:
    store = StateStore(FolderMedium(tmp_path / "state"))
    data = random_bytes(BIG)
    digest = digest_of(data)
    path = tmp_path / "state" / "contents" / digest.hex()[:2] / digest.hex()
    path.parent.mkdir()
    write_new(path, (data,))
    assert b"".join(map(bytes, store.read_all((digest, digest)))) == bytes(data) * 2
    for end in (0, 1, READ_BYTES - 1, READ_BYTES, 2 * READ_BYTES + BLOCK_BYTES, BIG - 1):
        os.truncate(path, end)
        with pytest.raises(SnapshotFailedError, match="other bytes"):
            list(store.read(digest))
        path.unlink()
        write_new(path, (data,))
    with pytest.raises(SnapshotFailedError, match="is gone"):
        list(store.read_all((digest, bytes(32))))
    store.close()
