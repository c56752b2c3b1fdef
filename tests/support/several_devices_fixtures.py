"""Transports to several devices, a module's DEVICES. A module renames the fixture that it takes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_urls import TRANSPORTS, DaemonUrls
from forked_daemons import running_daemon

import heliograph as hg
from heliograph_backends.registry import open_registry


def give_local(monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...]) -> None:
    """Let local sessions have these devices."""
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: open_registry(devices))


@pytest.fixture(scope="module")
def daemon_of_several(request: pytest.FixtureRequest) -> Iterator[DaemonUrls]:
    with tempfile.TemporaryDirectory() as folder:
        unix = f"unix://{Path(folder, 'heliograph.sock')}"
        devices = [word for one in request.module.DEVICES for word in ("--device", one)]
        with running_daemon("--listen", unix, *devices) as url:
            yield DaemonUrls(url, unix)


@pytest.fixture(params=TRANSPORTS)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of each kind, behind which there are the same devices."""
    if request.param == "local":
        give_local(monkeypatch, request.module.DEVICES)
        return "local:"
    urls: DaemonUrls = request.getfixturevalue("daemon_of_several")
    return urls.tcp if request.param == "tcp" else urls.unix


@pytest.fixture
def session(url: str) -> Iterator[hg.Session]:
    with hg.connect(url) as made:
        yield made
