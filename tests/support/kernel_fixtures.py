"""Fixtures of the tests of the CPU kernels; a module takes one by giving it a name of its own."""

from __future__ import annotations

import numpy as np
import pytest

from heliograph_backends.cpu.kernels import warmup

SEED = 20240521


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile or load once, so that no test's time contains it."""
    warmup()


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)
