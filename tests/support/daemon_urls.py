"""The addresses of the daemon that tests share, and the transports that they take to it."""

from __future__ import annotations

from dataclasses import dataclass

TRANSPORTS = ("local", "unix", "tcp")


@dataclass(frozen=True)
class DaemonUrls:
    """Where a daemon listens."""

    tcp: str
    unix: str
