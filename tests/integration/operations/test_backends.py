"""Backends of a running daemon: listed, unloaded while nobody uses them, and loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tokens
from forked_daemons import running_daemon
from plugin_files import GOOD

import heliograph as hg
import heliograph.admin
from heliograph.admin import Admin
from heliograph.cli import main

SECONDS = 30.0
X = np.zeros(4, np.float32)


def graph() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", X.shape, "f32") + 1.0)
    return g


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The file of a backend "sim", version 1.5, which has a name of its own."""
    path = tmp_path / "plugin.py"
    path.write_text(GOOD.replace("NAME", "sim") + '\n__version__ = "1.5"\n')
    return path


@pytest.fixture
def url(plugin: Path) -> Iterator[str]:
    with running_daemon("--device", "fake", "--device", "sim", "--backend", str(plugin)) as made:
        yield made


@pytest.fixture
def admin(url: str) -> Iterator[Admin]:
    with heliograph.admin.connect(url) as made:
        yield made


def names(session: hg.Session) -> list[str]:
    return [one.name for one in session.devices if not one.lost]


def test_backends_are_listed_with_version_path_devices_and_sessions(
    url: str, admin: Admin, plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hg.connect(url) as session:
        plan = session.compile(graph(), "sim0")
        found = {one.backend.name: one for one in admin.backends()}
        assert (found["sim"].backend.version, found["sim"].backend.origin) == ("1.5", str(plugin))
        assert (found["sim"].sessions, found["fake"].sessions) == (1, 0)
        assert found["fake"].backend.version == hg.__version__
        assert main(["backends", "--server", url]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["sim", "1.5"] in [line[:2] for line in lines]
        assert main(["backends", "ls", "--json", "--server", url]) == 0
        shown = {one["name"]: one for one in json.loads(capsys.readouterr().out)["backends"]}
        assert shown["sim"]["devices"] == ["sim0"] and shown["sim"]["sessions"] == 1
        plan.free()
        session.synchronize()
        assert {one.backend.name: one.sessions for one in admin.backends()}["sim"] == 0


def test_a_backend_in_use_is_not_unloaded_and_the_error_names_the_sessions(
    url: str, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    with hg.connect(url) as session, hg.connect(url) as idle:
        plan = session.compile(graph(), "sim0")
        with pytest.raises(hg.ConfigurationError, match=r"in use by session 1 of heliograph-python/\S+\n"):
            admin.unload_backend("sim")
        assert main(["backends", "unload", "sim", "--server", url]) == 1
        assert "in use by session 1" in capsys.readouterr().err
        assert plan.run(x=X)["y"].tolist() == [1.0] * 4
        assert names(idle) == names(session) == ["fake0", "sim0"]


def test_an_unloaded_backend_is_gone_from_all_lists_and_back_once_it_is_loaded(
    url: str, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    with hg.connect(url) as session, session.watch() as watch:
        assert main(["backends", "unload", "sim", "--server", url]) == 0
        assert "unloaded, with sim0" in capsys.readouterr().out
        event = watch.next(timeout=SECONDS)
        assert event is not None and event.device == "sim0" and "an operator unloaded" in event.lost
        assert names(session) == ["fake0"]
        with pytest.raises(hg.DeviceLostError, match="an operator unloaded backend 'sim'"):
            session.compile(graph(), "sim0")
        with hg.connect(url) as late:
            assert [one.name for one in late.devices] == ["fake0"]
        assert [one.name for one in admin.snapshot().devices] == ["fake0"]
        assert "sim" not in [one.backend.name for one in admin.backends()]
        assert main(["backends", "load", "sim", "--device", "sim", "--device", "sim", "--server", url]) == 0
        assert "loaded, with sim0, sim1" in capsys.readouterr().out
        for _ in range(2):
            event = watch.next(timeout=SECONDS)
            assert event is not None and not event.lost
        assert names(session) == ["fake0", "sim0", "sim1"]
        assert session.compile(graph(), "sim1").run(x=X)["y"].tolist() == [1.0] * 4


def test_backends_of_this_package_and_by_their_source_can_be_loaded(
    url: str, admin: Admin, plugin: Path
) -> None:
    admin.unload_backend("fake")
    admin.unload_backend("sim")
    with pytest.raises(hg.HeliographError, match="no devices left"):
        hg.connect(url)
    assert admin.load_backend(str(plugin)).devices == ("sim0",)
    assert admin.load_backend("fake", ["fake:memory=1MiB"]).devices == ("fake0",)
    with hg.connect(url) as session:
        assert names(session) == ["sim0", "fake0"]
        assert session.device("fake0").memory().total_bytes == 2**20


@pytest.mark.parametrize("source", ["nothing", "os", "/etc/hostname", "json.tool"])
def test_code_that_the_operator_did_not_configure_is_not_loaded(admin: Admin, source: str) -> None:
    with pytest.raises(hg.ConfigurationError, match="no backend"):
        admin.load_backend(source)
    with pytest.raises(hg.ConfigurationError, match="unknown backend"):
        admin.unload_backend(source)


def test_a_backend_that_is_started_already_is_not_loaded_again(admin: Admin) -> None:
    with pytest.raises(hg.ConfigurationError, match="already started"):
        admin.load_backend("fake")


def test_backends_need_the_right_of_an_operator(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    with (
        daemon_with_tokens(tokens) as daemon,
        heliograph.admin.connect(daemon.url, token=tokens.of["alice"]) as admin,
    ):
        unload, load = partial(admin.unload_backend, "cpu"), partial(admin.load_backend, "fake")
        for ask in (admin.backends, unload, load):
            with pytest.raises(hg.PermissionDeniedError):
                ask()
