"""Hands a session to another daemon: PeerService.TakeSession, from the side that has it. Blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc

from heliograph.transport.channels import open_channel
from heliograph_proto.addresses import Shown
from heliograph_proto.codec import encode
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import (
    DeadlineExceededError,
    HeliographError,
    InternalError,
    MissingContentError,
    PermissionDeniedError,
    SnapshotFailedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import peer_pb2, session_pb2
from heliograph_server.links import links
from heliograph_server.resources.failures import typed
from heliograph_server.runtime.moves import Handing

TAKE = f"/{links.SERVICE}/TakeSession"
#: The size of the pieces of an image and of contents.
PIECE_BYTES = 2**20
#: The longest time that a session is on its way.
MOST_SECONDS = 3600.0
#: The same of a copy that goes ahead, without which the session moves, too.
MOST_AHEAD_SECONDS = 600.0

Read = Callable[[bytes], Iterator[memoryview]]


def hand_over(shown: Shown, address: str, image: bytes, read: Read, limits: Limits, how: Handing) -> None:
    """Give a session, or a copy of it, to the daemon at an address, which has it afterwards.

    `image`: the file of its image. `read` reads a content. Raises the errors of
    SessionService.Move; the other daemon then has nothing, or forgets it after the lease.
    """
    channel = open_channel(links.address_of(address), links.channel_options(), shown(address))
    wanted: SimpleQueue[bytes] = SimpleQueue()
    failures: list[HeliographError] = []
    call: Any = None
    try:
        method: Any = channel.stream_stream(
            TAKE,
            request_serializer=peer_pb2.TakeSessionRequest.SerializeToString,
            response_deserializer=peer_pb2.TakeSessionResponse.FromString,
        )
        first = peer_pb2.TakeSessionRequest(
            limits=encode(limits, session_pb2.Limits),
            durable=how.is_durable,
            is_ahead=how.is_ahead,
            ahead=how.ahead,
        )
        call = method(
            _requests(first, image, wanted, read, failures),
            timeout=MOST_AHEAD_SECONDS if how.is_ahead else MOST_SECONDS,
        )
        for answer in call:
            if answer.taken:
                return
            wanted.put(answer.wanted)
        raise SnapshotFailedError(f"{address} did not take the session, and did not say why")
    except grpc.RpcError as error:
        error.__traceback__ = None
        raise (failures[0] if failures else _error_of(error, address)) from None
    finally:
        wanted.put(b"")
        if call is not None:
            call.cancel()
        channel.close()


def _requests(
    first: peer_pb2.TakeSessionRequest,
    image: bytes,
    wanted: SimpleQueue[bytes],
    read: Read,
    failures: list[HeliographError],
) -> Iterator[peer_pb2.TakeSessionRequest]:
    """Yield the image, and each content that is asked for. On a thread of gRPC's."""
    try:
        yield first
        yield from _pieces(iter((memoryview(image),)))
        while digest := wanted.get():
            yield from _pieces(_unless_changed(read(digest)) if first.is_ahead else read(digest))
    except Exception as error:
        failures.append(typed(error, "reading a session that moves"))
        raise


def _unless_changed(parts: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield the parts of a content, and no more once it has changed: its digest tells."""
    with suppress(MissingContentError):
        yield from parts


def _pieces(parts: Iterator[memoryview]) -> Iterator[peer_pb2.TakeSessionRequest]:
    for part in parts:
        for start in range(0, part.nbytes, PIECE_BYTES):
            yield peer_pb2.TakeSessionRequest(data=bytes(part[start : start + PIECE_BYTES]))
    yield peer_pb2.TakeSessionRequest(is_last=True)


def _error_of(error: Any, address: str) -> HeliographError:
    """Return the error of a failed call: the other daemon's own if it sent one."""
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    found = error_from_metadata(tuple((key, value) for key, value in trailing or ()))
    details = " ".join((error.details() or error.code().name).split())
    if isinstance(found, UnauthenticatedError | PermissionDeniedError) or error.code() in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    ):
        return PermissionDeniedError(
            f"{address} takes no sessions of this daemon: {details}",
            advice="give this daemon a token with the right 'pool' there: --pool-token FILE",
        )
    if found is not None:
        message = f"{address} cannot take the session: {found.message}"
        return type(found)(message, advice=found.advice, retry_after_seconds=found.retry_after_seconds)
    match error.code():
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnsupportedError(f"{address} takes no sessions", advice="upgrade that daemon")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(f"{address} did not take the session in time")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED | grpc.StatusCode.UNKNOWN:
            return UnavailableError(
                f"{address} cannot be reached, or ended meanwhile: {details}",
                advice="is that daemon running? can this daemon's host reach it?",
            )
    return InternalError(f"{address} did not take the session: {error.code().name}: {details}")
