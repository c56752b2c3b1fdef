"""Devices that can be lost, over each transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from losing import TRANSPORTS, Losable, losable

import heliograph as hg


@pytest.fixture(params=TRANSPORTS)
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Losable]:
    with losable(request.param, monkeypatch) as made:
        yield made


@pytest.fixture
def session(pool: Losable) -> Iterator[hg.Session]:
    with hg.connect(pool.url) as made:
        yield made
