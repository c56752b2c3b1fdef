"""Fixtures of the tests of CUDA's kernels; a module takes one by giving it a name of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cuda_emulation import EmulatedDriver

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice

SEED = 20251121


def closing(made: CudaDevice) -> Iterator[CudaDevice]:
    """A device, all of whose memory is given back at the end."""
    yield made
    assert made.memory().free_bytes == made.memory().total_bytes
    made.close()


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    yield from closing(CudaDevice("cuda0", EmulatedDriver()))


@pytest.fixture
def definition() -> Iterator[CpuDevice]:
    """What has no kernels, to compare with."""
    made = CpuDevice(threads=1, memory_bytes=2**28, native=False)
    yield made
    made.close()


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)
