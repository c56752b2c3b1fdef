"""The loops of a restored session that go on from a step, once their commands come again."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from heliograph_proto.commands import ResumedLoop
from heliograph_server.session.parts.edges import LoopState

if TYPE_CHECKING:
    from heliograph_server.session.protocol.core import SessionCore


class ResumableLoops:
    """Their states, by the numbers of the commands that begin them. Under the session's lock."""

    def __init__(self, core: SessionCore, lock: threading.RLock) -> None:
        self._core, self._lock = core, lock
        self._states: dict[int, LoopState] = {}

    def __repr__(self) -> str:
        return f"<ResumableLoops {sorted(self._states)}>"

    def add(self, states: Mapping[int, LoopState]) -> None:
        """Add loops. Lock held."""
        self._states.update(states)

    def take(self, sequence: int) -> LoopState | None:
        """Remove and return the state of a loop that begins now; None: it has none. Takes the
        lock."""
        with self._lock:
            return self._states.pop(sequence, None)

    def states(self) -> dict[int, LoopState]:
        """Return the states of the loops whose commands are still to come. Lock held."""
        last, states = self._core.last_sequence, self._states
        for one in [one for one in states if one <= last and not self._core.is_open(one)]:
            # It was passed over.
            del states[one]
        return {sequence: state for sequence, state in states.items() if sequence > last}

    def told(self) -> tuple[ResumedLoop, ...]:
        """Return what the client is told of them. Takes the lock."""
        with self._lock:
            found = self.states().items()
        return tuple(ResumedLoop(one, state.steps, state.unsent) for one, state in found)
