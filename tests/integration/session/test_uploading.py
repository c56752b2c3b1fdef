"""Uploads as a client meets them: shared by its sessions, going on after a break, spared by the cache."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from forked_daemons import running_daemon
from large_weights import LARGE, SEEDS, graph_of
from paths import SUPPORT

import heliograph as hg
from heliograph.core.effects import ask
from heliograph.core.methods import FIND_MISSING, FindMissing
from heliograph.transport import tenant


class Counted:
    """A progress callback that keeps what it was told."""

    def __init__(self, on_progress: Callable[[int], None] = lambda done: None) -> None:
        self.done = self.total = 0
        self.on_progress = on_progress

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self.on_progress(done)


def test_a_second_session_uploads_nothing(url: str) -> None:
    second = Counted()
    with hg.connect(url) as first, hg.connect(url, progress=second) as other:
        first.compile(graph_of(1))
        assert other.compile(graph_of(1)).run(x=np.zeros(1, np.float32))["y"].shape == (1,)
    assert second.total == 0


def test_another_tenant_uploads_its_own(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if url == "local:":
        pytest.skip("a process is one tenant")
    counted = Counted()
    with hg.connect(url) as first:
        first.compile(graph_of(1))
        monkeypatch.setenv("HELIOGRAPH_TENANT", "another one, who is not the first")
        with hg.connect(url, progress=counted) as other:
            other.compile(graph_of(1))
    assert counted.done == LARGE


def test_after_a_restart_of_the_daemon_nothing_is_uploaded(tmp_path: Path) -> None:
    for upload_bytes in (2 * LARGE, 0):
        counted = Counted()
        with running_daemon("--cache", str(tmp_path)) as url, hg.connect(url, progress=counted) as session:
            plan = session.compile(graph_of(1, 2))
            found = plan.run(x=np.zeros(1, np.float32))["y"]
        assert counted.done == upload_bytes
        expected = sum(np.random.default_rng(seed).random(1, np.float32) for seed in (1, 2))
        np.testing.assert_array_equal(found, expected)


def test_a_broken_content_on_disk_is_uploaded_again_within_the_same_compile(tmp_path: Path) -> None:
    with running_daemon("--cache", str(tmp_path)) as url, hg.connect(url) as session:
        session.compile(graph_of(1))
    (blob,) = (path for path in (tmp_path / "blobs").glob("*/*"))
    with blob.open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"damage")
    counted = Counted()
    with running_daemon("--cache", str(tmp_path)) as url, hg.connect(url, progress=counted) as session:
        session.compile(graph_of(1))
        assert counted.done == LARGE


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
import heliograph as hg
from large_weights import LARGE, SEEDS, graph_of

def die(done, total):
    if done > LARGE // 2:
        os.kill(os.getpid(), signal.SIGKILL)

with hg.connect(sys.argv[1], progress=die) as session:
    session.compile(graph_of(*SEEDS))
"""


def test_a_client_that_is_killed_goes_on_where_it_was(daemon: DaemonUrls) -> None:
    url = daemon.tcp
    done = subprocess.run([sys.executable, "-c", KILLED, url, str(SUPPORT)], timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    counted = Counted()
    with hg.connect(url, progress=counted) as session:
        _wait_for_what_is_kept(session)
        session.compile(graph_of(*SEEDS))
    # Half a content was told to be there. More may have been on its way, but not all four: memory that both
    # sides share holds 128 MiB.
    assert 0 < counted.total < 4 * LARGE - LARGE // 2
    assert counted.done == counted.total


def _wait_for_what_is_kept(session: hg.Session) -> None:
    """Until the server has noticed that the other client is gone, and so keeps what it had sent."""
    contents = tuple(graph_of(*SEEDS)._contents())
    for _ in range(2000):
        missing = session._shell.drive(ask(FIND_MISSING, FindMissing(contents)), 10)
        if len(missing) < len(SEEDS) or any(start for _, start in missing):
            return
    raise AssertionError("the server keeps nothing")


def test_an_upload_that_was_cancelled_goes_on_in_the_same_session(daemon: DaemonUrls) -> None:
    counted = Counted()

    async def scenario() -> None:
        async with hg.aio.connect(daemon.tcp, progress=counted) as session:
            halfway = asyncio.Event()
            counted.on_progress = lambda done: halfway.set() if done > LARGE // 2 else None
            compiling = asyncio.ensure_future(session.compile(graph_of(21)))
            await asyncio.wait_for(halfway.wait(), 30)
            compiling.cancel()
            with pytest.raises((asyncio.CancelledError, hg.CancelledError)):
                await compiling
            contents = tuple(graph_of(21)._contents())
            for _ in range(2000):
                ((_, start),) = await session._shell.drive(ask(FIND_MISSING, FindMissing(contents)), 10)
                if start:
                    break
            await session.compile(graph_of(21))

    asyncio.run(scenario())
    assert 0 < counted.total == counted.done < LARGE


def test_a_tenant_is_a_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    secret = tenant.tenant_secret()
    file = tmp_path / "state" / "heliograph" / "tenant"
    assert bytes.fromhex(file.read_text()) == secret and len(secret) == 32
    assert file.stat().st_mode & 0o077 == 0
    assert tenant.tenant_secret() == secret
    assert [path.name for path in file.parent.iterdir()] == ["tenant"]


def test_a_file_that_is_broken_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "heliograph").mkdir()
    (tmp_path / "heliograph" / "tenant").write_text("cut o")
    secret = tenant.tenant_secret()
    assert len(secret) == 32 and tenant.tenant_secret() == secret


def test_without_a_place_for_the_file_the_process_is_the_tenant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    secret = tenant.tenant_secret()
    assert len(secret) == 32 and tenant.tenant_secret() == secret


def test_a_text_that_can_be_guessed_is_no_tenant(monkeypatch: pytest.MonkeyPatch, daemon: DaemonUrls) -> None:
    monkeypatch.setenv("HELIOGRAPH_TENANT", "team")
    with pytest.raises(hg.ConfigurationError, match="guess"):
        hg.connect(daemon.tcp)
