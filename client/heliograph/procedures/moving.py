"""A session goes to another daemon, step by step.

First the server sends a copy ahead, while commands go on. Then nothing new leaves: commands after a
gate in the outbox wait. When every command before it is
answered and no bytes are on their way, the server hands the session over. Then the shell attaches
to the other daemon, and the waiting commands leave there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from heliograph.core.credit import OrderGate
from heliograph.core.effects import Compute, Procedure, ask
from heliograph.core.future import logger
from heliograph.core.methods import MOVE, PREPARE_MOVE, MoveQuery
from heliograph.core.protocol import ClientCore
from heliograph.procedures.transfer import arrive, wait_for
from heliograph_proto.errors import HeliographError, MovedError
from heliograph_proto.sessions import SessionMove

#: The pause after a look that found bytes on their way.
PAUSE_SECONDS = 0.005
_WHY = "the session is about to move to another daemon"


class Moving:
    """The move of one session to the daemon at an address."""

    def __init__(
        self, core: ClientCore, address: str, look: Callable[[], None], wait_seconds: float | None
    ) -> None:
        """`look` raises an error if that daemon does not answer this client; it blocks.
        `wait_seconds`: the time for commands under way to end; None: 30 s."""
        self.wait_seconds = 30.0 if wait_seconds is None else wait_seconds
        self._core, self._address, self._look = core, address, look
        self._gate: OrderGate | None = None
        self._has_moved = False

    def __repr__(self) -> str:
        return f"<Moving to {self._address}>"

    def look(self) -> Procedure[None]:
        """Check that the other daemon answers."""
        yield Compute(self._look)

    def prepare(self) -> Procedure[None]:
        """Have the server send a copy ahead. Without it, the session is held still for longer."""
        try:
            yield from ask(PREPARE_MOVE, self._address)
        except HeliographError as error:
            # If it is in the way of the move itself, too, that tells of it.
            logger.debug("nothing is sent ahead of the session: %s", error)

    def settle(self) -> Procedure[None]:
        """Hold back new commands, and wait until those before are answered."""
        core = self._core
        core.stop_sharing(_WHY)
        while True:
            core.collect()
            self._gate = core.open_gate()
            yield from wait_for(core, core.when_settled(self._gate))
            if core.holds_nothing:
                return
            core.close_gate(self._gate)
            # A command that has its bytes already is queued behind the gate.
            yield Compute(partial(time.sleep, PAUSE_SECONDS))

    def hand_over(self) -> Procedure[SessionMove]:
        """Have the server hand the session over, and go on there. Raises the server's error."""
        core, sequence = self._core, self._core.last_sent
        found = SessionMove(sequence, 0, 0, 0.0)
        try:
            found = yield from ask(MOVE, MoveQuery(self._address, self.wait_seconds))
        except MovedError:
            pass  # the connection broke before the answer came
        self._has_moved = True
        self.end()
        yield from arrive(core)
        return found

    def end(self) -> None:
        """Let commands leave again, wherever the session is. Idempotent."""
        gate, self._gate = self._gate, None
        if gate is not None:
            self._core.close_gate(gate)
        if not self._has_moved:
            self._core.share_again()
