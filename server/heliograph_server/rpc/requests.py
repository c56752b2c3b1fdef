"""Receives the requests of calls. Every method of every service is registered here.

gRPC passes the messages as they are. The order of checks is: the credentials, the number of calls,
the session, the size, the fields, and only then protobuf decodes. A large request is decoded on a
thread. A call ends with a typed error if a message does not come, or cannot be decoded.

A method with one request that is a stream in the contract takes it in several messages, which
protobuf joins. A request's graph stays encoded: the handler gets it beside the request.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from heliograph_proto.codec.wire import cut_out, leading_bytes
from heliograph_proto.errors import CancelledError, DeadlineExceededError, LimitExceededError, ProtocolError
from heliograph_proto.sessions import Limits
from heliograph_server.auth.refusals import abort, call_is_over
from heliograph_server.resources.principals import current_principal
from heliograph_server.rpc.decoding import MOST_GROWTH, decode, graph_path
from heliograph_server.rpc.errors import forgetting, refusal_of
from heliograph_server.rpc.receiving import first_of, next_of
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.staging import Staging

#: The most bytes of a request that is decoded on the event loop, and of a request without a list of
#: messages or a payload.
SMALL_BYTES = 64 * 1024
#: The memory of a message besides its bytes, and the most messages of one request.
PIECE_BYTES, MOST_PIECES = 4096, 4096
#: The time limit of a whole request in several messages.
REQUEST_SECONDS = 600.0

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
Handler: TypeAlias = Callable[..., Awaitable[Any]]
F = TypeVar("F", bound=Callable[..., Any])


def takes_bytes(handler: F) -> F:
    """Mark a handler whose argument is the iterator of encoded messages, not a decoded request."""
    handler.takes_bytes = True  # type: ignore[attr-defined]
    return handler


def gives_bytes(handler: F) -> F:
    """Mark a handler that writes encoded messages."""
    handler.gives_bytes = True  # type: ignore[attr-defined]
    return handler


class Requests:
    """Takes the requests of a server's calls. Large ones are decoded on the threads of
    `decoders`."""

    def __init__(self, slot: HostSlot, decoders: Executor) -> None:
        self._slot = slot
        self._decoders = decoders
        #: Large requests of one session, or of a tenant without one, are decoded one by one.
        self._turns: WeakKeyDictionary[Staging, asyncio.Lock] = WeakKeyDictionary()

    def serve(
        self,
        server: aio.Server,
        service: ServiceDescriptor,
        *handlers: object,
        is_operators: bool = False,
    ) -> None:
        """Register all methods of a service, each with the first object that has its handler.

        `is_operators`: see `HostSlot.calling`.
        """
        methods = {}
        for method in service.methods:
            handler = next(getattr(one, method.name) for one in handlers if hasattr(one, method.name))
            methods[method.name] = self._method(method, handler, is_operators)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, methods),))

    def _method(
        self, method: MethodDescriptor, handler: Handler, is_operators: bool
    ) -> grpc.RpcMethodHandler[Any, Any]:
        # A stream of requests also where there is one: gRPC then calls the handler before it reads.
        kind = (
            grpc.stream_stream_rpc_method_handler
            if method.server_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        serialize = None if hasattr(handler, "gives_bytes") else _encoded
        answer = handler if hasattr(handler, "takes_bytes") else self._decoding(method, handler)
        return kind(self._counted(answer, method.name, is_operators), None, serialize)

    def _counted(self, answer: Handler, name: str, is_operators: bool) -> Handler:
        """Count a call while it is answered, and report its errors."""

        async def counted(messages: Any, context: Context) -> Any:
            try:
                with self._slot.calling(is_operators=is_operators):
                    return await forgetting(answer(messages, context))
            except aio.InternalError:
                raise call_is_over() from None
            except (asyncio.CancelledError, aio.BaseError):
                # The call or the server has ended: no client waits, and gRPC reports it itself.
                raise
            except Exception as error:
                refusal = refusal_of(error, name)
            self._slot.refused[refusal.reason] += 1
            await abort(context, refusal)

        return counted

    def _decoding(self, method: MethodDescriptor, handler: Handler) -> Handler:
        kind = GetMessageClass(method.input_type)
        path = _session_path(method.input_type)
        has_content = _has_content(method.input_type)
        handle = handler if graph_path(method.input_type) else _without_graph(handler)

        async def answer(_: object, context: Context) -> Any:
            first = await first_of(context.read())
            if first is aio.EOF:
                raise ProtocolError(f"{method.name} takes a request, and none came")
            limits = self._slot.host.limits
            if method.client_streaming:
                most_bytes = limits.graph_bytes
            else:
                most_bytes = limits.message_bytes if has_content else SMALL_BYTES
            if not method.client_streaming and len(first) <= min(SMALL_BYTES, most_bytes):
                return await handle(*_small(kind, first), context)
            if path:
                room = self._slot.session(leading_bytes(first, path)).requests
            else:
                room = self._slot.host.questions(current_principal())
            read = context.read if method.client_streaming else None
            held = _Held(room)
            try:
                parts = await _received(method.name, first, read, held, most_bytes)
                return await handle(*await self._decoded(kind, parts, limits, held), context)
            finally:
                held.give()

        return answer

    async def _decoded(
        self, kind: type[Message], parts: list[bytes], limits: Limits, held: _Held
    ) -> tuple[Message, bytes | None]:
        if len(parts) == 1 and len(parts[0]) <= SMALL_BYTES:
            held.reserve(MOST_GROWTH * len(parts[0]))
            return _small(kind, parts.pop())
        async with self._turns.setdefault(held.room, asyncio.Lock()):
            decoding = self._decoders.submit(decode, parts, kind, limits, held.reserve)
            return await asyncio.wrap_future(decoding)


def _without_graph(handler: Handler) -> Callable[[Any, bytes | None, Context], Awaitable[Any]]:
    """Return the handler of a request that has no graph."""
    return lambda request, _, context: handler(request, context)


def _small(kind: type[Message], data: bytes) -> tuple[Message, bytes | None]:
    """Decode a small request without its graph, and return both."""
    path = graph_path(kind.DESCRIPTOR)
    rest, graph = cut_out(data, path) if path else (data, None)
    return kind.FromString(rest), graph


class _Held:
    """The memory that a request takes of what its session may have. Thread-safe."""

    def __init__(self, room: Staging) -> None:
        self.room = room
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._is_over = False

    def reserve(self, size_bytes: int) -> None:
        """Take more. Raises LimitExceededError, and CancelledError after `give`."""
        with self._lock:
            if self._is_over:
                raise CancelledError("the client has left")
            self.room.reserve(size_bytes)
            self._held_bytes += size_bytes

    def give(self) -> None:
        """Give all of it back, at the end of the call."""
        with self._lock:
            self._is_over = True
            self.room.give(self._held_bytes)


def _encoded(message: Message) -> bytes:
    return message.SerializeToString()


async def _received(
    name: str, first: bytes, read: Callable[[], Awaitable[Any]] | None, held: _Held, most_bytes: int
) -> list[bytes]:
    """Receive the messages of a request; `read` reads those after the first.

    Raises LimitExceededError, DeadlineExceededError.
    """
    parts: list[bytes] = []
    size_bytes = 0
    message: Any = first
    clock = asyncio.get_running_loop().time
    end = clock() + REQUEST_SECONDS
    while message is not None and message is not aio.EOF:
        size_bytes += len(message)
        if size_bytes > most_bytes or len(parts) >= MOST_PIECES:
            raise LimitExceededError(
                f"{name} takes a request of at most {most_bytes:,} bytes, in at most {MOST_PIECES:,} "
                f"messages; this one has {size_bytes:,} or more",
                advice="split the graph, or raise graph_bytes in the server's configuration",
            )
        held.reserve(len(message) + (PIECE_BYTES if parts else 0))
        parts.append(message)
        if clock() > end:
            raise DeadlineExceededError(f"the request did not come within {REQUEST_SECONDS:g} s")
        message = await next_of(read()) if read is not None else None
    return parts


@functools.cache
def _session_path(kind: Descriptor) -> tuple[int, ...]:
    """The numbers of the fields that lead to the session of a request; empty if it names none."""
    if (own := kind.fields_by_name.get("session")) is not None:
        return (own.number,)
    for one in kind.fields:
        if one.message_type is not None and (found := _session_path(one.message_type)):
            return (one.number, *found)
    return ()


def _has_content(kind: Descriptor) -> bool:
    """True if a request has a list of messages, or bytes that are no name."""
    return any(
        (one.is_repeated and one.message_type is not None) or one.name == "payload" for one in kind.fields
    )
