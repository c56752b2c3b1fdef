"""A proxy that records what clients say to a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from fuzzing.conversations import METHODS, SECRET, Conversation, Step
from heliograph_proto.v1 import session_pb2

OPEN = "/heliograph.v1.SessionService/Open"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
#: The most calls that are passed on at once.
CALLS = 64


class Recorder(grpc.GenericRpcHandler):
    """Passes every call on to a daemon, and writes down its messages."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.conversation = Conversation("")
        self._secrets: set[bytes] = set()

    def begin(self, name: str) -> None:
        """Begin another conversation."""
        self.conversation = Conversation(name)

    def service(self, details: Any) -> Any:
        if details.method not in METHODS:
            return None
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._pass(details.method, requests, context)
        )

    def _pass(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        said = self.conversation
        number = len(said.methods)
        said.methods.append(method)

        def recorded() -> Iterator[bytes]:
            for message in requests:
                said.steps.append(Step(number, self._hidden(message)))
                yield message
            said.steps.append(Step(number, None))

        shown = tuple(one for one in context.invocation_metadata() if one[0] == "authorization")
        call = self._channel.stream_stream(method)(recorded(), metadata=shown)
        context.add_callback(call.cancel)
        try:
            for answer in call:
                if method == OPEN:
                    self._secrets.add(session_pb2.OpenResponse.FromString(answer).session)
                yield answer
        except grpc.RpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            context.abort(error.code(), error.details())

    def _hidden(self, message: bytes) -> bytes:
        """The message with the placeholder of the session's secret, which has the same length."""
        for secret in self._secrets:
            message = message.replace(secret, SECRET)
        return message


@contextmanager
def recorder(target: str) -> Iterator[tuple[Recorder, str]]:
    """A recorder before the daemon at `target` (host:port), and the URL to reach it."""
    with grpc.insecure_channel(target, options=OPTIONS) as channel, ThreadPoolExecutor(CALLS) as threads:
        made = Recorder(channel)
        # Heads of pools ping often, as a daemon lets them.
        pings = ("grpc.http2.min_ping_interval_without_data_ms", 20)
        server = grpc.server(threads, handlers=(made,), options=[*OPTIONS, pings])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield made, f"grpc://127.0.0.1:{port}"
        finally:
            server.stop(0).wait(10)
