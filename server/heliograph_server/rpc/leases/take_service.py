"""PeerService.TakeSession: takes a session that another daemon gives away.

The session is restored on a thread, which asks the event loop for one message at a time: so no more
of a session is in memory than one piece, besides what is in its place already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError
from grpc import aio

from heliograph_proto.codec import decode
from heliograph_proto.digests import DIGEST_BYTES, hasher
from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    LimitExceededError,
    MissingContentError,
    ProtocolError,
    SnapshotFailedError,
)
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import peer_pb2
from heliograph_server.resources.failures import typed
from heliograph_server.rpc.receiving import first_of, next_of
from heliograph_server.rpc.requests import Context, gives_bytes, takes_bytes
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.runtime.moves import Handing
from heliograph_server.session.session import Session
from heliograph_server.state.image import decode_image

#: The largest piece, with what surrounds it.
MOST_PIECE_BYTES = 2**20 + 1024
#: The largest image that is taken, far above any within the limits of a session.
MOST_IMAGE_BYTES = 256 * 2**20
#: The most sessions that come at once.
MOST_COMING = 8

_Ask: TypeAlias = "bytes | HeliographError | None"


class TakeService:
    """Takes sessions of other daemons, restored on the threads of `takers`."""

    def __init__(self, slot: HostSlot, takers: Executor) -> None:
        self._slot, self._takers = slot, takers
        self._coming = 0

    @takes_bytes
    @gives_bytes
    async def TakeSession(self, _requests: object, context: Context) -> None:
        if self._coming >= MOST_COMING:
            raise LimitExceededError(
                f"{MOST_COMING} sessions are coming already, which is the most",
                advice="try again in a moment",
            )
        self._coming += 1
        try:
            await self._take(context)
        finally:
            self._coming -= 1

    async def _take(self, context: Context) -> None:
        begin = _decoded(await first_of(context.read()))
        image = bytearray()
        while not (piece := _piece(await next_of(context.read()))).is_last:
            image += piece.data
            if len(image) > MOST_IMAGE_BYTES:
                raise LimitExceededError(f"an image of more than {MOST_IMAGE_BYTES:,} bytes")
        contents, limits = _Contents(is_ahead=begin.is_ahead), decode(begin.limits, Limits)
        how = Handing(begin.durable, begin.is_ahead, begin.ahead)
        restoring = self._takers.submit(_restore, self._slot.host, bytes(image), limits, contents, how)
        del image
        try:
            await self._serve(contents, context)
        except BaseException:
            # The other daemon has not heard of it, and keeps the session.
            restoring.add_done_callback(_drop)
            raise
        finally:
            # Its thread ends, whatever it waits for.
            contents.end(CancelledError("the other daemon broke off"))
        # If this fails, the other daemon may know all the same: the session stays for its lease.
        await context.write(peer_pb2.TakeSessionResponse(taken=True).SerializeToString())

    async def _serve(self, contents: _Contents, context: Context) -> None:
        """Give the thread what it asks for, until it has the session."""
        while (asked := await contents.asked.get()) is not None:
            if isinstance(asked, HeliographError):
                raise asked
            if asked:
                await context.write(peer_pb2.TakeSessionResponse(wanted=asked).SerializeToString())
            contents.given.put(_piece(await next_of(context.read())))


def _restore(host: Host, data: bytes, limits: Limits, contents: _Contents, how: Handing) -> Session | None:
    """Restore a session, and tell the event loop. On a thread."""
    try:
        image = decode_image(data, "of another daemon")
        session = host.moves.receive(image, limits, contents, how)
    except Exception as error:
        contents.ask(typed(error, "taking a session"))
        return None
    contents.ask(None)
    return session


def _drop(restoring: Future[Session | None]) -> None:
    if (session := restoring.result()) is not None:
        session.end(CancelledError("the daemon that gave the session away broke off, and keeps it"))


class _Contents:
    """The contents of a session that comes, one piece after the other. Created on the loop."""

    def __init__(self, *, is_ahead: bool) -> None:
        """`is_ahead`: contents may have changed where they are, which costs their tensors alone."""
        self._loop = asyncio.get_running_loop()
        self._is_ahead = is_ahead
        #: The needs of the thread: a digest, or empty for the next piece; and None once it has the
        #: session.
        self.asked: asyncio.Queue[_Ask] = asyncio.Queue()
        self.given: SimpleQueue[peer_pb2.TakeSessionRequest | HeliographError] = SimpleQueue()

    def end(self, error: HeliographError) -> None:
        """Let the thread wait no more."""
        self.given.put(error)

    def ask(self, what: _Ask) -> None:
        """Tell the loop. From the thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.asked.put_nowait, what)

    def read(self, digest: bytes) -> Iterator[memoryview]:
        """As `ContentSource.read`."""
        taken, wanted = hasher(), digest
        if len(digest) != DIGEST_BYTES:
            raise SnapshotFailedError("the image of another daemon names a content by no digest")
        while True:
            self.ask(wanted)
            wanted = b""
            given = self.given.get()
            if isinstance(given, HeliographError):
                # Another read finds it too.
                self.given.put(given)
                raise given
            if given.is_last:
                break
            taken.update(given.data)
            yield memoryview(given.data)
        if taken.digest() != digest:
            if self._is_ahead:
                raise MissingContentError("a tensor changed while its session was copied")
            raise SnapshotFailedError("the bytes of a content changed on their way from another daemon")

    def read_all(self, digests: Sequence[bytes]) -> Iterator[memoryview]:
        """As `ContentSource.read_all`."""
        for digest in digests:
            yield from self.read(digest)

    def whole(self, digest: bytes) -> bytes:
        """As `ContentSource.whole`."""
        found = bytearray()
        for piece in self.read(digest):
            found += piece
            if len(found) > MOST_IMAGE_BYTES:
                raise LimitExceededError(f"a request of more than {MOST_IMAGE_BYTES:,} bytes")
        return bytes(found)


def _piece(data: Any) -> peer_pb2.TakeSessionRequest:
    """Decode a piece. Raises ProtocolError for an empty one that is not the last."""
    found = _decoded(data)
    if not (found.data or found.is_last):
        raise ProtocolError("a piece of a session has no bytes", advice="only the last piece may be empty")
    return found


def _decoded(data: Any) -> peer_pb2.TakeSessionRequest:
    if data is aio.EOF:
        raise CancelledError("the other daemon broke off")
    if len(data) > MOST_PIECE_BYTES:
        raise LimitExceededError(f"a piece of {len(data):,} bytes; {MOST_PIECE_BYTES:,} are the most")
    try:
        return peer_pb2.TakeSessionRequest.FromString(data)
    except DecodeError:
        raise ProtocolError("a message could not be decoded") from None
