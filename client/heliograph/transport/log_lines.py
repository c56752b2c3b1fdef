"""A server's log lines of a session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from heliograph.core.future import Deadline
from heliograph.transport import handshake
from heliograph.transport.reconnecting import Tries, is_cut
from heliograph_proto.addresses import Address
from heliograph_proto.codec import decode_all
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    SessionClosedError,
)
from heliograph_proto.sessions import LogLine, SessionInfo, after_dropped, check_level
from heliograph_proto.v1 import session_pb2

if TYPE_CHECKING:
    from heliograph.transport.aio_grpc import AioGrpcShell

FOLLOW_LOG = "/heliograph.v1.SessionService/FollowLog"
_DOING = "send its log"
#: The most time until a server has accepted to send lines.
ACCEPT_SECONDS = 10.0


class LogSource(Protocol):
    """The source of a server's log lines."""

    def take(self) -> list[LogLine] | None:
        """Wait for more lines; None at the end, for example after `close`."""

    def close(self) -> None:
        """Make `take` end soon. Idempotent; neither blocks nor raises."""


def follow_request(info: SessionInfo, level: str) -> bytes:
    """Encode a request for log lines. Raises InvalidArgumentError."""
    check_level(level)
    return session_pb2.FollowLogRequest(session=info.session, level=level).SerializeToString()


def lines_of(message: bytes) -> list[LogLine]:
    """Return the lines of a response."""
    found = session_pb2.FollowLogResponse.FromString(message)
    return after_dropped(decode_all(found.lines, LogLine), found.dropped)


def is_end(error: HeliographError) -> bool:
    """True if an error only says that the session has ended or the reader has stopped."""
    return isinstance(error, CancelledError | SessionClosedError)


def _late() -> DeadlineExceededError:
    return DeadlineExceededError(
        f"the server did not accept within {ACCEPT_SECONDS:g} s to send its log", advice="ask again"
    )


class RemoteLog:
    """The log call to a daemon, subscribed once it is made.

    Raises the error with which the server refuses. After a break it is made again; lines of the
    time between are lost.
    """

    def __init__(
        self, begin_call: Callable[[], Any], address: Address, may_go_on: Callable[[Exception], bool]
    ) -> None:
        """`begin_call` makes the call. `may_go_on` waits until another one can be made, after an
        error; False if none can."""
        self._address, self._begin_call, self._may_go_on = address, begin_call, may_go_on
        self._is_closed = False
        self._begin()
        try:
            if self._next() is None:
                raise SessionClosedError("the session was closed")
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Begin a call, which ends unless the server accepts it in time."""
        self._call: Any = self._begin_call()
        self._watchdog = handshake.Watchdog(self._call, ACCEPT_SECONDS)

    def take(self) -> list[LogLine] | None:
        return self._next()

    def _next(self) -> list[LogLine] | None:
        while (call := self._call) is not None:
            try:
                message = next(call, None)
            except grpc.RpcError as error:
                broken: Any = error
                refused = (
                    _late() if self._watchdog.is_late else handshake.typed_error(error, self._address, _DOING)
                )
            else:
                return None if message is None else lines_of(message)
            finally:
                self._watchdog.stop()
            # Not in the handler: see `blocking.py`.
            if not (self._is_closed or self._watchdog.is_late) and self._may_go_on(broken):
                del broken
                self._begin()
                if self._is_closed:
                    self.close()
                continue
            del broken
            self.close()
            if is_end(refused):
                return None
            raise refused
        return None

    def close(self) -> None:
        self._is_closed = True
        self._watchdog.stop()
        # The reference is dropped as well: no call may live until the interpreter ends.
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


class AioRemoteLog:
    """The log call to a daemon, which `begin` starts."""

    def __init__(self, shell: AioGrpcShell, begin_call: Callable[[], Any]) -> None:
        self._shell, self._begin_call = shell, begin_call
        self._begin()

    def _begin(self) -> None:
        self._call, self._is_accepted = self._begin_call(), False

    async def begin(self) -> None:
        """Wait for the server's acceptance. Raises the error with which it refuses."""
        if await self.take() is None:
            raise SessionClosedError("the session was closed")

    async def take(self) -> list[LogLine] | None:
        tries = Tries()
        while True:
            link = self._shell.link
            try:
                async with asyncio.timeout(None if self._is_accepted else ACCEPT_SECONDS):
                    message = await self._call.read()
            except TimeoutError:
                self.close()
                raise _late() from None
            except grpc.aio.AioRpcError as error:
                pause = tries.again(link) if self._shell.core.has_lease and is_cut(error) else None
                refused = handshake.typed_error(error, self._shell.address, _DOING)
                if self._shell.core.lost is not None or (pause is None and is_end(refused)):
                    return None
                if pause is None:
                    raise refused from None
            else:
                self._is_accepted = True
                return None if message is grpc.aio.EOF else lines_of(message)
            await asyncio.sleep(pause)
            try:
                await self._shell.await_up(Deadline(None))
            except HeliographError:
                return None
            self._begin()

    def close(self) -> None:
        self._call.cancel()


class Follower(Protocol):
    """The log lines of a session in this process."""

    def take(self) -> tuple[list[LogLine], int]:
        """Return the lines since the last call, and the number of lines dropped before them."""

    def close(self) -> None:
        """End the lines. Idempotent."""


class LocalLog:
    """The log of a session in this process, subscribed once it is made.

    Raises the errors of `follow`.
    """

    def __init__(self, follow: Callable[[Callable[[], None]], Follower]) -> None:
        """`follow` makes a follower that calls back when there are lines to take."""
        self._changed = threading.Condition()
        self._has_news = self._is_over = False
        self._follower = follow(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def take(self) -> list[LogLine] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_news or self._is_over)
            is_last = self._is_over and not self._has_news
            self._has_news = False
        return None if is_last else after_dropped(*self._follower.take())

    def close(self) -> None:
        self._follower.close()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
