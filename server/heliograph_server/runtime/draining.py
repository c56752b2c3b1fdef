"""Draining of a daemon, after a signal or by an operator, who may undo it.

    serving ──(Drain)──▸ draining ──(no work, or timeout)──▸ stopping, or drained if it is to stay
       ▴───(UndoDrain)──────┴──────────────────────────────────────────────┘

Runs on the daemon's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from heliograph_proto.errors import DrainingError, InvalidArgumentError
from heliograph_proto.process_facts import process_started
from heliograph_proto.sessions import LONGEST_DRAIN_SECONDS, DrainState, DrainStatus
from heliograph_server.runtime.host import GONE
from heliograph_server.runtime.host_slot import HostSlot

logger = logging.getLogger(__name__)

#: The interval at which the deadline is checked for changes.
LOOK_SECONDS = 0.5
#: The time in which the begin of a drain counts the sessions that send commands.
GLANCE_SECONDS = 0.1
#: The time between two looks at sessions that are to move, and at the clients of those that went.
MOVE_SECONDS = 0.1
#: The error of sessions that end with a drain.
DRAINED = DrainingError("the server was drained by its operator", advice=GONE)


class Draining:
    """The drain of one daemon.

    `drain_seconds` returns the default time for running work. `tell_health` updates the health
    status that routes clients. Every state change is complete before the first await, so concurrent
    calls do not see a half of it.
    """

    def __init__(
        self,
        slot: HostSlot,
        drain_seconds: Callable[[], float],
        tell_health: Callable[[], Awaitable[None]],
    ) -> None:
        self._slot = slot
        self._drain_seconds = drain_seconds
        self._tell_health = tell_health
        self._state = DrainState.SERVING
        self._stay = False
        #: Sessions whose work did not end in time.
        self._interrupted = 0
        self._until = 0.0
        self._waiting: asyncio.Task[None] | None = None
        #: Ends the sessions of a daemon that stays.
        self._closing: asyncio.Task[None] | None = None
        #: Set when an operator's drain is over, and the daemon should stop.
        self.over = asyncio.Event()
        #: Set when the daemon stops, and its observers should disconnect.
        self.hung_up = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Draining {self._state.name}>"

    @property
    def status(self) -> DrainStatus:
        """The current state. Raises UnavailableError before the devices are ready."""
        found = DrainStatus(
            self._state,
            busy_sessions=self._slot.host.count_busy(),
            interrupted_sessions=self._interrupted,
            process=os.getpid(),
            process_started=_own_start(),
            moves=self._slot.host.moves.outcomes,
            staying=self._slot.host.heads.staying,
        )
        if self._state is not DrainState.DRAINING:
            return found
        left = max(0.0, self._until - asyncio.get_running_loop().time())
        return replace(found, remaining_seconds=left, stay=self._stay)

    @property
    def is_stopping(self) -> bool:
        """True if the daemon stops after a drain."""
        return self._state is DrainState.STOPPING

    async def begin(self, seconds: float = 0.0, *, stay: bool = False, move_to: str = "") -> DrainStatus:
        """Begin to drain, for at most so many seconds; 0 is the configured default. Returns within
        `GLANCE_SECONDS`, in which it sees which sessions are at work.

        `move_to`: the daemon to which sessions with a lease go first; empty: none. Raises
        InvalidArgumentError, DrainingError.
        """
        if seconds > LONGEST_DRAIN_SECONDS:
            advice = f"at most {LONGEST_DRAIN_SECONDS:.0f} are possible"
            raise InvalidArgumentError(f"a drain of {seconds:.0f} seconds", advice=advice)
        host = self._slot.host
        self._check_not_stopping()
        host.moves.send_to(move_to)
        self._until = asyncio.get_running_loop().time() + (seconds or self._drain_seconds())
        self._state, self._stay, self._interrupted = DrainState.DRAINING, stay, 0
        host.drain()
        has_sessions = bool(host.sessions)
        host.count_busy()
        logger.info("draining, by request of an operator")
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._wait())
        await self._tell_health()
        if has_sessions:
            await asyncio.sleep(GLANCE_SECONDS)
        return self.status

    async def undo(self) -> DrainStatus:
        """Accept new sessions again, and restore the durable ones that the drain has ended. Raises
        DrainingError when the daemon is stopping."""
        host = self._slot.host
        self._check_not_stopping()
        if self._state is not DrainState.SERVING:
            # Before the first await: a drain that another operator begins meanwhile must stay in
            # force.
            closing, self._closing = self._closing, None
            if closing is not None:
                # Clients that come back find their sessions restored, as after a restart.
                host.incarnation = secrets.token_bytes(len(host.incarnation))
            host.undo_drain()
            host.moves.send_to("")
            self._state, self._interrupted = DrainState.SERVING, 0
            logger.info("the drain was undone: new sessions are accepted")
            await self._cancel()
            await self._tell_health()
            if closing is not None:
                await self._restore(closing)
        return self.status

    async def _restore(self, closing: asyncio.Task[None]) -> None:
        """Restore the durable sessions that a drain has ended, once all have."""
        await asyncio.shield(closing)
        host = self._slot.host
        if host.snapshots is not None:
            await asyncio.to_thread(host.snapshots.restore_kept, host.images.reopen)

    async def stopping(self) -> None:
        """Drain after a signal, which cannot be undone. Also before the devices are ready.
        Idempotent."""
        self._state = DrainState.STOPPING
        if self._slot.is_filled:
            self._slot.host.drain()
        await self._cancel()
        await self._tell_health()

    def _check_not_stopping(self) -> None:
        if self._state is DrainState.STOPPING:
            raise DrainingError("the daemon is stopping", advice="this cannot be undone; start it again")

    async def _wait(self) -> None:
        """Wait for running work, and end the rest."""
        host, now = self._slot.host, asyncio.get_running_loop().time
        # In steps, for the same reason as below.
        has_moved = quiet = False
        while not has_moved and self._until > now():
            has_moved = await asyncio.to_thread(host.moves.send_all, MOVE_SECONDS)
        while not quiet and (left := self._until - now()) > 0:
            # In steps: the deadline may change, and a waiting thread cannot be interrupted.
            quiet = await asyncio.to_thread(host.wait_quiet, min(left, LOOK_SECONDS))
        if not quiet:
            self.interrupt()
        if not self._stay:
            self._state = DrainState.STOPPING
            self.over.set()
            return
        # An undo does not stop it.
        self._closing = asyncio.ensure_future(asyncio.to_thread(host.close_sessions, DRAINED, ends=False))
        await asyncio.shield(self._closing)
        self._state, self._waiting = DrainState.DRAINED, None
        logger.info("drained; staying until the drain is undone")

    def interrupt(self) -> None:
        """Note that the drain ends before the work of its sessions."""
        # A drain without a session at work is quiet.
        self._interrupted = max(1, self._slot.host.count_busy())
        logger.warning("work of %d sessions did not end in time and is interrupted", self._interrupted)

    async def _cancel(self) -> None:
        """Cancel the wait. Its thread ends within LOOK_SECONDS."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


def _own_start() -> int:
    try:
        return process_started(Path("/proc/self/stat").read_text(errors="replace"))
    except OSError:
        return 0
