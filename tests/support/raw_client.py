"""A client without manners: the contract's messages over blocking gRPC, with nothing checked."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from plan_options import divided_fields

import heliograph as hg
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.codec.wire import split
from heliograph_proto.errors import HeliographError
from heliograph_proto.v1 import (
    bulk_pb2_grpc,
    command_pb2,
    graph_pb2,
    plan_pb2,
    session_pb2,
    session_pb2_grpc,
    tensor_pb2,
)

SECONDS = 60.0
F32 = tensor_pb2.DATA_TYPE_F32


def methods_of(channel: Any, service: str) -> Any:
    """The methods of a service with one answer, each with one message as its request, also where
    the contract lets it come in several."""
    descriptor = descriptor_pool.Default().FindServiceByName(f"heliograph.v1.{service}")
    return SimpleNamespace(
        **{
            one.name: channel.unary_unary(
                f"/{descriptor.full_name}/{one.name}",
                request_serializer=GetMessageClass(one.input_type).SerializeToString,
                response_deserializer=GetMessageClass(one.output_type).FromString,
            )
            for one in descriptor.methods
            if not one.server_streaming
        }
    )


class RawSession:
    """A session and its command stream."""

    def __init__(self, channel: grpc.Channel, client: str = "raw") -> None:
        self.channel = channel
        self.plans = methods_of(channel, "PlanService")
        self.bulk = bulk_pb2_grpc.BulkServiceStub(channel)
        opened = session_pb2_grpc.SessionServiceStub(channel).Open(
            session_pb2.OpenRequest(version_min=1, version_max=1, client=client), timeout=SECONDS
        )
        self.token, self.limits, self.incarnation = opened.session, opened.limits, opened.incarnation
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: Any = None
        self.sequence = 0

    def attach(self, first: bytes = b"", *, command_socket: bool = False) -> RawSession:
        """Open the command stream, by a message that names the session."""
        named = command_pb2.CommandBatch(session=self.token, command_socket=command_socket)
        self.send_bytes(first or named.SerializeToString())
        execute: Any = self.channel.stream_stream(
            "/heliograph.v1.CommandService/Execute", None, command_pb2.CompletionBatch.FromString
        )
        self._answers = execute(iter(self._outgoing.get, None), timeout=SECONDS)
        return self

    def send(self, **kind: Any) -> int:
        """Sends one command that asks for its completion; its sequence number."""
        self.sequence += 1
        stream = kind.pop("stream", 0)
        command = command_pb2.Command(sequence=self.sequence, notify=True, stream=stream, **kind)
        self.send_bytes(command_pb2.CommandBatch(commands=[command]).SerializeToString())
        return self.sequence

    def send_bytes(self, message: bytes) -> None:
        """Sends what may be a batch."""
        self._outgoing.put(message)

    def end(self) -> HeliographError:
        """The typed error with which the server ends the stream."""
        try:
            for _ in self._answers:
                pass
        except grpc.RpcError as refusal:
            error = error_from_metadata(tuple(refusal.trailing_metadata() or ()))
            assert error is not None, refusal
            return error
        raise AssertionError("the stream ended without an error")

    def answer(self, sequence: int) -> command_pb2.Completion:
        """The completion of a command; others are dropped."""
        for batch in self._answers:
            for one in batch.completions:
                if one.sequence == sequence:
                    return one
        raise AssertionError(f"the stream ended before command {sequence} was answered")

    def failure(self, **kind: Any) -> HeliographError:
        """The typed error of a command that must fail."""
        completion = self.answer(self.send(**kind))
        assert completion.HasField("error"), f"{kind} succeeded"
        return decode_error(completion.error)

    def allocate(self, tensor: int, *shape: int) -> int:
        return self.send(allocate=command_pb2.Allocate(tensor=tensor, type=f32(*shape)))

    def compile(self, graph: graph_pb2.Graph, plan: int = 1, **options: Any) -> plan_pb2.CompileResponse:
        """Raises the typed error of a refusal. `options`: fields of the request, and of its options."""
        request = plan_pb2.CompileRequest(
            session=self.token, plan=plan, graph=graph, **divided_fields(options)
        )
        kind: Any = request.DESCRIPTOR
        pieces = split(request.SerializeToString(), kind, 2**20)
        call = self.channel.stream_unary(
            "/heliograph.v1.PlanService/Compile", None, plan_pb2.CompileResponse.FromString
        )
        try:
            answer: plan_pb2.CompileResponse = call(iter(pieces), timeout=SECONDS)
            return answer
        except grpc.RpcError as refusal:
            error = error_from_metadata(tuple(refusal.trailing_metadata() or ()))
            raise error or refusal from None

    def close(self) -> None:
        self._outgoing.put(None)
        if self._answers is not None:
            self._answers.cancel()


def f32(*shape: int) -> tensor_pb2.TensorType:
    return tensor_pb2.TensorType(data_type=F32, shape=shape)


def graph_of(*nodes: graph_pb2.Node, output: int | None = None) -> graph_pb2.Graph:
    """A graph with the input x (value 0) of f32 [4, 3], these nodes, and one output."""
    return graph_pb2.Graph(
        leaves=[graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_INPUT, name="x", type=f32(4, 3))],
        nodes=nodes,
        outputs=[graph_pb2.Output(name="y", value=len(nodes) if output is None else output)],
    )


def node(op: str, *operands: int, shape: tuple[int, ...] = (4, 3)) -> graph_pb2.Node:
    return graph_pb2.Node(op=op, operands=operands, result=f32(*shape))


@contextmanager
def raw_channel(url: str) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(url.removeprefix("grpc://"), options=options) as channel:
        yield channel


def check_leaves_no_descriptor(url: str, act: Callable[[], None], times: int) -> None:
    """Whether an act with a daemon of this process leaves no more open than its first time did."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    act()
    still_serves(url)
    before = count()
    for _ in range(times):
        act()
    for _ in range(1000):
        still_serves(url)
        if count() <= before:
            break
    assert count() <= before


def still_serves(url: str) -> None:
    """Whether the daemon runs a graph for a new client."""
    with hg.connect(url) as session:
        g = hg.Graph()
        g.output("y", g.input("x", (2,), "f32") + 1.0)
        assert session.compile(g).run(x=np.zeros(2, np.float32))["y"].tolist() == [1.0, 1.0]
