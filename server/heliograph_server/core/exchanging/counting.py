"""How much has gone between a daemon and others."""

from __future__ import annotations

import threading
from dataclasses import fields

from heliograph_proto.description import PeerTraffic


class PeerCounter:
    """Counts what goes between this daemon and others, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((one.name for one in fields(PeerTraffic)), 0)

    def __repr__(self) -> str:
        return f"<PeerCounter {self.now}>"

    @property
    def now(self) -> PeerTraffic:
        """All so far."""
        with self._lock:
            return PeerTraffic(**self._counts)

    def sent(self, size_bytes: int) -> None:
        """A value has gone to another daemon."""
        self._add("sent_bytes", size_bytes, "sent_values")

    def received(self, size_bytes: int) -> None:
        """A value has come from another daemon."""
        self._add("received_bytes", size_bytes, "received_values")

    def relayed(self, size_bytes: int) -> None:
        """A value has been taken from one daemon to another, which cannot reach each other."""
        self._add("relayed_bytes", size_bytes, "relayed_values")

    def refused(self) -> None:
        """A capability was not accepted."""
        self._add("refused", 1, "refused", 0)

    def _add(self, name: str, amount: int, number: str, more: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount
            self._counts[number] += more
