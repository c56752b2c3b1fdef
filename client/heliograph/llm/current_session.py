"""`CurrentSession`: the session of a model, and another one after it was lost. For both APIs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import heliograph as hg
from heliograph._base.device import device_names
from heliograph.llm.effects import Ask, Pause, Procedure
from heliograph.llm.files.weights import LocalWeights, ServerFileWeights

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)

#: The most sessions that work loses before any of it is done: it may be what ends the daemon.
MOST_LOSSES = 3
#: The longest time of one attempt to open a session, and the least.
ATTEMPT_SECONDS = 10.0
LEAST_ATTEMPT_SECONDS = 0.5
#: The pause of those that wait while another procedure opens the session.
LOOK_SECONDS = 0.05

#: Errors that say nothing of a session that could be opened again: other attempts would end so too.
_FINAL = (hg.UnauthenticatedError, hg.NotHeliographError, hg.VersionMismatchError, hg.ProtocolError)
#: Errors of an attempt that may be others a moment later.
_FOR_NOW = (hg.UnavailableError, hg.DrainingError, hg.SessionClosedError, hg.LimitExceededError)


def _nothing() -> Procedure[Any, None]:
    yield from ()


class CurrentSession:
    """The session of a model's plans and variables, which are gone when it is lost.

    A session that the client has not closed is opened again within its `reconnect` seconds, with
    the arguments of `hg.connect`. Plans of the one before belong to another `number`.
    """

    def __init__(self, session: Any) -> None:
        self._first = self._session = session
        #: The number of sessions that took the place of others.
        self.number = 0
        #: The files on the server whose tensors the model uses.
        self._files: list[ServerFileWeights] = []
        self._is_opening = False

    def __repr__(self) -> str:
        return f"<CurrentSession {self.number}: {self._session!r}>"

    @property
    def lost(self) -> hg.HeliographError | None:
        """The reason why this one has ended; None while it is there."""
        found: hg.HeliographError | None = self._session._lost
        return found

    @property
    def is_connected(self) -> bool:
        """True while it is there and has a connection."""
        return bool(self._session.connection is hg.ConnectionState.CONNECTED)

    # The parts of a session that a model uses

    @property
    def devices(self) -> list[Any]:
        """As `Session.devices`."""
        found: list[Any] = self._session.devices
        return found

    def device(self, name: str) -> Any:
        """As `Session.device`."""
        return self._session.device(name)

    def devices_of(self, devices: Any) -> list[Any]:
        """Return the devices of a plan, named as for `Session.compile`. Those that are lost count.

        Raises UnknownDeviceError.
        """
        names = device_names(self._session._shell, devices)
        return [one for one in self.devices if one.name in names]

    def compile(self, graph: hg.Graph, **options: Any) -> Any:
        """As `Session.compile`."""
        return self._session.compile(graph, **options)

    def meanwhile(self, begin: Callable[[], object]) -> None:
        """Begin further work, in another thread, as soon as the server compiles the next graph: not
        before, since only one thread of Python runs at a time. In this process it is not begun."""
        self._session._shell.core.meanwhile = begin

    def not_meanwhile(self, begin: Callable[[], object]) -> None:
        """Take work back that has not begun, since no graph was compiled."""
        self._session._shell.core.not_meanwhile(begin)

    def estimate(self, graph: hg.Graph, device: Any) -> Any:
        """As `Session.estimate`."""
        return self._session.estimate(graph, device)

    def free_variable(self, name: str) -> Any:
        """As `Session.free_variable`."""
        return self._session.free_variable(name)

    # Another session

    def uses(self, weights: LocalWeights | ServerFileWeights) -> None:
        """Note the file of the model's tensors. One on the server must still be there later."""
        if isinstance(weights, ServerFileWeights):
            self._files.append(weights)

    @property
    def reopen_seconds(self) -> float:
        """The time for which another session is tried for; 0: none is opened."""
        how = self._first._reopening
        return 0.0 if how is None or self._first._is_left else how.seconds

    def may_follow(self, error: BaseException) -> bool:
        """True if work that ended with this error may go on in another session."""
        is_loss = isinstance(error, hg.ConnectionError) and not isinstance(error, _FINAL)
        return isinstance(error, hg.NotReplayableError) or (is_loss and self.reopen_seconds > 0)

    def kept_up(
        self,
        work: Callable[[], Procedure[T, R]],
        done: Callable[[], int] = lambda: 0,
        mend: Callable[[], Procedure[Any, None]] = _nothing,
    ) -> Procedure[T, R]:
        """Do work, and go on with it in another session where one is lost. It begins where `done`,
        the count of what is done, says.

        `mend` frees variables of a durable session that its restarted daemon could not restore.
        Raises the error that ends the work once more while nothing gets done, and as `again`.
        """
        before, losses = done(), 0
        while True:
            number = self.number
            try:
                return (yield from work())
            except (hg.ConnectionError, hg.NotReplayableError) as error:
                losses = losses + 1 if done() == before else 1
                before = done()
                if losses > MOST_LOSSES or not self.may_follow(error):
                    raise
                if isinstance(error, hg.NotReplayableError):
                    yield from mend()
                else:
                    yield from self.again(number, error)

    def again(self, number: int, error: hg.HeliographError) -> Procedure[Any, None]:
        """Open another session in the place of one, unless that has happened. `error` is that of
        its loss.

        Raises UnavailableError if none opens in time, SessionClosedError if the client closes the
        first one meanwhile, InvalidModelError if a file on the server is another one, and other
        errors of `hg.connect` at once.
        """
        began, attempts = time.monotonic(), 0
        if self.number == number and not self._is_opening:
            # The text alone: a record that is kept would keep the traceback, and with it the session.
            logger.warning("the session of a model is lost: %s", error.message)
        while self.number == number:
            if self._first._is_left:
                raise hg.SessionClosedError("the session was closed")
            if self._is_opening:
                yield Pause(LOOK_SECONDS)
                continue
            try:
                yield from self._opening(began + self.reopen_seconds - time.monotonic())
            except _FOR_NOW as failed:
                left = began + self.reopen_seconds - time.monotonic()
                if left <= 0:
                    raise _late(error, failed) from None
                attempts += 1
                yield Pause(min(left, self._first._reopening.pause(attempts)))

    def _opening(self, seconds: float) -> Procedure[Any, None]:
        """Make one attempt. Others wait for its end."""
        self._is_opening = True
        try:
            yield from self._replace(min(max(seconds, LEAST_ATTEMPT_SECONDS), ATTEMPT_SECONDS))
        finally:
            self._is_opening = False

    def _replace(self, seconds: float) -> Procedure[Any, None]:
        opened = yield Ask(partial(self._first._reopening.open, seconds))
        # It ends with the first one, also if this work is given up meanwhile.
        self._first._successors.append(opened)
        try:
            for file in self._files:
                file.check_same((yield Ask(partial(opened.server_weights, file.name))))
            if self._first._is_left:
                raise hg.SessionClosedError("the session was closed")
        except Exception:
            yield from self._closed(opened)
            raise
        lost, self._session = self._session, opened
        self.number += 1
        logger.warning("the model goes on in another session of %s", opened.address)
        yield from self._closed(lost)

    def close(self) -> Procedure[Any, None]:
        """Close the session that took the place of the client's own, if one did."""
        yield from self._closed(self._session)

    def _closed(self, session: Any) -> Procedure[Any, None]:
        if session in self._first._successors:
            self._first._successors.remove(session)
            yield Ask(session.close)


def _late(error: hg.HeliographError, failed: hg.HeliographError) -> hg.UnavailableError:
    return hg.UnavailableError(
        f"the session is lost ({error.message}), and no other one opens: {failed.message}",
        advice="ask again once the daemon is there; hg.connect(reconnect=SECONDS) waits longer",
    )
