"""A session of a client without manners, with the daemon that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_urls import DaemonUrls
from raw_client import RawSession, raw_channel, still_serves

import heliograph as hg


@pytest.fixture
def raw(daemon: DaemonUrls) -> Iterator[RawSession]:
    """A raw session; afterwards the daemon still serves, and holds what it held before."""
    with hg.connect(daemon.tcp) as watcher:
        before = watcher.devices[0].memory()
        with raw_channel(daemon.tcp) as channel:
            session = RawSession(channel).attach()
            try:
                yield session
            finally:
                session.close()
        still_serves(daemon.tcp)
        wait_for_memory(watcher, before.free_bytes)


def wait_for_memory(watcher: hg.Session, free_bytes: int) -> None:
    """Memory comes back once the daemon has seen that a client left; each question is a round trip."""
    for _ in range(5_000):
        if watcher.devices[0].memory().free_bytes == free_bytes:
            return
    raise AssertionError(f"{watcher.devices[0].memory()} is not {free_bytes} free")
