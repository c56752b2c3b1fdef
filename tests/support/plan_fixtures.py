"""Fixtures of the tests of plans on the CPU; a module takes one by giving it a name of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_graphs import nothing_left

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import available
from heliograph_backends.fake import FakeDevice

needs_native = pytest.mark.skipif(not available(), reason="numba is not installed")


@pytest.fixture(params=["native", "definition"])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """A CPU of two threads, with and without native kernels."""
    native = request.param == "native"
    if native and not available():
        pytest.skip("numba is not installed")
    with nothing_left(CpuDevice(threads=2, memory_bytes=2**28, native=native)) as made:
        yield made


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    """A fake device of 16 MiB."""
    with nothing_left(FakeDevice(memory_bytes=2**24)) as made:
        assert isinstance(made, FakeDevice)
        yield made
