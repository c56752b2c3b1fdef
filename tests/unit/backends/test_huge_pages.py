"""Weights that share huge pages: each has its bytes, and the system gets those of freed ones back."""

from __future__ import annotations

import sys

import numpy as np
import psutil
import pytest

from heliograph_backends.contract import Usage
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.host_memory.buffers import ALIGNMENT
from heliograph_backends.host_memory.huge_pages import LEAST_BYTES, MOST_BYTES

SIZES = [LEAST_BYTES, MOST_BYTES // 2 + 1, MOST_BYTES - ALIGNMENT, MOST_BYTES, 3]
#: Together more than a block.
MANY = [MOST_BYTES // 2 - 3] * 20


def test_weights_of_shared_pages_keep_their_own_bytes(device: CpuDevice) -> None:
    buffers = [device.buffer_type.allocate(size, Usage.WEIGHTS) for size in [*SIZES, *MANY]]
    for number, one in enumerate(buffers):
        one.memset(0, one.size_bytes, number)
    for number, one in enumerate(buffers):
        found = bytearray(one.size_bytes)
        one.get(0, memoryview(found))
        assert found == bytes([number]) * one.size_bytes
        assert one.address % ALIGNMENT == 0
        one.free()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count pages in other ways")
def test_the_system_gets_the_pages_of_freed_weights_back_while_a_neighbour_stays(device: CpuDevice) -> None:
    first, *others = [device.buffer_type.allocate(size, Usage.WEIGHTS) for size in MANY]
    for one in (first, *others):
        one.memset(0, one.size_bytes, 1)
    full = psutil.Process().memory_info().rss
    held = others[0].hold(0, others[0].size_bytes)
    for one in others:
        one.free()
    del one, others
    left = psutil.Process().memory_info().rss
    assert left < full - sum(MANY[2:]) * 0.9
    assert np.all(held.memory == 1), "a plan keeps the bytes of a weight that was freed"
    first.free()


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice("cpu0", threads=1, memory_bytes=2**30)
