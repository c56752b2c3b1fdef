"""Clients that leave in the middle of a call, and the memory that the daemon takes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import raw_daemon
from raw_daemon import PLAN, SECONDS, Peer, T

from heliograph_proto import codec
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    Reason,
)
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import (
    bulk_pb2,
    command_pb2,
    device_pb2,
)
from heliograph_server.weights.uploads import IncomingUpload

play = raw_daemon.play


def test_a_client_that_leaves_while_a_run_is_running_aborts_it(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        gate = peer.device.script.hold("compute")
        await peer.send(stream, c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 1),)))
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        stream.cancel()

    play(scenario)


def watch_uploads(peer: Peer) -> asyncio.Event:
    """Is set once the server has begun an upload; on the loop that client and server share here."""
    begun = asyncio.Event()
    session = peer.host.session(peer.token)
    begin = session.begin_upload

    def watched(target: int | bytes, size_bytes: int, *rest: Any) -> IncomingUpload:
        begun.set()
        return begin(target, size_bytes, *rest)

    session.begin_upload = watched  # type: ignore[method-assign]
    return begun


@pytest.mark.parametrize("target", [{"transfer": 7}, {"digest": bytes(32)}], ids=["transfer", "content"])
def test_a_client_that_leaves_in_the_middle_of_an_upload_gives_everything_back(
    play: Callable[..., None], target: dict[str, Any]
) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        begun = watch_uploads(peer)
        upload: Any = peer.bulk.Upload()
        first: Any = bulk_pb2.UploadTarget(session=peer.token, size_bytes=1000, **target)
        await upload.write(bulk_pb2.UploadRequest(target=first, data=bytes(10)))
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (1000,))), c.SetTensor(1, 0, None, 7, 1000))
        await asyncio.wait_for(begun.wait(), SECONDS)
        upload.cancel()
        if "transfer" in target:
            done = await peer.collect(stream)
            assert done[2].error is not None
        stream.cancel()

    play(scenario)


def test_a_client_that_leaves_while_it_waits_for_a_download_leaves_nothing(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        download = asyncio.ensure_future(peer.download(8))
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        download.cancel()
        stream.cancel()

    play(scenario)


def test_a_compile_whose_client_left_leaves_no_plan(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        gate = peer.device.script.hold("compile")
        call = peer.plans.Compile(peer.compile_request())
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        call.cancel()
        # The server hears of it before a call that comes after it on the same connection; its handler
        # is told a few turns of the loop later.
        for _ in range(100):
            await peer.devices.ListDevices(device_pb2.ListDevicesRequest())
        gate.open()
        await peer.compile(plan=PLAN + 1)
        await peer.send(stream, c.Free((PLAN + 1,)), c.Free((PLAN,)))
        done = await peer.collect(stream)
        assert done[1].error is None
        assert done[2].error is not None and done[2].error.reason == Reason.REASON_UNKNOWN_HANDLE
        stream.cancel()

    play(scenario)


def test_a_client_that_never_attaches_is_reaped(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        await peer.open()

    play(scenario, replace(Limits(), attach_timeout_ms=20))


def test_a_command_that_is_late_fails_with_its_deadline(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        kind = c.SetTensor(1, 0, None, 7, 16)
        late = codec.encode_command(c.Command(2, kind, timeout_ms=10))
        await peer.send(stream, c.Allocate(1, T))
        await stream.write(command_pb2.CommandBatch(commands=[late]))
        done = await peer.collect(stream, 2)
        assert done[2].error is not None and done[2].error.reason == Reason.REASON_DEADLINE_EXCEEDED
        stream.cancel()

    play(scenario)
