"""Holds a session still between two commands, so that a consistent image of it can be taken.

New commands are kept, in order, while those before them end. Once none is left, the session is
still until `go_on`, which passes the kept commands on. A loop that is the last command may be held
between two of its steps instead (`edges.py`). A run under way may wait for its client: a
command that lets it go on passes if nothing was kept before it, and otherwise ends the wait.

Under the session's lock, except for the wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.commands import Cancel, Command, Continue, FeedLoop
from heliograph_proto.errors import HeliographError, ProtocolError

if TYPE_CHECKING:
    from heliograph_server.session.executor import Executor

Kept: TypeAlias = "Command | InlineRun | Callable[[], None]"

#: The time between two looks at downloads, whose end wakes nothing.
LOOK_SECONDS = 0.005


class Stillness:
    """The commands of a session that is held still. `keeps` is None while it is not."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.keeps: deque[Kept] | None = None
        #: Set when the last command has ended, or the wait is given up.
        self.looked_at = threading.Event()
        self._is_still = False
        #: The command of the loop that is held between two steps; 0: none is.
        self.held = 0

    def keep(self, command: Kept) -> bool:
        """Keep a command. False if it is to be passed on now. Lock held.

        Raises ProtocolError for more commands than a client may send unanswered.
        """
        assert self.keeps is not None
        lets_go_on = isinstance(command, Command) and isinstance(command.kind, Continue | Cancel | FeedLoop)
        if lets_go_on and not self._is_still:
            if self.keeps:
                self._pass_on()
            return False
        if len(self.keeps) > 2 * self._executor.most_commands:
            if self._is_still:
                raise ProtocolError("more commands are unanswered than the server allows")
            self._pass_on()
            return False
        self.keeps.append(command)
        return True

    def reach(self, seconds: float) -> bool:
        """Wait until every command received so far has ended. Return True if the session is still
        now, until `go_on`; False if that took too long, and commands go on. Blocks, without the
        lock."""
        end = time.monotonic() + seconds
        with self._executor.lock:
            if self.keeps is not None:
                return False
            self.keeps, self._is_still, self.held = deque(), False, 0
            self._executor.edges.want()
        while True:
            with self._executor.lock:
                if self.keeps is None:
                    return False
                if self._executor.is_at_rest or self._holds_loop():
                    self._is_still = True
                    return True
                self.looked_at.clear()
            if time.monotonic() >= end:
                self.go_on()
                return False
            self.looked_at.wait(LOOK_SECONDS)

    def forget(self) -> None:
        """Drop the kept commands, since another daemon has the session. Without the lock."""
        with self._executor.lock:
            self.keeps, self._is_still, self.held = None, False, 0
            self._executor.edges.go_on()

    def _holds_loop(self) -> bool:
        """True if the only command under way is a loop that is held between two steps. Lock
        held."""
        loop = self._executor.lone_loop
        if not loop or not self._executor.edges.hold(loop):
            return False
        self.held = loop
        return True

    def go_on(self) -> None:
        """Pass the kept commands on. Without the lock."""
        try:
            with self._executor.lock:
                if self.keeps is not None:
                    self._pass_on()
        finally:
            self._executor.deliver()

    def _pass_on(self) -> None:
        assert self.keeps is not None
        kept, self.keeps, self._is_still, self.held = self.keeps, None, False, 0
        self._executor.edges.go_on()
        self.looked_at.set()
        try:
            for command in kept:
                if isinstance(command, Command | InlineRun):
                    self._executor.take(command)
                else:
                    self._executor.decide(command)
        except HeliographError as error:
            # A gap in the numbers: the stream ends with it, as it would have without the wait.
            self._executor.end_later(error)
