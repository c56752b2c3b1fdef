"""The moves of a session to another daemon, by its user or by a daemon that drains: for both APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from heliograph.core.future import Deadline
from heliograph.procedures.moving import Moving
from heliograph.transport.direct.transfers import NO_LIMIT
from heliograph.transport.following import (
    ASKED_PAUSE_SECONDS,
    ASKED_SECONDS,
    Destination,
    is_there,
    look,
    moves_already,
    settling,
    stays,
    tell_staying,
    trusted,
)
from heliograph_proto import MOVE
from heliograph_proto.errors import DeadlineExceededError, HeliographError
from heliograph_proto.sessions import SessionMove

if TYPE_CHECKING:
    from heliograph.transport.aio_grpc import AioGrpcShell
    from heliograph.transport.blocking_grpc import GrpcShell


def _nothing_to_do(shell: AioGrpcShell | GrpcShell, there: Destination) -> SessionMove | None:
    """Return the move of a session that is there already; None: it goes. Raises UnsupportedError."""
    if MOVE not in shell.info.features or not shell.core.has_lease:
        raise stays()
    return SessionMove(shell.core.last_sent, 0, 0, 0.0) if is_there(there, shell.address) else None


async def aio_move(
    shell: AioGrpcShell, there: Destination, wait_seconds: float | None, deadline: Deadline
) -> SessionMove:
    """Move a session. Raises the errors of `Session.move`."""
    if (found := _nothing_to_do(shell, there)) is not None:
        return found
    if shell.moves:
        raise moves_already()
    shell.moves, shell.destination = True, there
    look_there = partial(look, there, shell.channel_options)
    moving = Moving(shell.core, there.url, look_there, wait_seconds)
    try:
        await shell.drive(moving.look(), deadline.remaining(), deadline.what)
        await shell.drive(moving.prepare(), deadline.remaining(), deadline.what)
        await shell.drive(moving.settle(), deadline.least(moving.wait_seconds), settling)
        return await shell.drive(moving.hand_over(), deadline.remaining(), deadline.what)
    finally:
        shell.advance(moving.end)
        shell.moves = False


async def aio_move_when_asked(shell: AioGrpcShell, url: str) -> None:
    """The server drains, and names another daemon: move there, again and again while commands under
    way take too long."""
    try:
        there = trusted(url, shell.address, shell.credentials)
        while True:
            try:
                await aio_move(shell, there, ASKED_SECONDS, NO_LIMIT)
                return
            except DeadlineExceededError:
                await asyncio.sleep(ASKED_PAUSE_SECONDS)
    except HeliographError as error:
        if shell.core.lost is None:
            tell_staying(url, error)


def move(shell: GrpcShell, there: Destination, wait_seconds: float | None, deadline: Deadline) -> SessionMove:
    """Move a session. Raises the errors of `Session.move`."""
    if (found := _nothing_to_do(shell, there)) is not None:
        return found
    if not shell.moves.acquire(blocking=False):
        raise moves_already()
    shell.destination = there
    look_there = partial(look, there, shell.channel_options)
    moving = Moving(shell.core, there.url, look_there, wait_seconds)
    try:
        shell.drive(moving.look(), deadline.remaining(), deadline.what)
        shell.drive(moving.prepare(), deadline.remaining(), deadline.what)
        shell.drive(moving.settle(), deadline.least(moving.wait_seconds), settling)
        return shell.drive(moving.hand_over(), deadline.remaining(), deadline.what)
    finally:
        shell.advance(moving.end)
        shell.moves.release()


def move_when_asked(shell: GrpcShell, url: str, pause: Callable[[float], bool]) -> None:
    """As `aio_move_when_asked`. `pause` waits, and returns True once the session is closed."""
    try:
        there = trusted(url, shell.address, shell.credentials)
        while True:
            try:
                move(shell, there, ASKED_SECONDS, Deadline(None))
                return
            except DeadlineExceededError:
                if pause(ASKED_PAUSE_SECONDS):
                    return
    except HeliographError as error:
        if shell.core.lost is None:
            tell_staying(url, error)
