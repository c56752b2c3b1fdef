"""A daemon with direct connections, and a raw client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from direct_clients import (
    RawDirect,
)
from raw_client import raw_channel, still_serves

from heliograph_proto.sessions import Limits

SECONDS = 60
MIB = 2**20


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
