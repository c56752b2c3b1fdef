"""A daemon whose configuration changes while it runs."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import heliograph as hg
from heliograph.testing import wait_until_serving
from heliograph_proto.errors import ConfigurationError
from heliograph_proto.sessions import Quota
from heliograph_server.config.config import ServerConfig, Sources
from heliograph_server.config.schema import entries
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.daemon.reload import Configuration, FileWatch
from heliograph_server.weights.disk_cache import DiskCache

SERVE = [
    sys.executable,
    "-m",
    "heliograph.cli",
    "serve",
    "--listen",
    "grpc://127.0.0.1:0",
    "--device",
    "fake",
]
SECONDS = 60


class Followed:
    """A configuration that follows a file, and what it asked the daemon to apply."""

    def __init__(self, path: Path, text: str, above: dict[str, object] | None = None) -> None:
        self.path = path
        self.applied: list[ServerConfig] = []
        self.watch = FileWatch()
        path.write_text(text)
        sources = Sources(path, above or {})
        self.configuration = Configuration(sources.load(), self.applied.append)
        self.configuration.follow(sources, self.watch)

    def becomes(self, text: str) -> ServerConfig:
        """What is in force once the file has another content."""
        self.path.write_text(text)
        self.watch.look(at_once=True)
        return self.configuration.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


@pytest.fixture(autouse=True)
def level_of_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """As it was afterwards."""
    with caplog.at_level(logging.INFO):
        yield


def test_what_may_change_does_when_the_file_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(path, "drain_seconds = 5")
    now = followed.becomes('drain_seconds = 6\ncache_size = "1GiB"\n[quota]\nsessions = 3')
    assert (now.drain_seconds, now.cache_size, now.quota) == (6.0, 2**30, Quota(sessions=3))
    assert followed.applied == [now]
    assert (
        "drain_seconds is 6.0, before 5.0" in caplog.text and "quota.sessions is 3, before 64" in caplog.text
    )
    assert followed.becomes("drain_seconds = 5") == replace(ServerConfig(), drain_seconds=5.0)


def test_what_may_not_change_is_named_and_stays(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(path, "")
    now = followed.becomes('devices = ["fake"]\ndrain_seconds = 7\n[limits]\ntensors = 5')
    assert now == ServerConfig(drain_seconds=7.0)
    assert "only after a restart: devices, limits.tensors" in caplog.text
    assert followed.becomes('devices = ["cpu"]\ndrain_seconds = 8').drain_seconds == 8.0
    assert caplog.text.count("restart") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drain_seconds = ", "is not TOML"),
        ("drain_seconds = 'long'", "must be a number"),
        ("drain_secnods = 9", "did you mean 'drain_seconds'?"),
        ("drain_seconds = 9\nlisten = ['0.0.0.0:1']", "--insecure"),
    ],
)
def test_a_broken_file_leaves_the_old_configuration_in_force_loudly(
    path: Path, text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    followed = Followed(path, "drain_seconds = 5")
    assert followed.becomes(text).drain_seconds == 5.0
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and said in record.message and str(path) in record.message
    assert followed.becomes("drain_seconds = 6").drain_seconds == 6.0


def test_what_was_said_above_the_file_stays_above_it(path: Path) -> None:
    followed = Followed(path, "drain_seconds = 5", {"drain_seconds": 2.0})
    now = followed.becomes("drain_seconds = 6\ncache_size = 5")
    assert (now.drain_seconds, now.cache_size) == (2.0, 5)


def test_a_change_that_the_daemon_refuses_is_not_made(path: Path) -> None:
    def refuse(_: ServerConfig) -> None:
        raise ConfigurationError("not now")

    path.write_text("")
    configuration, watch = Configuration(ServerConfig(), refuse), FileWatch()
    configuration.follow(Sources(path), watch)
    path.write_text("log_level = 'error'")
    watch.look(at_once=True)
    assert configuration.now == ServerConfig() and logging.getLogger().level == logging.INFO


def test_a_file_that_changed_before_it_was_followed_is_in_force(path: Path) -> None:
    path.write_text("drain_seconds = 5")
    configuration = Configuration(ServerConfig(), lambda _: None)
    configuration.follow(Sources(path), FileWatch())
    assert configuration.now.drain_seconds == 5.0


@pytest.mark.parametrize("path", [None, Path("/dev/null")])
def test_without_a_file_that_can_be_read_twice_there_is_nothing_to_follow(path: Path | None) -> None:
    watch = FileWatch()
    Configuration(ServerConfig(), lambda _: None).follow(Sources(path), watch)
    assert repr(watch) == "<Watch of []>"


def test_the_level_of_the_log_changes_alone_when_the_file_changes_it(path: Path) -> None:
    followed = Followed(path, "log_level = 'info'")
    logging.getLogger().setLevel(logging.DEBUG)
    followed.becomes("log_level = 'info'\ndrain_seconds = 1")
    assert logging.getLogger().level == logging.DEBUG
    followed.becomes("log_level = 'error'")
    assert logging.getLogger().level == logging.ERROR


def test_a_daemon_uses_what_changed(tmp_path: Path) -> None:
    config = ServerConfig(("grpc://127.0.0.1:0",), devices=("fake",), cache=str(tmp_path / "cache"))

    async def scenario() -> None:
        daemon = Daemon(config)
        try:
            # Before there are devices, and behind.
            daemon.configuration.change(replace(config, cache_size=2**20))
            await daemon.start()
            assert daemon.host is not None and isinstance(cache := daemon.host.store.cache, DiskCache)
            assert cache.quota_bytes == 2**20
            daemon.configuration.change(replace(config, cache_size=2**21))
            assert cache.quota_bytes == 2**21
        finally:
            await daemon.stop()

    asyncio.run(scenario())


def test_every_setting_that_may_change_is_one_of_these() -> None:
    """The daemon has to do something about each: Daemon._reconfigure, Configuration.change."""
    live = {one.table or one.name for one in entries(ServerConfig) if one.setting.live}
    expected = {"cache_size", "compile_seconds", "drain_seconds", "lease", "log_level", "pool_peers", "quota"}
    assert live == expected


@contextmanager
def serving(*words: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon that serves, and its URL."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*SERVE, *words], stdout=pipe, stderr=pipe, text=True, **options)
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        try:
            url = process.stdout.readline().removeprefix("listening on ").strip()
            wait_until_serving(url)
            yield process, url
        finally:
            process.kill()
            process.wait(SECONDS)


def said(process: subprocess.Popen[str], text: str) -> str:
    """The next line of the log that has this text."""
    assert process.stderr is not None
    return next(line for line in process.stderr if text in line)


def test_a_daemon_reads_its_file_again_when_it_changes_and_on_sighup(path: Path) -> None:
    path.write_text("drain_seconds = 5")
    with serving("--config", str(path)) as (process, url):
        path.write_text("drain_seconds = 6")
        said(process, "drain_seconds is 6.0, before 5.0")
        path.write_text("drain_seconds = 'long'")
        process.send_signal(signal.SIGHUP)
        assert f"{path}: drain_seconds is 'long'" in said(process, "ERROR")
        with hg.connect(url) as session:
            assert session.devices[0].name == "fake0"
        path.unlink()
        said(process, "cannot read")
        path.write_text("log_level = 'warning'\nmax_connections = 7")
        process.send_signal(signal.SIGHUP)
        said(process, "only after a restart: max_connections")
        process.terminate()
        assert process.wait(SECONDS) == 0


def test_sighup_without_a_file_ends_no_daemon() -> None:
    with serving() as (process, url):
        process.send_signal(signal.SIGHUP)
        said(process, "SIGHUP: reading the files again")
        hg.connect(url).close()
        process.terminate()
        assert process.wait(SECONDS) == 0


@pytest.mark.parametrize("with_nohup", [False, True])
def test_a_terminal_that_is_closed_ends_its_daemon_unless_it_was_to_go_on(with_nohup: bool) -> None:
    ours, theirs = (os.fdopen(one, "rb", buffering=0) for one in pty.openpty())

    def take_terminal() -> None:
        os.setsid()
        # Who leads a session and has no terminal gets the one that it opens.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
        # Whatever the tests were started with.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if with_nohup else signal.SIG_DFL)

    with ours, theirs, serving(stdin=theirs, preexec_fn=take_terminal) as (process, url):
        theirs.close()
        ours.close()
        if with_nohup:
            said(process, "SIGHUP: reading the files again")
            hg.connect(url).close()
            process.terminate()
        else:
            said(process, "SIGHUP: draining")
        assert process.wait(SECONDS) == 0
