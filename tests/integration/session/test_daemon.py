"""The start and the end of a daemon, its addresses and its log."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import raw_daemon
from grpc import aio
from raw_daemon import PLAN, SECONDS, Peer, ended

from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import (
    ConfigurationError,
    HeliographError,
    Reason,
    UnavailableError,
)
from heliograph_proto.v1 import (
    device_pb2,
    device_pb2_grpc,
    session_pb2,
)
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon import daemon as app
from heliograph_server.daemon.daemon import Daemon, _started, is_starting
from heliograph_server.runtime.host import Host

play = raw_daemon.play


def test_draining_lets_running_work_end_and_refuses_new_sessions(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        gate = peer.device.script.hold("compute")
        run = c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 0, True),))
        await peer.send(stream, run)
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        stopping = asyncio.ensure_future(_drain_and_stop(peer))
        code = grpc.StatusCode.OK
        while code is grpc.StatusCode.OK:
            code, error = await _try_open(peer)
        assert code is grpc.StatusCode.UNAVAILABLE and error is not None
        gate.open()
        assert (await peer.collect(stream))[1].error is None
        code, error = await ended(stream)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert error is not None and error.reason == Reason.REASON_DRAINING
        assert await stopping is True

    play(scenario, drain_seconds=SECONDS)


async def _drain_and_stop(peer: Peer) -> bool:
    quiet = await peer.daemon.drain()
    await peer.daemon.stop()
    return quiet


async def _try_open(peer: Peer) -> tuple[grpc.StatusCode, HeliographError | None]:
    try:
        await peer.sessions.Open(session_pb2.OpenRequest(version_min=1, version_max=1))
    except aio.AioRpcError as error:
        return error.code(), error_from_metadata(list(error.trailing_metadata() or ()))
    return grpc.StatusCode.OK, None


def test_a_second_signal_ends_draining_at_once(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        gate = peer.device.script.hold("compute")
        await peer.send(stream, c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), ()))
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        draining = asyncio.ensure_future(peer.daemon.drain())
        peer.daemon.hurry()
        await asyncio.wait_for(draining, SECONDS)
        await peer.daemon.stop()

    play(scenario, drain_seconds=60.0)


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig((f"grpc://127.0.0.1:{taken.getsockname()[1]}",))
        with pytest.raises(ConfigurationError, match="in use"):
            asyncio.run(_start_and_stop(config))


def test_a_unix_socket_is_private_replaces_a_stale_one_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    modes = asyncio.run(_start_and_stop(ServerConfig((f"unix://{path}",)), path))
    assert stat.S_IMODE(modes) == 0o600 and not path.exists()


def test_a_unix_socket_that_answers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigurationError, match="another server"):
            asyncio.run(_start_and_stop(ServerConfig((f"unix://{path}",))))
    assert path.exists()


async def _start_and_stop(config: ServerConfig, path: Path | None = None) -> int:
    daemon = Daemon(config, lambda: Host(Registry.of(FakeDevice())))
    try:
        await daemon.start()
        return os.stat(path).st_mode if path is not None else 0
    finally:
        await daemon.stop()


def test_calls_before_the_devices_are_ready_are_refused() -> None:
    from heliograph_server.runtime.host_slot import HostSlot

    with pytest.raises(UnavailableError):
        _ = HostSlot().host


def test_a_socket_in_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no folder"):
        asyncio.run(_start_and_stop(ServerConfig((f"unix://{tmp_path}/none/socket",))))


def test_a_name_that_does_not_resolve_is_a_clear_error() -> None:
    config = ServerConfig(("grpc://no-such-host.invalid:1",), insecure=True)
    with pytest.raises(ConfigurationError, match="does not resolve"):
        asyncio.run(_start_and_stop(config))


def test_an_address_of_another_host_is_a_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="does not belong to this host"):
        asyncio.run(_start_and_stop(ServerConfig(("grpc://192.0.2.1:0",), insecure=True)))


def test_one_daemon_listens_at_several_addresses(tmp_path: Path) -> None:
    async def scenario() -> None:
        listen = ("grpc://127.0.0.1:0", "grpc://[::1]:0", f"unix://{tmp_path}/socket")
        daemon = Daemon(ServerConfig(listen), lambda: Host(Registry.of(FakeDevice())))
        try:
            await daemon.start()
            for address in daemon.addresses:
                async with aio.insecure_channel(address.grpc_target) as channel:
                    stub = device_pb2_grpc.DeviceServiceStub(channel)
                    assert await stub.ListDevices(device_pb2.ListDevicesRequest(), timeout=SECONDS)
        finally:
            await daemon.stop()

    asyncio.run(scenario())


def test_stopping_does_not_wait_for_devices_that_are_starting() -> None:
    """They may compile kernels for a minute. Once they are there, they are closed."""
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Told(FakeDevice):
        def close(self) -> None:
            super().close()
            closed.set()

    def open_host() -> Host:
        begun.set()
        assert go_on.wait(SECONDS)
        return Host(Registry.of(Told()))

    async def scenario() -> None:
        daemon, stop = Daemon(ServerConfig(("grpc://127.0.0.1:0",)), open_host), asyncio.Event()
        starting = asyncio.ensure_future(_started(daemon, stop))
        assert await asyncio.to_thread(begun.wait, SECONDS)
        stop.set()
        assert await asyncio.wait_for(starting, SECONDS) is False
        await asyncio.wait_for(daemon.stop(), SECONDS)
        assert is_starting()

    asyncio.run(scenario())
    go_on.set()
    assert closed.wait(SECONDS)


def test_an_error_of_the_devices_ends_the_start() -> None:
    def open_host() -> Host:
        raise ConfigurationError("no device")

    async def scenario() -> None:
        daemon = Daemon(ServerConfig(("grpc://127.0.0.1:0",)), open_host)
        try:
            with pytest.raises(ConfigurationError, match="no device"):
                await _started(daemon, asyncio.Event())
        finally:
            await daemon.stop()

    asyncio.run(scenario())


def test_a_second_signal_ends_the_process_even_if_work_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(app, "leave", left.append)
    monkeypatch.setattr(app, "HURRY_SECONDS", 0.0)

    async def scenario() -> None:
        signals, hurried = app.Signals(), asyncio.Event()
        signals.on_second(hurried.set)
        signals._arrived(signal.SIGTERM)
        assert signals.stop.is_set() and not hurried.is_set()
        signals._arrived(signal.SIGTERM)
        assert hurried.is_set()
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert left == [1]


def test_the_log_has_a_line_for_each_end_of_a_session_and_no_secrets(
    play: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    tokens: list[bytes] = []

    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        tokens.append(peer.token)
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        stream.cancel()

    caplog.set_level("DEBUG")
    play(scenario)
    said = [one for one in caplog.messages if "of test" in one]
    assert len(said) == 2 and "began" in said[0] and "ended" in said[1] and "1 commands" in said[1]
    assert not any(tokens[0].hex() in one or repr(tokens[0]) in one or "<" in one for one in said)
