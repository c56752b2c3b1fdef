"""A session for ONNX models that need no daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import heliograph as hg


@pytest.fixture
def here() -> Iterator[hg.Session]:
    """A session with devices of this process."""
    with hg.connect("local:") as session:
        yield session
