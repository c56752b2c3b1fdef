"""A head and two members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool_daemons import Daemon, daemons, head_of, wait_for_devices

import heliograph as hg


@pytest.fixture(scope="module")
def members() -> Iterator[list[Daemon]]:
    with daemons(2) as made:
        yield made


@pytest.fixture(scope="module")
def head(members: list[Daemon]) -> Iterator[Daemon]:
    with head_of(*members, lease=1.0) as made:
        yield made


@pytest.fixture
def session(head: Daemon) -> Iterator[hg.Session]:
    """A session with the head, once all have joined."""
    with hg.connect(head.url) as made:
        wait_for_devices(made, "cpu0", "m0/cpu0", "m1/cpu0")
        yield made
