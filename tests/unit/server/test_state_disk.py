"""The disk under the state folder: the room that snapshots take, and what a loss of power leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core_client import CoreClient
from state_hosts import F4, TENSOR, X, abandon, state_host
from waiting import until

from heliograph_backends.cpu import CpuDevice
from heliograph_proto import commands as c
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import SnapshotFailedError
from heliograph_server.state import folder as folder_module
from heliograph_server.state.folder import FolderMedium
from heliograph_server.state.image import Image, ImageOwner, ImageStorage, decode_image
from heliograph_server.state.store import Pins, StateStore

OWNER = ImageOwner("client", b"tenant", "name", (), "shown", "key", 1, (), 60_000, 500)


def images_of_sessions(folder: Path) -> list[int]:
    return [len(list(one.glob("*.image"))) for one in (folder / "sessions").iterdir()]


def test_sessions_that_are_due_together_need_more_room_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with state_host(tmp_path, CpuDevice(), runs=1) as host:
        assert host.snapshots is not None
        clients = [CoreClient(host=host, durable=True) for _ in range(3)]
        for client in clients:
            client.do(c.Allocate(TENSOR, F4))
        until(lambda: images_of_sessions(tmp_path) == [2, 2, 2])
        commit = host.snapshots.store.commit
        seen: list[list[int]] = []

        def watched(image: Image, pins: Pins) -> bytes:
            if not seen:
                # The others are due when the thread looks again: in one pass.
                for client in clients[1:]:
                    client.do(c.SetTensor(TENSOR, 0, X.tobytes()))
            seen.append(images_of_sessions(tmp_path))
            return commit(image, pins)

        monkeypatch.setattr(host.snapshots.store, "commit", watched)
        clients[0].do(c.SetTensor(TENSOR, 0, X.tobytes()))
        until(lambda: len(seen) == 3)
        assert seen == [[2, 2, 2]] * 3


def test_what_a_killed_daemon_left_is_tidied_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, state_host(tmp_path, CpuDevice()) as host:
        assert host.snapshots is not None
        patch.setattr(host.snapshots.store, "tidy", lambda digest: None)
        client = CoreClient(host=host, durable=True)
        for number in range(2):
            client.do(c.Allocate(TENSOR + number, F4))
            host.snapshots.take(client.session)
        abandon(host)
    assert images_of_sessions(tmp_path) == [3]

    def full(path: Path, pieces: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with state_host(tmp_path, CpuDevice()) as host:
        assert host.snapshots is not None
        client = CoreClient(host=host, token=client.token)
        with monkeypatch.context() as patch, pytest.raises(SnapshotFailedError, match="No space left"):
            patch.setattr(folder_module, "write_new", full)
            host.snapshots.take(client.session)
        assert images_of_sessions(tmp_path) == [2]
        host.snapshots.take(client.session)


class Disk:
    """Knows which names of files are flushed, and that an image names no content that is not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        #: Names that a loss of power may take back.
        self.unflushed: set[Path] = set()
        #: The folders that were flushed.
        self.flushed: list[Path] = []
        #: Called while a folder is flushed.
        self.while_flushing: Callable[[Path], None] = lambda folder: None
        self._fsync, self._replace, self._mkdir = os.fsync, os.replace, os.mkdir
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)
        monkeypatch.setattr(os, "mkdir", self.mkdir)

    def fsync(self, file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        before = {one for one in self.unflushed if one.parent == path}
        if path.is_dir():
            self.while_flushing(path)
            self.flushed.append(path)
        self._fsync(file)
        self.unflushed -= before

    def replace(self, old: Path, new: Path) -> None:
        if new.suffix == ".image":
            named = [self.content(one) for one in decode_image(old.read_bytes(), "it").contents()]
            needed = {path for one in named for path in (one, *one.parents)}
            assert not needed & self.unflushed, "an image names what a loss of power may take back"
        self._replace(old, new)
        self.unflushed.add(new)

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        self._mkdir(path, mode)
        if Path(path) != self.folder:
            self.unflushed.add(Path(path))

    def content(self, digest: bytes) -> Path:
        return self.folder / "contents" / digest.hex()[:2] / digest.hex()

    @contextmanager
    def broken_under(self, data: bytes) -> Iterator[None]:
        """A context in which the name of a content cannot be flushed, so that an image fails."""

        def fail(folder: Path) -> None:
            if folder == self.content(digest_of(data)).parent:
                raise OSError(errno.EIO, "Input/output error")

        self.while_flushing = fail
        with pytest.raises(SnapshotFailedError, match="Input/output error"):
            yield
        self.while_flushing = lambda folder: None


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path.resolve() / "state", monkeypatch)


def image_of(data: bytes, secret: bytes) -> Image:
    storage = ImageStorage(len(data), 64, "cpu0", "cpu", 1, (digest_of(data),))
    return Image(digest_of(secret), OWNER, 1, storages=(storage,))


def test_a_content_that_another_session_has_just_written_is_flushed_once(disk: Disk) -> None:
    store = StateStore(FolderMedium(disk.folder))
    with store.pinned() as first, store.pinned() as second, store.pinned() as third:
        first.add_whole(b"shared")
        with disk.broken_under(b"shared"):
            store.commit(image_of(b"shared", b"first"), first)
        assert second.keep((digest_of(b"shared"),))
        store.commit(image_of(b"shared", b"second"), second)
        disk.flushed.clear()
        assert third.keep((digest_of(b"shared"),))
        store.commit(image_of(b"shared", b"third"), third)
    assert not [one for one in disk.flushed if "contents" in one.parts]
    store.close()


def test_a_name_that_is_given_while_its_folder_is_flushed_is_flushed_too(disk: Disk) -> None:
    store = StateStore(FolderMedium(disk.folder))
    numbers = (b"%d" % number for number in range(100_000))
    other = next(one for one in numbers if digest_of(one)[0] == digest_of(b"data")[0])
    with store.pinned() as first, store.pinned() as second, store.pinned() as third:
        first.add_whole(b"data")
        second.add_whole(other)

        def give_name(folder: Path) -> None:
            if folder == disk.content(digest_of(other)).parent:
                with disk.broken_under(other):
                    store.commit(image_of(other, b"second"), second)

        disk.while_flushing = give_name
        store.commit(image_of(b"data", b"first"), first)
        assert third.keep((digest_of(other),))
        store.commit(image_of(other, b"third"), third)
    store.close()


def test_a_content_that_a_killed_daemon_has_just_written_is_flushed(disk: Disk) -> None:
    killed = StateStore(FolderMedium(disk.folder))
    with killed.pinned() as pins:
        pins.add_whole(b"data")
        with disk.broken_under(b"data"):
            killed.commit(image_of(b"data", b"first"), pins)
        killed.close()
        store = StateStore(FolderMedium(disk.folder))
    with store.pinned() as pins:
        assert pins.keep((digest_of(b"data"),))
        store.commit(image_of(b"data", b"second"), pins)
    store.close()
