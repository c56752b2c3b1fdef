"""The lines that a server's log has of a session, as they come to the blocking API."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from heliograph.transport import handshake
from heliograph_proto.addresses import Address
from heliograph_proto.codec import decode_all
from heliograph_proto.errors import CancelledError, HeliographError, SessionClosedError
from heliograph_proto.sessions import LogLine, SessionInfo, after_dropped, check_level
from heliograph_proto.v1 import session_pb2

FOLLOW_LOG = "/heliograph.v1.SessionService/FollowLog"


class LogSource(Protocol):
    """Where lines come from."""

    def take(self) -> list[LogLine] | None:
        """Waits for more; None at the end, after `close` for one."""

    def close(self) -> None:
        """Has `take` end soon. Idempotent; neither blocks nor raises."""


def follow_request(info: SessionInfo, level: str) -> bytes:
    """Raises InvalidArgumentError."""
    check_level(level)
    return session_pb2.FollowLogRequest(session=info.session, level=level).SerializeToString()


def lines_of(message: bytes) -> list[LogLine]:
    """What a response has."""
    found = session_pb2.FollowLogResponse.FromString(message)
    return after_dropped(decode_all(found.lines, LogLine), found.dropped)


def is_end(error: HeliographError) -> bool:
    """Whether it says no more than that the session is over, or nobody listens."""
    return isinstance(error, CancelledError | SessionClosedError)


class RemoteLog:
    """The call to a daemon. Subscribed once it is made. Raises what the server refuses it with."""

    def __init__(self, channel: grpc.Channel, address: Address, info: SessionInfo, level: str) -> None:
        method: Any = channel.unary_stream(FOLLOW_LOG, None, None)
        self._address = address
        self._call: Any = method(follow_request(info, level))
        try:
            if self._next() is None:
                raise SessionClosedError("the session was closed")
        except BaseException:
            self.close()
            raise

    def take(self) -> list[LogLine] | None:
        return self._next()

    def _next(self) -> list[LogLine] | None:
        if (call := self._call) is None:
            return None
        try:
            message = next(call, None)
        except grpc.RpcError as error:
            refused = handshake.typed_error(error, self._address, "tell what it logs")
        else:
            return None if message is None else lines_of(message)
        # Not in the handler: see `_blocking`.
        self.close()
        if is_end(refused):
            return None
        raise refused

    def close(self) -> None:
        # Dropped, too: no call may live until the interpreter ends.
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


class Follower(Protocol):
    """What is logged of a session of this process."""

    def take(self) -> tuple[list[LogLine], int]:
        """The lines since the last call, and how many before them were dropped."""

    def close(self) -> None:
        """Nothing more comes. Idempotent."""


class LocalLog:
    """Of a session in this process. Subscribed once it is made. Raises what `follow` does."""

    def __init__(self, follow: Callable[[Callable[[], None]], Follower]) -> None:
        """`follow` makes a follower that calls back when there is something to take."""
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
