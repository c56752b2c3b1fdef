"""Fixtures of the tests of loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry, open_registry


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    """Two processors, and a device whose memory is its own."""
    specifications = ("cpu:threads=1", "cpu:threads=1")
    made = [*open_registry(specifications).devices, FakeDevice("far", 2**24, is_host=False)]
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*made))
    with hg.connect("local:") as session:
        yield session
