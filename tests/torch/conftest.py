"""Settings of torch for the tests, and sessions."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import heliograph as hg


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


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """No module is traced yet, and none stays."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def local() -> Iterator[hg.Session]:
    """A session of this process."""
    import heliograph as hg

    with hg.connect("local:") as made:
        yield made


@pytest.fixture
def session(local: hg.Session) -> hg.Session:
    """The session of this process: training is tried there alone."""
    return local


@pytest.fixture
def remote(daemon: Any) -> Iterator[hg.Session]:
    """A session of a daemon, whose tensors go over the wire."""
    import heliograph as hg

    with hg.connect(daemon.tcp, shared_memory=False) as made:
        yield made
