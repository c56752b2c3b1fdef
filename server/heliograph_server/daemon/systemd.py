"""What systemd is told of the daemon, by sd_notify's datagrams; nothing without $NOTIFY_SOCKET.

READY=1 once the devices are there, WATCHDOG=1 from the event loop as often as WatchdogSec asks, RELOADING=1
and STOPPING=1 when they begin. Stopping asks for as long as draining may take, whatever the unit says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

#: A manager that does not read is not waited for any longer.
SEND_SECONDS = 1.0
#: What stopping takes at most beside draining.
STOP_SECONDS = 30.0


class ServiceManager:
    """Whoever started this process and named a socket in its environment. Raises nothing: who is not told
    restarts the daemon, or does not."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the byte that begins a name without a file.
        self._path = f"\0{path[1:]}" if path.startswith("@") else path
        self._beat_seconds = _beat_seconds(environment) if path else 0.0
        self._beating: asyncio.Task[None] | None = None
        self._status = ""

    def ready(self, status: str) -> None:
        """The daemon serves. From now on signs of life are sent by the running event loop, until `close`.
        `status`: for people, one line."""
        self._status = status
        self._tell("READY=1", f"STATUS={status}")
        if self._beat_seconds and self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())

    def reload(self, read: Callable[[], None]) -> None:
        """Has files read again, and says so while it lasts; of a daemon that is still starting, nothing."""
        if not self._status:
            read()
            return
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            read()
        finally:
            self.ready(self._status)

    def stopping(self, drain_seconds: float) -> None:
        """Work is drained, for so long at most."""
        microseconds = int((drain_seconds + STOP_SECONDS) * 1e6)
        self._tell("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={microseconds}")

    async def close(self) -> None:
        """Sends no more signs of life. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self._beat_seconds)

    def _tell(self, *lines: str) -> None:
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
                notifier.settimeout(SEND_SECONDS)
                notifier.sendto("\n".join(lines).encode(), self._path)
        except OSError as error:
            logger.warning("the service manager could not be told %s: %s", lines[0], error)


def _beat_seconds(environment: Mapping[str, str]) -> float:
    """Half of what the watchdog waits; 0 if there is none, or another process is watched."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    watched = environment.get("WATCHDOG_PID") or str(os.getpid())
    return int(microseconds) / 2e6 if microseconds.isdecimal() and watched == str(os.getpid()) else 0.0
