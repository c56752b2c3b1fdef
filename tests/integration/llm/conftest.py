"""A folder of models, a daemon that offers them, and its sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import heliograph as hg
from heliograph.testing import running_daemon


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running_daemon("--models", str(folder), "--device", "cpu:threads=2,memory=1GiB") as url:
        yield url


@pytest.fixture
def session(url: str) -> Iterator[hg.Session]:
    with hg.connect(url, progress=None) as session:
        yield session
