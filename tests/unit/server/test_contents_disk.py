"""The cache on disk: restarts, quota, damage, full disks, processes that are killed, daemons side by side."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from content_clients import ALICE, BOB, QUOTA, Brought, content, host_with, written

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import ConfigurationError, MissingContentError
from heliograph_server.weights import disk_cache
from heliograph_server.weights.disk_cache import BLOCK_BYTES, DiskCache
from heliograph_server.weights.store import tenant_of

ONE, TWO = content(1), content(2)
TENANT = tenant_of(ALICE)


def add(cache: DiskCache, data: bytes, tenant: bytes = TENANT) -> bool:
    return cache.add(tenant, digest_of(data), len(data), [memoryview(data)])


def blob_of(folder: Path, data: bytes) -> Path:
    name = digest_of(data).hex()
    return folder / "blobs" / name[:2] / name


def bring(folder: Path, *contents: bytes) -> None:
    """A daemon's life in which a plan used these contents."""
    with host_with(folder) as host:
        client = Brought(host)
        for data in contents:
            client.upload(data)
            client.compile(data)
        client.leave()
        written(host)


def test_after_a_restart_a_content_comes_from_disk(tmp_path: Path) -> None:
    bring(tmp_path, ONE)
    assert blob_of(tmp_path, ONE).read_bytes() == ONE
    with host_with(tmp_path) as host:
        client = Brought(host)
        assert not client.is_missing(ONE)
        client.compile(ONE)


def test_what_is_still_to_be_written_is_written_at_the_end(tmp_path: Path) -> None:
    with host_with(tmp_path) as host:
        client = Brought(host)
        client.upload(ONE)
        client.compile(ONE)
    assert DiskCache(tmp_path, QUOTA).holds(TENANT, digest_of(ONE))


def test_only_what_a_plan_used_is_kept(tmp_path: Path) -> None:
    with host_with(tmp_path) as host:
        client = Brought(host)
        client.upload(ONE)
        client.upload(TWO)
        client.compile(TWO)
        written(host)
    assert not blob_of(tmp_path, ONE).exists() and blob_of(tmp_path, TWO).exists()


def test_sessions_without_a_tenant_keep_nothing(tmp_path: Path) -> None:
    with host_with(tmp_path) as host:
        client = Brought(host, b"")
        client.upload(ONE)
        client.compile(ONE)
        written(host)
    assert DiskCache(tmp_path, QUOTA).blobs() == []


def test_another_tenant_is_not_told_and_has_it_after_bringing_it(tmp_path: Path) -> None:
    bring(tmp_path, ONE)
    with host_with(tmp_path) as host:
        bob = Brought(host, BOB)
        assert bob.is_missing(ONE)
        with pytest.raises(MissingContentError):
            bob.compile(ONE)
        bob.upload(ONE)
        bob.compile(ONE)
        written(host)
    with host_with(tmp_path) as host:
        assert not Brought(host, BOB).is_missing(ONE)
    assert len(DiskCache(tmp_path, QUOTA).blobs()) == 1


def test_looking_for_what_is_not_claimed_takes_the_same_steps_whoever_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, QUOTA)
    add(cache, ONE)
    steps: list[int] = []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: steps.append(1) or exists(path))
    assert not cache.holds(tenant_of(BOB), digest_of(ONE))
    one = len(steps)
    assert not cache.holds(tenant_of(BOB), digest_of(TWO))
    assert len(steps) == 2 * one


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer"])
def test_a_broken_content_goes_with_a_warning_and_is_uploaded_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bring(tmp_path, ONE)
    changed = {"flipped": b"?" + ONE[1:], "cut": ONE[:-4], "empty": b"", "longer": ONE + b"more"}[damage]
    blob_of(tmp_path, ONE).write_bytes(changed)
    with host_with(tmp_path) as host:
        client = Brought(host)
        assert not client.is_missing(ONE)
        with pytest.raises(MissingContentError):
            client.compile(ONE)
        assert "is removed" in caplog.text and not blob_of(tmp_path, ONE).exists()
        assert client.is_missing(ONE)
        client.upload(ONE)
        client.compile(ONE)
        client.leave()
        written(host)
    assert blob_of(tmp_path, ONE).read_bytes() == ONE


def test_a_link_in_the_place_of_a_content_is_not_followed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", QUOTA)
    add(cache, ONE)
    (tmp_path / "elsewhere").write_bytes(ONE)
    blob_of(cache.folder, ONE).unlink()
    blob_of(cache.folder, ONE).symlink_to(tmp_path / "elsewhere")
    assert cache.open(digest_of(ONE)) is None
    assert (tmp_path / "elsewhere").exists() and not cache.holds(TENANT, digest_of(ONE))


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    # A content takes one block, and so does its claim.
    cache = DiskCache(tmp_path, 6 * BLOCK_BYTES)
    for number in range(3):
        add(cache, content(number))
        os.utime(blob_of(tmp_path, content(number)), (number, number))
    source = cache.open(digest_of(content(0)))
    assert source is not None
    source.close()
    assert add(cache, content(3))
    there = [number for number in range(4) if cache.holds(TENANT, digest_of(content(number)))]
    assert there == [0, 2, 3] and cache.size_bytes() <= cache.quota_bytes


