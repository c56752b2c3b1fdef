"""The state folder: whole or not at all, whatever happens to the disk or the daemon."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, SnapshotFailedError
from heliograph_proto.types import tensor_type
from heliograph_server.state.folder import FolderMedium
from heliograph_server.state.image import (
    Image,
    ImageBinding,
    ImageBuffer,
    ImageEvent,
    ImageLayout,
    ImageLoop,
    ImageOutput,
    ImageOwner,
    ImagePlan,
    ImagePoison,
    ImageReservation,
    ImageStorage,
    ImageStream,
    ImageTensor,
    ImageVariable,
    ImageWeight,
    decode_image,
    encode_image,
)
from heliograph_server.state.links import KeptLink, KeptLinks, decode_links
from heliograph_server.state.store import StateStore

SECRET = digest_of(b"secret")
DATA = bytes(range(256)) * 40
ERROR = InvalidArgumentError("what happened", advice="what to do")


def image(number: int, data: bytes = DATA, secret: bytes = SECRET) -> Image:
    """An image with some of everything."""
    place = ImageLayout(1, tensor_type("f32", (2, 3)), 8, (4, 8), True)
    return Image(
        secret,
        ImageOwner("client", b"tenant", "name", ("use",), "shown", "key", 1, ("exchange",), 60_000, 500),
        number,
        3,
        ERROR,
        (ImageStorage(len(data), 64, "cpu0", "cpu", 1, (digest_of(data),), None, poisons(), True),),
        (ImageTensor(1, place, None, ERROR), ImageTensor(2, ImageLayout(0, tensor_type("u8", (0,))), ERROR)),
        (ImageBuffer(3, (1, 1)),),
        (ImageStream(4, "cpu0", ERROR),),
        (ImageEvent(5),),
        (ImageVariable("name", 2**63 + 1),),
        (ImageReservation(6, b""),),
        (ImagePlan(7, b"", (ImageBinding(2, place, 9),), 6),),
        (ImageWeight(digest_of(b"model"), 5, True),),
        (b"message", b""),
        17,
        1_700_000_000_000_000,
    )


def with_checksum(body: bytes) -> bytes:
    """A file of links."""
    return digest_of(body).hex().encode() + b"\n" + body


def poisons() -> tuple[ImagePoison, ...]:
    return (ImagePoison(0, 4, ERROR, 1, 12),)


def put(store: StateStore, made: Image, *contents: bytes) -> None:
    with store.pinned() as pins:
        for data in contents:
            pins.add_whole(data)
        store.commit(made, pins)
    store.tidy(made.secret_digest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def reopened(folder: Path) -> tuple[list[Image], list[str]]:
    store = StateStore(FolderMedium(folder))
    try:
        images, broken = store.load()
        return images, [str(one.error) for one in broken]
    finally:
        store.close()


def image_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("sessions/*/*.image"))


def test_an_image_is_read_as_it_was_written() -> None:
    made = image(5)
    again = decode_image(encode_image(made), "here")
    # Errors are equal if their messages are.
    assert repr(again) == repr(made)


@pytest.mark.parametrize("part", ["image", "content"])
def test_a_file_torn_at_any_byte_gives_way_to_the_image_before(folder: Path, part: str) -> None:
    store = StateStore(FolderMedium(folder))
    put(store, image(1), DATA)
    other = b"other"
    put(store, image(2, other), other)
    store.close()
    newest = image_files(folder)[-1]
    if part == "content":
        newest = next(folder.glob(f"contents/*/{digest_of(other).hex()}"))
        newest.unlink()
        images, broken = reopened(folder)
        assert [one.last_sequence for one in images] == [1] and not broken
        return
    whole = newest.read_bytes()
    for end in range(len(whole)):
        newest.write_bytes(whole[:end])
        images, broken = reopened(folder)
        assert [one.last_sequence for one in images] == [1] and not broken, f"torn at byte {end}"


def test_an_image_with_any_byte_changed_is_refused() -> None:
    whole = encode_image(image(5))
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        with pytest.raises(SnapshotFailedError, match="torn|version"):
            decode_image(bytes(damaged), "here")


def test_a_content_with_other_bytes_is_refused(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    put(store, image(1), DATA)
    path = next(folder.glob("contents/*/*"))
    path.write_bytes(DATA[:-1] + b"x")
    with pytest.raises(SnapshotFailedError, match="other bytes"):
        store.whole(digest_of(DATA))
    store.close()


def test_an_image_of_nonsense_with_a_right_checksum_is_refused_or_read() -> None:
    header = struct.Struct("<8sQQ32s")
    data = encode_image(image(1))
    magic, version, *_ = header.unpack_from(data)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(2000):
        body = bytearray(data[header.size :])
        for _ in range(chance.choice((1, 1, 2, 8))):
            body[chance.randrange(len(body))] = chance.randrange(256)
        whole = header.pack(magic, version, len(body), digest_of(bytes(body))) + body
        with suppress(SnapshotFailedError):
            decode_image(whole, "it")


def test_a_newer_version_is_refused_by_its_number_and_stays(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    put(store, image(1), DATA)
    store.close()
    (path,) = image_files(folder)
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 8, 9)
    path.write_bytes(data)
    images, broken = reopened(folder)
    assert not images and len(broken) == 1 and "version 9" in broken[0] and "newer version" in broken[0]
    assert path.exists() and list(folder.glob("contents/*/*"))


def test_images_without_loops_can_be_read_by_the_daemons_before() -> None:
    plain, piece = image(1), digest_of(DATA)
    looping = replace(plain, loops=(ImageLoop(7, 40, (ImageOutput(0, (piece,)),), 1),))
    versions = [struct.unpack_from("<Q", encode_image(one), 8)[0] for one in (plain, looping)]
    assert versions == [1, 2]
    assert decode_image(encode_image(looping), "it").loops == looping.loops
    assert piece in looping.contents()


def test_a_broken_session_hurts_no_other(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    put(store, image(1), DATA)
    put(store, image(2, secret=digest_of(b"another")), DATA)
    store.close()
    (folder / "sessions" / SECRET.hex() / "1.image").write_bytes(b"")
    images, broken = reopened(folder)
    assert [one.last_sequence for one in images] == [2] and len(broken) == 1


def test_two_daemons_do_not_share_a_folder(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    with pytest.raises(ConfigurationError, match="another daemon"):
        StateStore(FolderMedium(folder))
    store.close()
    StateStore(FolderMedium(folder)).close()


def test_a_daemon_whose_lock_was_given_away_writes_and_removes_nothing_more(folder: Path) -> None:
    old = StateStore(FolderMedium(folder))
    put(old, image(1), DATA)
    # As the file system of several hosts does with the lock of one that is cut off.
    (folder / "lock").unlink()
    new = StateStore(FolderMedium(folder))
    assert old.medium.is_taken_over and not new.medium.is_taken_over
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    with pytest.raises(SnapshotFailedError, match="taken over"):
        put(old, image(2), b"other bytes")
    with pytest.raises(SnapshotFailedError, match="taken over"):
        old.write_links(b"x")
    old.forget(SECRET)
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
    put(new, image(3), DATA)
    old.close()
    new.close()
    assert [one.last_sequence for one in reopened(folder)[0]] == [3]


def test_links_to_members_are_kept_for_the_next_head(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    KeptLinks(store).keep("m0", b"one", b"secret")
    KeptLinks(store).keep("m1", b"other", b"more")
    assert (folder / "links" / "members").stat().st_mode & 0o077 == 0
    store.close()
    store = StateStore(FolderMedium(folder))
    assert KeptLinks(store).earlier == {"m0": KeptLink(b"one", b"secret"), "m1": KeptLink(b"other", b"more")}
    store.close()


@pytest.mark.parametrize(
    "data",
    [b"x", b"0" * 64 + b"\n{}", with_checksum(b"[]"), with_checksum(b'{"format": 1}'), with_checksum(b"{")],
)
def test_damaged_links_are_left_and_the_folder_is_used(folder: Path, data: bytes) -> None:
    store = StateStore(FolderMedium(folder))
    with pytest.raises(SnapshotFailedError, match="damaged"):
        decode_links(data)
    store.write_links(data)
    assert KeptLinks(store).earlier == {}
    store.close()


def test_links_of_a_newer_version_are_refused_by_name() -> None:
    with pytest.raises(SnapshotFailedError, match=r"have version 2; this daemon reads up to 1"):
        decode_links(with_checksum(b'{"format": 2, "members": {}}'))


def test_a_folder_that_others_may_open_is_refused(folder: Path) -> None:
    StateStore(FolderMedium(folder)).close()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "sessions", folder / "contents"))
    (folder / "sessions").chmod(0o755)
    with pytest.raises(ConfigurationError, match="others may open it"):
        StateStore(FolderMedium(folder))


def test_a_folder_in_which_others_may_replace_folders_is_refused(folder: Path) -> None:
    StateStore(FolderMedium(folder)).close()
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="others may replace"):
        StateStore(FolderMedium(folder))


def test_a_folder_that_the_daemon_makes_within_a_volume_that_is_open_to_all_is_used(tmp_path: Path) -> None:
    # An emptyDir of Kubernetes with an fsGroup.
    tmp_path.chmod(0o2777)
    StateStore(FolderMedium(tmp_path / "state")).close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="--state DIR"):
        StateStore(FolderMedium(tmp_path / "file" / "state"))


def test_a_full_disk_is_an_error_and_the_last_image_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(FolderMedium(folder))
    put(store, image(1), DATA)
    left = [0]
    write = os.write

    def filling(file: int, data: memoryview) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: left[0]]
        left[0] -= len(part)
        return write(file, part)

    monkeypatch.setattr(os, "write", filling)
    other = bytes(5000)
    room = 0
    while True:
        left[0] = room
        try:
            put(store, image(2, other), other)
            break
        except SnapshotFailedError as error:
            assert "No space left" in error.message and "make room" in error.advice
            assert [path.stem for path in image_files(folder)] == ["1"]
            assert not list((folder / "parts").iterdir())
            assert store.whole(digest_of(DATA)) == DATA
            assert len(list(folder.glob("contents/*/*"))) == 1, "a part of a failed snapshot is left"
        room += 499
    store.close()
    assert [one.last_sequence for one in reopened(folder)[0]] == [2]


class Killed(BaseException):
    """The daemon ends here."""


CALLS = ["open", "write", "fsync", "replace", "mkdir", "unlink"]


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ends the daemon before the call of the system with a number; nothing is tidied up."""
    left = [1 << 30]
    for name in CALLS:
        before = getattr(os, name)

        def call(*args: object, _before: object = before, **kwargs: object) -> object:
            if left[0] <= 0:
                raise Killed
            left[0] -= 1
            return _before(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(os, name, call)
    yield left


def test_a_daemon_killed_at_any_call_of_the_system_leaves_a_good_image(
    tmp_path: Path, killing: list[int]
) -> None:
    seen = set()
    for calls in range(200):
        folder = tmp_path / str(calls)
        store = StateStore(FolderMedium(folder))
        put(store, image(1), DATA)
        other = b"other"
        killing[0] = calls
        try:
            put(store, image(2, other), other)
            ended = True
        except Killed:
            ended = False
        killing[0] = 1 << 30
        store.close()
        images, broken = reopened(folder)
        assert not broken and len(images) == 1, f"killed before call {calls}"
        seen.add(images[0].last_sequence)
        if ended:
            break
    assert ended and seen == {1, 2}


def test_what_no_image_names_is_removed(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    for number in range(1, 6):
        data = bytes([number]) * 100
        put(store, image(number, data), data)
        assert len(list(folder.glob("contents/*/*"))) == min(number, 2)
    with store.pinned() as pins:
        pins.add_whole(b"never named")
    assert len(list(folder.glob("contents/*/*"))) == 2
    store.forget(SECRET)
    assert not list(folder.glob("contents/*/*")) and not list((folder / "sessions").iterdir())
    store.close()


def test_an_image_whose_contents_are_gone_is_not_written(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    with store.pinned() as pins, pytest.raises(SnapshotFailedError, match="is gone"):
        store.commit(image(1), pins)
    assert not image_files(folder)
    store.close()


def test_an_image_of_another_session_is_not_taken(folder: Path) -> None:
    store = StateStore(FolderMedium(folder))
    put(store, image(1), DATA)
    with store.pinned() as pins:
        pins.add_whole(DATA)
        other = replace(image(2), secret_digest=digest_of(b"another"))
        store.commit(other, pins)
    store.close()
    name = digest_of(b"another").hex()
    os.replace(folder / "sessions" / name / "1.image", folder / "sessions" / SECRET.hex() / "2.image")
    images, broken = reopened(folder)
    assert [one.last_sequence for one in images] == [1] and not broken
