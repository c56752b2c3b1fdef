"""Receives messages from gRPC in bounded time. Decodes, checks and writes the pieces of uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection
from concurrent.futures import Executor, Future
from typing import TypeVar

from heliograph_proto.codec.bulk import UploadPiece, decode_upload
from heliograph_proto.codec.packing import Encoding, check_piece, unpack
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_proto.sessions import Limits
from heliograph_server.session.staging import HEADER_BYTES
from heliograph_server.weights.uploads import IncomingUpload

#: The time limit of a call's first message, and of each further one that the contract demands. They
#: may be large, and the network slow.
FIRST_SECONDS = NEXT_SECONDS = 60.0

T = TypeVar("T")
Upload = TypeVar("Upload", bound=IncomingUpload)


async def first_of(reading: Awaitable[T], seconds: float | None = None) -> T:
    """Return the first message of a call, which clients send at once.

    `seconds` defaults to FIRST_SECONDS. Raises DeadlineExceededError after that time, and
    ProtocolError for a compressed message.
    """
    found = await _in_time(reading, FIRST_SECONDS if seconds is None else seconds, "first")
    if isinstance(found, bytes):
        _check_plain(found)
    return found


async def next_of(reading: Awaitable[T]) -> T:
    """Return the next message of a call whose client owes one. Raises DeadlineExceededError after
    NEXT_SECONDS."""
    return await _in_time(reading, NEXT_SECONDS, "next")


async def _in_time(reading: Awaitable[T], seconds: float, which: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        raise DeadlineExceededError(
            f"the {which} message of the call did not come within {seconds:g} s",
            advice="send it at once, or end the call",
        ) from None


def _check_plain(message: bytes) -> None:
    """Raise ProtocolError for a compressed message, which gRPC passes as it came.

    No message of the contract begins like one of gzip (RFC 1952) or zlib (RFC 1950).
    """
    is_gzip = message[:2] == b"\x1f\x8b"
    is_zlib = message[:1] == b"\x78" and int.from_bytes(message[:2], "big") % 31 == 0
    if is_gzip or is_zlib:
        raise ProtocolError("a message is compressed; this server takes none", advice="send it as it is")


async def next_piece(requests: AsyncIterator[T], limits: Limits) -> T | None:
    """Return the next message of an upload; None at its end.

    Raises DeadlineExceededError if none comes for `Limits.upload_idle_ms`.
    """
    seconds = limits.upload_idle_ms / 1e3
    try:
        async with asyncio.timeout(seconds):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceededError(
            f"no bytes of the upload came for {seconds:g} s", advice="upload it again, without such a pause"
        ) from None


async def receive(
    limits: Limits,
    upload: IncomingUpload,
    first: UploadPiece,
    requests: AsyncIterator[bytes],
    threads: Executor,
    encodings: Collection[Encoding] = (),
) -> None:
    """Write all pieces of an upload, which may be packed in these encodings.

    A piece of a content, or one that is packed, is written on a thread while the next one is read.
    Raises the errors of the upload, ProtocolError, LimitExceededError.
    """
    writing: asyncio.Future[None] | None = None
    piece: UploadPiece | None = first
    while piece is not None:
        # The whole message is limited, since it lives as long as its piece.
        if piece.data.nbytes > limits.chunk_bytes or piece.message_bytes > limits.chunk_bytes + HEADER_BYTES:
            raise LimitExceededError(
                f"a piece of {piece.data.nbytes:,} bytes, in a message of {piece.message_bytes:,}; "
                f"this server takes {limits.chunk_bytes:,}",
                advice="send smaller pieces: Limits.chunk_bytes",
            )
        if piece.encoding:
            check_piece(piece.encoding, piece.plain_bytes, piece.data.nbytes, limits.chunk_bytes, encodings)
        if piece is not first and piece.target is not None:
            raise ProtocolError("only the first message of an upload has a target")
        upload.came()
        if writing is not None:
            await writing
        if upload.is_content or piece.encoding:
            writing = _write(threads, upload, piece)
        else:
            writing = None
            upload.write(piece.offset_bytes, piece.data)
        piece = decoded(await next_piece(requests, limits))
    if writing is not None:
        await writing


def _write(threads: Executor, upload: IncomingUpload, piece: UploadPiece) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    writing = loop.run_in_executor(threads, _unpack_and_write, upload, piece)
    # The error counts as retrieved even if the call breaks off before the future is awaited.
    writing.add_done_callback(lambda done: done.cancelled() or done.exception())
    return writing


def _unpack_and_write(upload: IncomingUpload, piece: UploadPiece) -> None:
    data = piece.data
    if piece.encoding:
        try:
            data = memoryview(unpack(piece.encoding, data, piece.plain_bytes))
        except ProtocolError as error:
            upload.abort(error)
            raise
    upload.write(piece.offset_bytes, data)


async def begun(beginning: Future[Upload]) -> Upload:
    """Wait until an upload has begun. It is aborted if the client leaves meanwhile."""
    try:
        return await asyncio.wrap_future(beginning)
    except asyncio.CancelledError:
        beginning.add_done_callback(_abandon)
        raise


def _abandon(beginning: Future[Upload]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().abort(_broke_off())


async def abort(hashers: Executor, upload: IncomingUpload, error: BaseException | None = None) -> None:
    """Abort an upload, even if the caller is cancelled. One whose client is gone may go on later.

    On a thread, since a piece that is being hashed holds the upload's lock.
    """
    has_left = not isinstance(error, HeliographError) or upload.is_paused
    aborting = hashers.submit(upload.break_off if has_left else upload.abort, _broke_off())
    await asyncio.shield(asyncio.wrap_future(aborting))


def _broke_off() -> CancelledError:
    return CancelledError("the upload broke off before its end")


def decoded(message: bytes | None) -> UploadPiece | None:
    """Decode a piece; None at the end. Raises ProtocolError."""
    return None if message is None else decode_upload(message)
