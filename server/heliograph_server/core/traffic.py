"""How many bytes of tensors a session has carried, and how often each was copied on the way."""

from __future__ import annotations

import threading

from heliograph_proto.description import Traffic


class TrafficCounter:
    """Counts from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = Traffic()

    def __repr__(self) -> str:
        return f"<TrafficCounter {self._sum}>"

    @property
    def now(self) -> Traffic:
        """All so far."""
        return self._sum

    def written(self, size_bytes: int, copied_bytes: int) -> None:
        """A tensor was written."""
        self._add(Traffic(written_bytes=size_bytes, copied_in_bytes=copied_bytes))

    def read(self, size_bytes: int, copied_bytes: int) -> None:
        """A tensor was read."""
        self._add(Traffic(read_bytes=size_bytes, copied_out_bytes=copied_bytes))

    def content(self, size_bytes: int, *, is_relayed: bool) -> None:
        """So much of a content came, and was perhaps passed on."""
        self._add(Traffic(content_bytes=size_bytes, relayed_bytes=size_bytes if is_relayed else 0))

    def _add(self, traffic: Traffic) -> None:
        with self._lock:
            self._sum = self._sum.plus(traffic)
