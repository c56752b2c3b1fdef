"""A device and a client for the tests of loops and observed runs. Others bring their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from core_client import CoreClient
from core_loops import PLAN, doubling

from heliograph_backends.fake import FakeDevice


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice(memory_bytes=2**20)


@pytest.fixture
def client(fake: FakeDevice) -> Iterator[CoreClient]:
    """A client with a plan that doubles."""
    with CoreClient(fake) as made:
        made.compile(PLAN, doubling())
        yield made
