"""Settings of torch for the tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def quiet_torch() -> Iterator[None]:
    """One thread, and no thread that watches progress bars."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch
    import tqdm

    tqdm.tqdm.monitor_interval = 0
    torch.set_num_threads(1)
    yield