def test_the_quota_holds_whatever_is_added(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 20 * BLOCK_BYTES)
    for number in range(60):
        add(cache, content(number, 1000 + 300 * number))
        assert cache.size_bytes() <= cache.quota_bytes
    assert add(cache, content(100, 21 * BLOCK_BYTES)) is False
    assert cache.blobs()


def test_claims_of_what_is_gone_go_too(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, QUOTA)
    add(cache, ONE)
    assert cache.remove(digest_of(ONE))
    assert cache.size_bytes() == 0 and not cache.remove(digest_of(ONE))


def test_two_daemons_share_a_folder(tmp_path: Path) -> None:
    with host_with(tmp_path) as first, host_with(tmp_path) as second:
        client = Brought(first)
        client.upload(ONE)
        client.compile(ONE)
        written(first)
        other = Brought(second)
        assert not other.is_missing(ONE)
        other.compile(ONE)
        written(second)
    assert len(DiskCache(tmp_path, QUOTA).blobs()) == 1


def test_two_daemons_keep_the_quota_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "COUNT_SECONDS", 0.0)
    caches = [DiskCache(tmp_path, 10 * BLOCK_BYTES) for _ in range(2)]
    for number in range(30):
        assert add(caches[number % 2], content(number))
        assert caches[0].size_bytes() <= 10 * BLOCK_BYTES


def test_a_content_that_another_daemon_removes_meanwhile_is_uploaded_again(tmp_path: Path) -> None:
    bring(tmp_path, ONE)
    with host_with(tmp_path) as host:
        client = Brought(host)
        assert not client.is_missing(ONE)
        DiskCache(tmp_path, QUOTA).remove(digest_of(ONE))
        with pytest.raises(MissingContentError):
            client.compile(ONE)


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "replace"])
def test_a_full_disk_is_a_warning_and_no_cache(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with host_with(tmp_path) as host:
        monkeypatch.setattr(os, call, full)
        client = Brought(host)
        client.upload(ONE)
        client.compile(ONE)
        written(host)
        assert "the disk is full" in caplog.text
        monkeypatch.undo()
        assert DiskCache(tmp_path, QUOTA).blobs() == [] and not list((tmp_path / "parts").iterdir())
        # For a while nothing is tried; what is there can still be read.
        client.upload(TWO)
        client.compile(TWO)
        written(host)
        assert caplog.text.count("the disk is full") == 1
        client.leave()


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 1 MiB, where one may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    return folder


def test_a_disk_that_is_really_full_keeps_whole_contents_or_none(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        cache = DiskCache(small_disk / "cache", 2**30)
        kept = [number for number in range(8) if add(cache, content(number, 2**18))]
        assert 0 < len(kept) < 8 and "the disk is full" in caplog.text
        assert len(cache.blobs()) == len(kept) and not list((cache.folder / "parts").iterdir())
        assert all(cache.is_whole(blob.digest) for blob in cache.blobs())
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)


KILLED = """
import os, signal, sys
from pathlib import Path
from heliograph_server.weights.disk_cache import DiskCache

def pieces():
    yield memoryview(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)

DiskCache(Path(sys.argv[1]), 2**20).add(bytes(32), bytes(range(32)), 4096, pieces())
"""


def test_a_process_that_is_killed_while_it_writes_leaves_no_content(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (part,) = (tmp_path / "parts").iterdir()
    cache = DiskCache(tmp_path, QUOTA)
    # Another process may be writing it, as far as anybody can tell; it counts, and goes when it is old.
    assert part.exists() and cache.blobs() == [] and cache.size_bytes() == BLOCK_BYTES
    old = os.stat(part).st_mtime - disk_cache.STALE_SECONDS - 1
    os.utime(part, (old, old))
    DiskCache(tmp_path, QUOTA)
    assert not part.exists()


def test_bytes_that_do_not_have_their_digest_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path, QUOTA)
    with caplog.at_level(logging.WARNING):
        assert not cache.add(TENANT, digest_of(ONE), len(TWO), [memoryview(TWO)])
    assert cache.blobs() == [] and caplog.text


def test_a_folder_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot keep contents"):
        DiskCache(tmp_path / "file", QUOTA)


def test_the_folder_is_its_users_alone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", QUOTA)
    add(cache, ONE)
    assert cache.folder.stat().st_mode & 0o077 == 0
    assert blob_of(cache.folder, ONE).stat().st_mode & 0o077 == 0
