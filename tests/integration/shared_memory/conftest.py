"""A server on this host and a session that shares its memory; a daemon with direct connections, and
a raw client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from daemon_urls import DaemonUrls
from direct_clients import (
    RawDirect,
)
from raw_client import raw_channel, still_serves

import heliograph as hg
from heliograph_proto.sessions import Limits

SECONDS = 60
MIB = 2**20


@pytest.fixture(params=["tcp", "unix"])
def near(request: pytest.FixtureRequest, daemon: DaemonUrls) -> str:
    """A server on this host, by either transport."""
    return daemon.tcp if request.param == "tcp" else daemon.unix


@pytest.fixture
def session_of(near: str) -> Iterator[hg.Session]:
    """A session that insists, after which the device's memory is as it was before."""
    with hg.connect(near) as watcher:
        before = watcher.devices[0].memory().free_bytes
        with hg.connect(near, shared_memory=True) as made:
            yield made
        assert watcher.devices[0].memory().free_bytes == before


@pytest.fixture
def lone() -> Iterator[ThreadDaemon]:
    """A daemon without other clients, which shares no memory."""
    limits = Limits(upload_idle_ms=1000)
    with thread_daemon(limits, direct_connections=0) as daemon:
        yield daemon


@pytest.fixture
def raw(lone: ThreadDaemon) -> Iterator[RawDirect]:
    with raw_channel(lone.url) as channel:
        made = RawDirect(channel)
        try:
            yield made
        finally:
            made.session.close()
    still_serves(lone.url)
