"""What a daemon is asked when its metrics are collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from heliograph_server.core.host import Host


class DaemonFacts:
    """What the daemon around a host knows. All may be called from any thread, and are quick."""

    def __init__(self) -> None:
        self.host: Callable[[], Host | None] = lambda: None
        self.refused: Callable[[], Mapping[int, int]] = dict
        self.lag_seconds: Callable[[], float] = lambda: 0.0
        #: Of the certificate that the daemon shows, in seconds since 1970; None without one.
        self.certificate_expiry: Callable[[], float | None] = lambda: None
        #: By "ok" and "failed".
        self.reloads: Callable[[], Mapping[str, int]] = dict
        self.scrapes: Counter[str] = Counter(ok=0, refused=0)
