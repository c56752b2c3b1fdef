"""Pieces of uploads as they come from gRPC: decoded, checked, written, and the end of an upload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Executor
from typing import TypeVar

from heliograph_proto.codec.bulk import UploadPiece, decode_upload
from heliograph_proto.errors import CancelledError, DeadlineExceededError, LimitExceededError, ProtocolError
from heliograph_proto.sessions import Limits
from heliograph_server.session.staging import HEADER_BYTES
from heliograph_server.weights.uploads import IncomingUpload

#: How long the first message of a call may take. It may be large, and the network slow.
FIRST_SECONDS = 60.0

T = TypeVar("T")


async def first_of(reading: Awaitable[T], seconds: float | None = None) -> T:
    """The first message of a call, which a client that means well sends at once. Raises
    DeadlineExceededError for one that does not come in time; None: FIRST_SECONDS."""
    seconds = FIRST_SECONDS if seconds is None else seconds
    try:
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        raise DeadlineExceededError(
            f"the first message of the call did not come within {seconds:g} s", advice="send it at once"
        ) from None


async def receive(
    limits: Limits,
    upload: IncomingUpload,
    first: UploadPiece,
    requests: AsyncIterator[bytes],
    hashers: Executor | None,
) -> None:
    """Writes all pieces, on a thread of `hashers` where writing one takes a while: the next one is read
    meanwhile. Raises what the upload does, ProtocolError, LimitExceededError."""
    writing: asyncio.Future[None] | None = None
    piece: UploadPiece | None = first
    while piece is not None:
        _check_size(limits, piece)
        if piece is not first and piece.target is not None:
            raise ProtocolError("only the first message of an upload has a target")
        if writing is not None:
            await writing
        writing = _write(hashers, upload, piece) if hashers is not None else None
        if hashers is None:
            upload.write(piece.offset_bytes, piece.data)
        piece = decoded(await anext(requests, None))
    if writing is not None:
        await writing


def _write(hashers: Executor, upload: IncomingUpload, piece: UploadPiece) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    writing = loop.run_in_executor(hashers, upload.write, piece.offset_bytes, piece.data)
    # If the call breaks off before it is awaited, nobody else looks at its error.
    writing.add_done_callback(lambda done: done.cancelled() or done.exception())
    return writing


async def abort(hashers: Executor, upload: IncomingUpload) -> None:
    """Ends an upload before its time, in any case. A piece that is being hashed has the upload's lock, for
    which the event loop must not wait."""
    aborting = hashers.submit(upload.abort, CancelledError("the upload broke off before its end"))
    await asyncio.shield(asyncio.wrap_future(aborting))


def decoded(message: bytes | None) -> UploadPiece | None:
    """A piece; None at the end. Raises ProtocolError."""
    return None if message is None else decode_upload(message)


def _check_size(limits: Limits, piece: UploadPiece) -> None:
    """Raises LimitExceededError. What is beside the piece is bounded too: it lives as long as the piece."""
    if piece.data.nbytes > limits.chunk_bytes or piece.message_bytes > limits.chunk_bytes + HEADER_BYTES:
        raise LimitExceededError(
            f"a piece of {piece.data.nbytes:,} bytes, in a message of {piece.message_bytes:,}; "
            f"this server takes {limits.chunk_bytes:,}",
            advice="send smaller pieces: Limits.chunk_bytes",
        )
