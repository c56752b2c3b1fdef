"""A session with devices of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import heliograph as hg


@pytest.fixture(scope="module")
def local() -> Iterator[hg.Session]:
    with hg.connect("local:") as session:
        # The device starts its threads with its first work; they are not a test's.
        g = hg.Graph()
        g.output("y", hg.ones(3, graph=g))
        session.compute(g)
        yield session
