"""The parts of both shells that have their session survive a broken connection."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc

from heliograph.core.connection_state import Reconnecting
from heliograph.core.effects import Call, StartUpload
from heliograph.core.future import logger
from heliograph.core.methods import FIND_MISSING, FIND_TRANSFER, FindMissing
from heliograph.core.replay.journal import CommandJournal
from heliograph.transport import handshake
from heliograph.transport.direct.transfers import BrokenOffError
from heliograph_proto.addresses import Address
from heliograph_proto.errors import (
    HeliographError,
    InternalError,
    InvalidArgumentError,
    MovedError,
    UnavailableError,
    UnsupportedError,
)
from heliograph_proto.sessions import LONGEST_LEASE_SECONDS, SessionInfo

#: The type of the argument `reconnect`.
ReconnectArgument = bool | float

#: The type of the argument `durable`.
DurableArgument = bool | float
#: The reason why a durable session shares no memory.
DURABLE = "the session is durable, and what is in shared memory is lost with the daemon"
#: The bounds of the time between snapshots.
LEAST_SNAPSHOT_SECONDS, MOST_SNAPSHOT_SECONDS = 0.1, 86_400.0
#: The most bytes of commands that a durable session keeps. The server takes a snapshot before.
JOURNAL_BYTES = 256 * 2**20

#: The time for the server's answer to an attach.
ATTACH_SECONDS = 10.0
#: The longest pause between two attempts of a head, whose runs wait meanwhile.
HEAD_PAUSE_SECONDS = 0.5
#: The time after the end of a command socket in which the call may say why.
WHY_SECONDS = 0.25
#: The same for a head, which finds the reason by its next attempt, too.
HEAD_WHY_SECONDS = 0.05
#: The most attempts of a call or transfer on connections of which none breaks with it.
MOST_TRIES = 8
#: The first pause between two of them, which doubles, and the longest.
TRY_SECONDS, LONGEST_TRY_SECONDS = 0.05, 1.0
#: The time for the goodbye of a session without a connection.
GOODBYE_SECONDS = 0.5
#: The pauses between its tries. A connection may have broken unnoticed.
GOODBYE_PAUSES = (0.0, 0.02, 0.1)
#: How often a transfer that waits for a connection looks whether it was cancelled.
LOOK_SECONDS = 0.1

#: The codes of a status that gRPC makes when a connection breaks.
_CUT_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


def checked_reconnect(argument: ReconnectArgument) -> int:
    """Return the lease to wish for, in milliseconds. Raises InvalidArgumentError."""
    if isinstance(argument, bool):
        return round(LONGEST_LEASE_SECONDS * 1e3) if argument else 0
    if not isinstance(argument, int | float) or not 0 <= argument <= LONGEST_LEASE_SECONDS:
        raise InvalidArgumentError(
            f"reconnect={argument!r:.40}",
            advice=f"True, False, or the seconds for which to try: 0 to {LONGEST_LEASE_SECONDS:g}",
        )
    return round(argument * 1e3)


def checked_wish(reconnect: ReconnectArgument, durable: DurableArgument) -> handshake.Wish:
    """Return what the arguments of `connect` wish for. Raises InvalidArgumentError."""
    lease_ms = checked_reconnect(reconnect)
    if durable is False:
        return handshake.Wish(lease_ms)
    if durable is not True and not (
        isinstance(durable, int | float) and LEAST_SNAPSHOT_SECONDS <= durable <= MOST_SNAPSHOT_SECONDS
    ):
        raise InvalidArgumentError(
            f"durable={durable!r:.40}",
            advice="True, False, or the seconds between snapshots: "
            f"{LEAST_SNAPSHOT_SECONDS:g} to {MOST_SNAPSHOT_SECONDS:g}",
        )
    if not lease_ms:
        raise InvalidArgumentError(
            "a durable session connects again after a restart of its daemon",
            advice="leave reconnect as it is",
        )
    return handshake.Wish(lease_ms, True, 0 if durable is True else round(durable * 1e3))


def ends_with_process() -> UnsupportedError:
    """Return the error of a durable session without a daemon."""
    return UnsupportedError(
        "a session within this process ends with it", advice="connect to a daemon: heliograph serve"
    )


def check_granted(address: Address, wish: handshake.Wish, info: SessionInfo) -> None:
    """Raise UnsupportedError for a session that is not durable, though that was wished for."""
    if wish.is_durable and not (info.durable and info.lease_ms):
        raise UnsupportedError(
            f"{address} keeps no state of sessions over a restart",
            advice="start it with a folder for it: heliograph serve --state DIR",
        )


def journal_of(info: SessionInfo) -> CommandJournal | None:
    """Return what keeps the commands of a durable session; None for others."""
    return CommandJournal(JOURNAL_BYTES) if info.durable else None


def reconnecting_of(info: SessionInfo) -> Reconnecting:
    """Return what decides about the connection of a session."""
    made = Reconnecting(info.lease_seconds, random.random)
    made.is_durable = info.durable
    return made


def is_cut(error: BaseException) -> bool:
    """True if an error may only say that a connection broke, or that the session is elsewhere."""
    if isinstance(error, grpc.RpcError):
        code: Any = getattr(error, "code", lambda: None)()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return handshake.is_moved(error)
        return code in _CUT_CODES and not handshake.is_typed(error)
    if isinstance(error, ValueError):
        # By gRPC, for a channel that was closed.
        return "closed" in str(error).lower()
    return isinstance(error, UnavailableError | MovedError | BrokenOffError | grpc.aio.UsageError)


def has_died(address: Address, info: SessionInfo, is_near: bool) -> bool:
    """True if a daemon that is known to be on this host does not listen any more."""
    is_own = address.scheme == "unix" or (info.direct is not None and address.port in info.direct.own_ports)
    return is_near and is_own and handshake.why_unreachable(address)[0] in handshake.NO_LISTENER


def reader_defect(defect: Exception) -> InternalError:
    """Log what ended the reader of a session, and return the error with which the session ends."""
    # The text alone: a stored record would keep the traceback, and with it the session.
    logger.error("the reader of a session failed: %s: %s", type(defect).__name__, defect)
    logger.debug("the traceback of that failure", exc_info=defect)
    return InternalError(f"the connection cannot be kept: {type(defect).__name__}: {defect}")


def tell_break(
    error: HeliographError, seconds: float, callbacks: Iterable[Callable[[HeliographError], object]]
) -> None:
    """Log that a connection broke, and call the functions of `on_disconnect`."""
    logger.warning("%s; reconnecting for up to %.0f s", error.message, seconds)
    for callback in list(callbacks):
        try:
            callback(error)
        except Exception:
            logger.exception("a function of on_disconnect raised")


def attach_seconds(reconnecting: Reconnecting) -> float:
    """Return the time for one attempt to attach."""
    left = reconnecting.left(time.monotonic())
    return min(ATTACH_SECONDS, max(left, WHY_SECONDS))


def tell_attached(address: Address, seconds: float, again: int, *, has_restarted: bool = False) -> None:
    """Log that the session has a connection again."""
    words = "connected to %s again after %.1f s; %d commands are sent again"
    if has_restarted:
        words = "%s was restarted, and the session goes on after %.1f s; %d commands are done again"
    logger.warning(words, address, seconds, again)


class Tries:
    """Counts the attempts of a call or transfer whose connection breaks, on one link each."""

    def __init__(self) -> None:
        self._link, self._count = -1, 0

    def again(self, link: int) -> float | None:
        """Return the pause before another attempt on a link; None: no more."""
        if link != self._link:
            self._link, self._count = link, 0
            return 0.0
        self._count += 1
        if self._count > MOST_TRIES:
            return None
        return min(TRY_SECONDS * 2.0 ** (self._count - 1), LONGEST_TRY_SECONDS)


class Uncounted:
    """A progress function that is not told twice of bytes that are sent again."""

    def __init__(self, progress: Callable[[int], None], start_bytes: int) -> None:
        self._progress = progress
        self._told_bytes = self._at_bytes = start_bytes

    def go_on(self, offset_bytes: int) -> None:
        """Record from where bytes are sent."""
        self._at_bytes = offset_bytes

    def __call__(self, count: int) -> None:
        self._at_bytes += count
        if (news := self._at_bytes - self._told_bytes) > 0:
            self._told_bytes = self._at_bytes
            self._progress(news)


def kept(upload: StartUpload) -> StartUpload:
    """Return an upload whose progress counts each byte once, however often it is sent."""
    if upload.progress is None:
        return upload
    return replace(upload, progress=Uncounted(upload.progress, upload.offset_bytes))


def question(upload: StartUpload) -> Call:
    """Return the call that asks how much of an upload the server has."""
    if isinstance(upload.target, int):
        return Call(FIND_TRANSFER, (upload.target, upload.attempt + 1))
    return Call(FIND_MISSING, FindMissing((upload.target,)))


def rest_of(upload: StartUpload, answer: Any) -> StartUpload | None:
    """Return the rest of an upload, by the answer to its `question`; None: the server has all."""
    if isinstance(upload.target, int):
        offset_bytes = answer
        if upload.data.nbytes and offset_bytes == upload.data.nbytes:
            return None
    elif not answer:
        return None
    else:
        offset_bytes = answer[0][1]
    if isinstance(upload.progress, Uncounted):
        upload.progress.go_on(offset_bytes)
    offset_bytes = min(offset_bytes, upload.data.nbytes)
    return replace(upload, offset_bytes=offset_bytes, attempt=upload.attempt + 1)
