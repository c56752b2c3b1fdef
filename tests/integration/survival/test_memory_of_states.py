"""The memory of files at a keeper, and of copies at its owner: it is used again, and not for ever."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from keepers import KeeperPlace, keeper_place
from waiting import until

from heliograph_proto.errors import LimitExceededError
from heliograph_server.links.keeping import KeeperMedium
from heliograph_server.rpc.keeping import spaces as spaces_module
from heliograph_server.rpc.keeping.service import KeeperService
from heliograph_server.rpc.keeping.spaces import SPACE_BYTES, Spaces, new_pages
from heliograph_server.state.files import COPIES_SECONDS, LEAST_DIRECT_BYTES, Copies, touch

MIB = 2**20


@pytest.fixture
def place() -> Iterator[KeeperPlace]:
    with keeper_place() as made:
        yield made


@pytest.fixture
def medium(place: KeeperPlace) -> Iterator[KeeperMedium]:
    made = place.open()
    yield made
    made.remove(made.paths("files"))
    made.close()


def service_of(place: KeeperPlace) -> KeeperService:
    assert place.daemon._daemon is not None
    return place.daemon._daemon._keeping


def put(medium: KeeperMedium, path: str, data: bytes, piece_bytes: int) -> None:
    view = memoryview(data)
    pieces = [view[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    medium.name({medium.write(pieces, len(data)): path})


@pytest.mark.parametrize("piece", [5001, MIB, 3 * MIB + 7])
def test_a_file_has_its_bytes_whatever_its_size_and_its_pieces(medium: KeeperMedium, piece: int) -> None:
    sizes = (SPACE_BYTES - 1, SPACE_BYTES, SPACE_BYTES + 1, 2 * SPACE_BYTES + 5000)
    for number, size in enumerate(sizes):
        data = secrets.token_bytes(size)
        put(medium, f"files/{number}", data, piece)
        assert medium.read(f"files/{number}", 2 * size) == data
        # The next one may lie where this one did.
        medium.remove([f"files/{number - 1}"])


def test_memory_of_files_that_are_gone_waits_for_others_and_goes_with_the_last(place: KeeperPlace) -> None:
    medium, spaces = place.open(), service_of(place).spaces
    for number in range(4):
        put(medium, f"files/{number}", bytes(2 * SPACE_BYTES), MIB)
    medium.remove(["files/0", "files/1"])
    until(lambda: spaces.waiting == 4)
    assert service_of(place).figures().spare_bytes == 4 * SPACE_BYTES
    put(medium, "files/4", bytes(2 * SPACE_BYTES), MIB)
    medium.remove(medium.paths("files"))
    until(lambda: spaces.waiting == 0)
    assert place.keeper.figures().used_bytes == 0
    medium.close()


def test_after_a_burst_of_files_as_much_memory_is_made_for_the_next(place: KeeperPlace) -> None:
    medium, spaces = place.open(), service_of(place).spaces
    for number in range(3):
        put(medium, f"files/{number}", bytes(SPACE_BYTES), MIB)
    until(lambda: spaces.waiting == 3)
    medium.remove(medium.paths("files"))
    medium.close()


def test_what_waits_is_within_the_room_of_the_keeper() -> None:
    with keeper_place(kept_state_size=3 * SPACE_BYTES) as place:
        medium, spaces = place.open(), service_of(place).spaces
        for number in range(2):
            put(medium, f"files/{number}", bytes(SPACE_BYTES), MIB)
        medium.remove(["files/0"])
        until(lambda: spaces.waiting == 1)
        # Files that lie in no space take the room of what waits.
        for number in range(2, 6):
            put(medium, f"files/{number}", bytes(SPACE_BYTES // 2 - 5000), MIB)
        until(lambda: spaces.waiting == 0)
        medium.close()


def test_a_space_that_is_still_read_is_not_used_again() -> None:
    spaces = Spaces(lambda: 2**40)
    one, other = (spaces.lend(new_pages()) for _ in range(2))
    one[:] = b"1" * SPACE_BYTES
    reading = one[100:200]
    del one
    assert spaces.waiting == 0
    del other
    assert spaces.waiting == 1
    assert bytes(reading) == b"1" * 100
    del reading
    # None is used, so none waits.
    assert spaces.waiting == 0


def test_a_host_without_memory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def mmap(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(spaces_module.mmap, "mmap", mmap)
    with pytest.raises(LimitExceededError, match="Cannot allocate memory") as caught:
        new_pages()
    assert "--kept-state-size" in caught.value.advice


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces_module, "_HUGE_PAGES", -1)
    assert len(new_pages()) == SPACE_BYTES


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_next_snapshot_has_the_memory_of_the_last_one_and_no_more_waits() -> None:
    copies, sizes = Copies(clock := Clock()), (LEAST_DIRECT_BYTES, 3 * LEAST_DIRECT_BYTES + 1)

    def addresses(*sizes: int) -> list[int]:
        with copies.snapshot():
            taken = [copies.take(size) for size in sizes]
            for one in taken:
                touch(one)
            return [np.frombuffer(one, np.uint8).ctypes.data for one in taken]

    first = addresses(*sizes, *sizes)
    gc.collect()
    assert len(set(first)) == 4 and copies.waiting_bytes == 2 * sum(sizes)
    again = addresses(*sizes)
    assert set(again) <= set(first) and copies.waiting_bytes == sum(sizes)
    with copies.snapshot():
        kept = copies.take(sizes[0])
        part = kept[:10]
        del kept
        assert np.frombuffer(part, np.uint8).ctypes.data not in [
            np.frombuffer(copies.take(sizes[0]), np.uint8).ctypes.data
        ]
    del part
    assert copies.waiting_bytes == 2 * sizes[0]
    with copies.snapshot():
        other = copies.take(2 * LEAST_DIRECT_BYTES)
        assert copies.waiting_bytes == 0, "new memory comes on top of what waits"
        del other
    assert copies.waiting_bytes == 2 * LEAST_DIRECT_BYTES
    clock.now = COPIES_SECONDS
    copies.rest()
    assert copies.waiting_bytes
    clock.now += 0.1
    copies.rest()
    assert copies.waiting_bytes == 0
