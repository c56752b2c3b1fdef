"""`heliograph cache`: what is listed, removed and checked, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from content_clients import content

from heliograph.cli import main
from heliograph_proto.digests import digest_of
from heliograph_server.weights.disk_cache import DiskCache

TENANT = bytes(32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with three contents."""
    cache = DiskCache(tmp_path, 2**20)
    for number in range(3):
        data = content(number, 5000)
        cache.add(TENANT, digest_of(data), len(data), [memoryview(data)])
    return tmp_path


def names(*numbers: int) -> list[str]:
    return [digest_of(content(number, 5000)).hex() for number in numbers]


def blob(folder: Path, name: str) -> Path:
    return folder / "blobs" / name[:2] / name


def run(folder: Path, *arguments: str) -> int:
    return main(["cache", *arguments, "--cache", str(folder)])


def test_contents_are_listed_with_sizes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "ls") == 0
    printed = capsys.readouterr()
    assert {line.split()[0] for line in printed.out.splitlines()} == set(names(0, 1, 2))
    assert "5,000" in printed.out and "ago" in printed.out and "3 contents, 14.6 KiB" in printed.err


def test_contents_are_removed_by_the_beginning_of_their_digest(folder: Path) -> None:
    first, second, third = names(0, 1, 2)
    assert run(folder, "rm", first[:12], second) == 0
    assert not blob(folder, first).exists() and not blob(folder, second).exists()
    assert blob(folder, third).exists()


def test_everything_is_removed_only_when_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "rm") == 1
    assert run(folder, "rm", "--all", names(0)[0]) == 1
    assert len(DiskCache(folder, 0).blobs()) == 3
    assert run(folder, "rm", "--all") == 0
    assert DiskCache(folder, 0).size_bytes() == 0
    assert "3 contents removed" in capsys.readouterr().err


def test_a_digest_that_is_none_removes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "rm", names(0)[0], "zz") == 1
    assert "no content of the cache" in capsys.readouterr().err
    assert len(DiskCache(folder, 0).blobs()) == 3


def test_verify_removes_what_is_broken_and_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "verify") == 0
    blob(folder, names(1)[0]).write_bytes(b"damage")
    assert run(folder, "verify") == 1
    assert f"{names(1)[0]}  broken" in capsys.readouterr().out
    assert {one.digest.hex() for one in DiskCache(folder, 0).blobs()} == set(names(0, 2))


def test_the_folder_may_come_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELIOGRAPH_CACHE", str(folder))
    assert main(["cache", "ls"]) == 0
    monkeypatch.delenv("HELIOGRAPH_CACHE")
    assert main(["cache", "ls"]) == 1
    assert "--cache DIR" in capsys.readouterr().err


def test_a_folder_that_is_no_cache_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "rm", "--all") == 1
    assert "is not a cache" in capsys.readouterr().err and not list(tmp_path.iterdir())
