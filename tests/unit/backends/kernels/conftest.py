"""Fixtures of the tests of the CPU kernels, which need numba."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from backend_graphs import nothing_left
from narrow_views import Devices, opened

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import available, warmup

SEED = 20240521

collect_ignore_glob = [] if available() else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile or load once, so that no test's time contains it."""
    warmup()


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=2, memory_bytes=2**28)) as made:
        yield made


@pytest.fixture
def definition() -> Iterator[CpuDevice]:
    """A device without kernels, to compare with."""
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28, native=False)) as made:
        yield made


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with opened() as made:
        yield made
