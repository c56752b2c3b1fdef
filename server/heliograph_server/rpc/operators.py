"""The actions of operators on a daemon, by whatever door they come: gRPC or the dashboard.

Runs on the daemon's event loop. The doors check rights and write the audit log.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from heliograph_proto.errors import InvalidArgumentError, SessionClosedError
from heliograph_proto.sessions import DrainStatus
from heliograph_server.rpc.ending import end_session
from heliograph_server.runtime.draining import Draining
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.telemetry.logs import set_log_level

logger = logging.getLogger(__name__)

MOST_REASON = 1000


class Operators:
    """Ends sessions, on the threads of `closers`, drains the daemon and sets the log level."""

    def __init__(self, slot: HostSlot, draining: Draining, closers: Executor) -> None:
        self._slot, self._draining, self._closers = slot, draining, closers

    async def end_session(self, number: int, reason: str) -> None:
        """End a session by its number. Raises SessionClosedError for an unknown one,
        InvalidArgumentError for a long reason."""
        found = next((one for one in self._slot.host.sessions if one.number == number), None)
        if found is None:
            raise SessionClosedError(
                f"session {number} does not exist, or has ended", advice="list them: heliograph sessions ls"
            )
        if len(reason) > MOST_REASON:
            raise InvalidArgumentError(f"a reason of more than {MOST_REASON} characters")
        reason = "".join(one if one.isprintable() else " " for one in reason)
        logger.info("%s: an operator ends it: %s", found, reason or "no reason given")
        error = SessionClosedError(
            f"an operator ended the session: {reason or 'no reason given'}",
            advice="ask the operator before you open another",
        )
        # Goes on even if the operator hangs up.
        await asyncio.shield(end_session(found, self._closers, error))

    async def drain(self, seconds: float = 0.0, *, stay: bool = False, move_to: str = "") -> DrainStatus:
        """As `Draining.begin`."""
        return await self._draining.begin(seconds, stay=stay, move_to=move_to)

    async def undo_drain(self) -> DrainStatus:
        """As `Draining.undo`."""
        return await self._draining.undo()

    def set_log_level(self, level: str) -> str:
        """Set the level of the log, and return the previous one. Raises InvalidArgumentError."""
        previous = set_log_level(level)
        logger.warning("the log level is now %s; it was %s", level, previous)
        return previous
