"""What raw calls of a client get, good and bad ones, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
import raw_daemon
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_daemon import PLAN, Peer, Stream, T, ended, refused

from heliograph_proto import commands as c
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    InvalidArgumentError,
    OutOfMemoryError,
    Reason,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import (
    bulk_pb2,
    command_pb2,
    device_pb2,
    session_pb2,
)

play = raw_daemon.play


# What works


def test_a_graph_runs_and_half_closing_ends_the_session(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        plan = await peer.compile()
        assert plan.device == "fake0" and plan.outputs[0].name == "y"
        x = bytes(bytearray(range(16)))
        run = c.RunCommand(PLAN, (c.InputBinding(0, None, 1),), (c.OutputBinding(0, 2, True),))
        await peer.send(stream, c.Allocate(1, T), c.SetTensor(1, 0, x), run, c.GetTensor(2, 0, 16))
        await stream.done_writing()
        done = await peer.collect(stream)
        assert bytes(done[3].outputs[0][1]) == bytes(done[4].data)
        assert bytes(done[4].data)[3] == x[3] ^ 0x80 and done[3].device_us > 0
        assert await ended(stream) == (grpc.StatusCode.OK, None)

    play(scenario)


def test_bytes_travel_both_ways_on_calls_of_their_own(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        data = os.urandom(250_000)
        kind = tensor_type("u8", (len(data),))
        pieces = [(start, data[start : start + 100_000]) for start in range(0, len(data), 100_000)]
        upload = asyncio.ensure_future(peer.upload(len(data), *pieces, transfer=7))
        await peer.send(
            stream,
            c.Allocate(1, kind),
            c.SetTensor(1, 0, None, 7, len(data)),
            c.GetTensor(1, 0, len(data), 8),
        )
        assert await peer.download(8) == data
        assert (await upload).received_bytes == len(data)
        await peer.collect(stream)
        assert peer.host.statistics().staged_bytes == 0
        stream.cancel()

    play(scenario, replace(Limits(), chunk_bytes=100_000))


def test_a_weight_is_uploaded_once_and_named_by_its_digest(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        digest = digest_of(bytes(16))
        leaves = (Leaf(LeafKind.INPUT, "x", T), Leaf(LeafKind.WEIGHT, "w", T, digest))
        graph = Graph(leaves, (Node("add", (0, 1), T),), (Output("y", 2),))
        code, error = await refused(peer.compile(graph))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and error.reason == Reason.REASON_MISSING_CONTENT
        ask = bulk_pb2.FindMissingContentsRequest(session=peer.token, digests=[digest])
        assert list((await peer.contents.FindMissingContents(ask)).missing_digests) == [digest]
        await peer.upload(16, (0, bytes(16)), digest=digest)
        assert not (await peer.contents.FindMissingContents(ask)).missing_digests
        await peer.compile(graph)
        stream.cancel()

    play(scenario)


def test_variables_are_shared_by_plans_and_can_be_read(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        leaves = (Leaf(LeafKind.INPUT, "x", T), Leaf(LeafKind.VARIABLE, "v", T))
        graph = Graph(leaves, (Node("assign", (1, 0), T),), (Output("y", 2),))
        first, second = await peer.compile(graph), await peer.compile(graph, PLAN + 1)
        handle = first.variables[0].tensor
        assert handle == second.variables[0].tensor and handle >= c.SERVER_HANDLE
        run = c.RunCommand(PLAN, (c.InputBinding(0, bytes(range(16))),), ())
        await peer.send(stream, c.GetTensor(handle, 0, 16), run, c.GetTensor(handle, 0, 16))
        done = await peer.collect(stream)
        assert bytes(done[1].data) == bytes(16) and bytes(done[3].data) == bytes(range(16))
        stream.cancel()

    play(scenario)


def test_devices_and_health_can_be_asked(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        listed = await peer.devices.ListDevices(device_pb2.ListDevicesRequest())
        assert [one.name for one in listed.devices] == ["fake0"]
        memory = await peer.devices.GetMemory(device_pb2.GetMemoryRequest(device="fake0"))
        assert memory.memory.total_bytes == 2**20
        health = health_pb2_grpc.HealthStub(peer.channel)
        for name in ("", "heliograph.v1.CommandService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    play(scenario)


def test_closing_a_session_twice_is_no_error(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        for _ in range(2):
            await peer.sessions.Close(session_pb2.CloseRequest(session=peer.token))
        code, error = await ended(stream)
        assert code is grpc.StatusCode.NOT_FOUND and error.reason == Reason.REASON_SESSION_CLOSED

    play(scenario)


# What clients do wrong


def test_calls_of_an_unknown_session_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        peer.token = b"no such session"
        stream: Stream = peer.commands.Execute()
        await stream.write(command_pb2.CommandBatch(session=peer.token))
        ask = bulk_pb2.FindMissingContentsRequest(session=peer.token)
        for outcome in (
            await ended(stream),
            await refused(peer.compile()),
            await refused(peer.upload(4, transfer=7)),
            await refused(peer.download(7)),
            await refused(peer.contents.FindMissingContents(ask)),
        ):
            assert outcome[0] is grpc.StatusCode.NOT_FOUND
            assert outcome[1] is not None and outcome[1].reason == Reason.REASON_SESSION_CLOSED

    play(scenario)


def test_versions_without_a_common_one_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        request = session_pb2.OpenRequest(version_min=2, version_max=9)
        code, error = await refused(peer.sessions.Open(request))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert error is not None and error.reason == Reason.REASON_VERSION_MISMATCH

    play(scenario)


def test_a_second_command_stream_is_refused_and_the_first_goes_on(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        second: Stream = peer.commands.Execute()
        await second.write(command_pb2.CommandBatch(session=peer.token))
        assert (await ended(second))[0] is grpc.StatusCode.ALREADY_EXISTS
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        stream.cancel()

    play(scenario)


def test_a_gap_in_the_sequence_ends_the_session(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        peer.sequence = 5
        await peer.send(stream, c.Synchronize())
        code, error = await ended(stream)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error is not None and error.reason == Reason.REASON_PROTOCOL_VIOLATION

    play(scenario)


def test_garbage_on_the_command_stream_ends_that_session_alone(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        await peer.open()
        raw = peer.channel.stream_stream("/heliograph.v1.CommandService/Execute")
        for first in (b"\xff\xff\xff", command_pb2.CommandBatch(session=peer.token).SerializeToString()):
            stream: Any = raw()
            # The first garbage may have ended the call before the second comes.
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(first)
                await stream.write(b"\xff\xff\xff")
            code, _ = await ended(stream)
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
        await peer.open()
        await peer.sessions.Close(session_pb2.CloseRequest(session=peer.token))

    play(scenario)


def test_a_command_that_cannot_be_decoded_fails_alone(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        batch = command_pb2.CommandBatch(session=peer.token)
        batch.commands.add(sequence=1, allocate=command_pb2.Allocate(tensor=1))
        batch.commands.add(sequence=2)
        batch.commands.add(sequence=3, get_tensor=command_pb2.GetTensor(tensor=1))
        batch.commands.add(sequence=4, synchronize=command_pb2.Synchronize(), notify=True)
        await stream.write(batch)
        done = await peer.collect(stream, 4)
        assert isinstance(done[1].error, InvalidArgumentError)
        assert done[2].error is not None and done[2].error.reason == Reason.REASON_PROTOCOL_VIOLATION
        assert done[3].error is not None and done[3].error.origin.sequence == 1
        assert done[4].error is None
        stream.cancel()

    play(scenario)


def test_a_message_that_is_too_large_is_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, T), c.SetTensor(1, 0, bytes(100_000)))
        assert (await ended(stream))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(scenario, replace(Limits(), message_bytes=50_000))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (((0, b"12"), (3, b"4")), Reason.REASON_PROTOCOL_VIOLATION),
        (((0, b"12345"),), Reason.REASON_PROTOCOL_VIOLATION),
        (((0, b"12"),), Reason.REASON_PROTOCOL_VIOLATION),
        (((0, bytes(2000)),), Reason.REASON_LIMIT_EXCEEDED),
    ],
    ids=["gap", "too many", "too few", "large piece"],
)
def test_a_malformed_upload_is_refused_and_its_command_fails(
    play: Callable[..., None], pieces: tuple[tuple[int, bytes], ...], reason: int
) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (4,))), c.SetTensor(1, 0, None, 7, 4))
        _, error = await refused(peer.upload(4, *pieces, transfer=7))
        assert error is not None and error.reason == reason
        done = await peer.collect(stream)
        assert done[2].error is not None
        stream.cancel()

    play(scenario, replace(Limits(), chunk_bytes=1000))


def test_an_upload_that_ends_early_is_a_broken_one_to_its_command_however_it_ended(
    play: Callable[..., None],
) -> None:
    """A cancelled call can end like one whose client said that it was done."""

    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (4,))), c.SetTensor(1, 0, None, 7, 4))
        await refused(peer.upload(4, (0, b"12"), transfer=7))
        error = (await peer.collect(stream))[2].error
        assert isinstance(error, CancelledError) and "2 of 4 announced bytes arrived" in error.message
        stream.cancel()

    play(scenario)


def test_contents_that_do_not_match_fit_or_exist_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        code, _ = await refused(peer.upload(16, (0, bytes(16)), digest=bytes(32)))
        assert code is grpc.StatusCode.DATA_LOSS
        code, error = await refused(peer.upload(2**62, digest=bytes(32)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and isinstance(error, OutOfMemoryError)
        code, _ = await refused(peer.upload(16, digest=b"short"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, error = await refused(peer.upload(2**40, transfer=7))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error is not None and error.reason == Reason.REASON_LIMIT_EXCEEDED
        assert peer.host.statistics().staged_bytes == 0
        stream.cancel()

    play(scenario)


def test_an_allocation_that_does_not_fit_fails_and_the_session_goes_on(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (2**40,))), c.Allocate(2, T))
        done = await peer.collect(stream)
        assert isinstance(done[1].error, OutOfMemoryError) and done[2].error is None
        stream.cancel()

    play(scenario)


def test_a_device_that_raises_anything_fails_the_command_alone(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        peer.device.script.fail("compute", ZeroDivisionError("a defect"))
        run = c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 0, True),))
        await peer.send(stream, run, run)
        done = await peer.collect(stream)
        assert isinstance(done[1].error, ComputeFailedError) and done[2].error is None
        stream.cancel()

    play(scenario)


def test_questions_about_too_many_contents_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        ask = bulk_pb2.FindMissingContentsRequest(session=peer.token, digests=[b""] * 11)
        code, error = await refused(peer.contents.FindMissingContents(ask))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error is not None and error.reason == Reason.REASON_LIMIT_EXCEEDED
        stream.cancel()

    play(scenario, replace(Limits(), graph_nodes=10))
