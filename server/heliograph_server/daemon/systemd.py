"""Notifications of the daemon for systemd, by sd_notify's datagrams; none without $NOTIFY_SOCKET.

READY=1 once the devices are ready, WATCHDOG=1 from the event loop as often as WatchdogSec requires,
RELOADING=1 and STOPPING=1 when they begin. STOPPING=1 requests as much time as draining may take,
whatever the unit has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

#: The timeout for a manager that does not read.
SEND_SECONDS = 1.0
#: The most time for stopping, without draining.
STOP_SECONDS = 30.0


class ServiceManager:
    """The service manager whose socket is in the environment. Its methods raise nothing: a failed
    notification is logged."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the zero byte of an abstract name.
        self._path = f"\0{path[1:]}" if path.startswith("@") else path
        self._beat_seconds = _beat_seconds(environment) if path else 0.0
        self._beating: asyncio.Task[None] | None = None
        self._status = ""

    def ready(self, status: str) -> None:
        """Report that the daemon serves, and start the watchdog messages of the running event loop.

        `status`: a line for people.
        """
        self._status = status
        self._notify("READY=1", f"STATUS={status}")
        if self._beat_seconds and self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())

    def reload(self, read: Callable[[], None]) -> None:
        """Read the files again, and report RELOADING=1 meanwhile unless the daemon is still
        starting."""
        if not self._status:
            read()
            return
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            read()
        finally:
            self.ready(self._status)

    def stopping(self, drain_seconds: float) -> None:
        """Report that the daemon drains, for at most so many seconds, and stops."""
        microseconds = int((drain_seconds + STOP_SECONDS) * 1e6)
        self._notify("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={microseconds}")

    async def close(self) -> None:
        """End the watchdog messages. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(self._beat_seconds)

    def _notify(self, *lines: str) -> None:
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
                notifier.settimeout(SEND_SECONDS)
                notifier.sendto("\n".join(lines).encode(), self._path)
        except OSError as error:
            logger.warning("cannot send %s to the service manager: %s", lines[0], error)


def _beat_seconds(environment: Mapping[str, str]) -> float:
    """Half of the watchdog's timeout; 0 without a watchdog, or if it watches another process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    watched = environment.get("WATCHDOG_PID") or str(os.getpid())
    return int(microseconds) / 2e6 if microseconds.isdecimal() and watched == str(os.getpid()) else 0.0
