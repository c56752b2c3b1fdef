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
        #: By the fields of `Traffic`: a small write is counted in a microsecond.
        self._sums: Counter[str] = Counter()
        #: Bytes by direction, "received" or "sent", and by transport.
        self._by_transport: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"<TrafficCounter {self.now}>"

    @property
    def now(self) -> Traffic:
        """The traffic so far."""
        with self._lock:
            found = self._sums.copy()
        return Traffic(
            found["written_bytes"], found["read_bytes"], found["copied_in_bytes"], found["copied_out_bytes"],
            found["content_bytes"], found["relayed_bytes"],
        )  # fmt: skip

    @property
    def by_transport(self) -> Counter[tuple[str, str]]:
        """Bytes so far by direction, "received" or "sent", and by `Transport`; a copy."""
        with self._lock:
            return self._by_transport.copy()

    def written(self, size_bytes: int, copied_bytes: int, transport: Transport) -> None:
        """Count a write of a tensor."""
        with self._lock:
            self._sums["written_bytes"] += size_bytes
            self._sums["copied_in_bytes"] += copied_bytes
            self._by_transport["received", transport] += size_bytes

    def read(self, size_bytes: int, copied_bytes: int, transport: Transport) -> None:
        """Count a read of a tensor."""
        with self._lock:
            self._sums["read_bytes"] += size_bytes
            self._sums["copied_out_bytes"] += copied_bytes
            self._by_transport["sent", transport] += size_bytes

    def content(self, size_bytes: int, *, is_relayed: bool) -> None:
        """Count bytes of a content that were received, and passed on if `is_relayed`."""
        with self._lock:
            self._sums["content_bytes"] += size_bytes
            self._sums["relayed_bytes"] += size_bytes if is_relayed else 0
