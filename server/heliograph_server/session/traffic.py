"""Counts the tensor bytes that a session has carried, and the copies made of them.

Any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum

from heliograph_proto.sessions import Traffic


class Transport(StrEnum):
    """A transport of bytes between a client and its tensors."""

    #: A message of the command stream.
    INLINE = "inline"
    #: A bulk call.
    BULK = "bulk"
    #: Memory that client and server both map.
    SHARED = "shared_memory"


class TrafficCounter:
    """Counts bytes by direction and transport. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = Traffic()
        #: Bytes by direction, "received" or "sent", and by transport.
        self._by_transport: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"<TrafficCounter {self._sum}>"

    @property
    def now(self) -> Traffic:
        """The traffic so far."""
        return self._sum

    @property
    def by_transport(self) -> Counter[tuple[str, str]]:
        """Bytes so far by direction, "received" or "sent", and by `Transport`; a copy."""
        with self._lock:
            return self._by_transport.copy()

    def written(self, size_bytes: int, copied_bytes: int, transport: Transport) -> None:
        """Count a write of a tensor."""
        self._add(Traffic(written_bytes=size_bytes, copied_in_bytes=copied_bytes), ("received", transport))

    def read(self, size_bytes: int, copied_bytes: int, transport: Transport) -> None:
        """Count a read of a tensor."""
        self._add(Traffic(read_bytes=size_bytes, copied_out_bytes=copied_bytes), ("sent", transport))

    def content(self, size_bytes: int, *, is_relayed: bool) -> None:
        """Count bytes of a content that were received, and passed on if `is_relayed`."""
        self._add(Traffic(content_bytes=size_bytes, relayed_bytes=size_bytes if is_relayed else 0))

    def _add(self, traffic: Traffic, key: tuple[str, str] | None = None) -> None:
        with self._lock:
            self._sum = self._sum.plus(traffic)
            if key is not None:
                self._by_transport[key] += traffic.written_bytes + traffic.read_bytes
