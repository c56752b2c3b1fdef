"""What a daemon says of itself by grpc.health.v1, on its address and on one for probes alone, and `heliograph
health`, which asks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from daemon_threads import thread_daemon
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

import heliograph as hg
from heliograph.cli import main
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.errors import ConfigurationError, DrainingError
from heliograph_proto.v1 import device_pb2, device_pb2_grpc
from heliograph_server.auth.tokens import Token, add_token, hash_of, new_token
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.sockets import host_and_port
from heliograph_server.daemon.daemon import SERVICES, Daemon
from heliograph_server.daemon.health import LIVE, READY, Health
from heliograph_server.runtime.host import Host

SECONDS = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Probed:
    """A daemon whose devices start when they are told to, and the channel of a probe to it."""

    daemon: Daemon
    devices: list[FakeDevice]
    go_on: threading.Event
    starting: asyncio.Future[None]
    channel: aio.Channel

    @property
    def probes(self) -> str:
        """Where probes alone are answered."""
        assert self.daemon.health.address is not None
        return str(self.daemon.health.address)

    async def started(self) -> None:
        self.go_on.set()
        await self.starting

    async def says(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
        return int(answer.status)

    async def becomes(self, service: str, status: int) -> None:
        """Waits until a watcher of a service is told this."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
        async for answer in watch:
            if answer.status == status:
                break
        watch.cancel()


@asynccontextmanager
async def probed(count: int = 1) -> AsyncIterator[Probed]:
    devices = [FakeDevice(f"fake{number}") for number in range(count)]
    begun, go_on = threading.Event(), threading.Event()

    def open_host() -> Host:
        begun.set()
        assert go_on.wait(SECONDS)
        return Host(Registry.of(*devices))

    config = ServerConfig(("grpc://127.0.0.1:0",), health_listen="127.0.0.1:0", drain_seconds=1)
    daemon = Daemon(config, open_host)
    starting = asyncio.ensure_future(daemon.start())
    assert await asyncio.to_thread(begun.wait, SECONDS)
    assert daemon.health.address is not None
    async with aio.insecure_channel(daemon.health.address.grpc_target) as channel:
        try:
            yield Probed(daemon, devices, go_on, starting, channel)
        finally:
            go_on.set()
            await starting
            await daemon.stop()


def play(scenario: Callable[[Probed], Awaitable[None]], devices: int = 1) -> None:
    async def run() -> None:
        async with probed(devices) as found:
            await scenario(found)

    asyncio.run(asyncio.wait_for(run(), 2 * SECONDS))


def test_a_daemon_lives_while_its_devices_start_and_is_ready_when_they_are_there() -> None:
    async def scenario(found: Probed) -> None:
        assert await found.says(LIVE) == SERVING
        for name in (READY, "", *SERVICES):
            assert await found.says(name) == NOT_SERVING, name
        await found.started()
        for name in (LIVE, READY, "", *SERVICES):
            assert await found.says(name) == SERVING, name

    play(scenario)


def test_a_daemon_that_drains_lives_and_is_not_ready() -> None:
    async def scenario(found: Probed) -> None:
        await found.started()
        await found.daemon.drain()
        assert await found.says(LIVE) == SERVING
        assert await found.says(READY) == await found.says("") == NOT_SERVING

    play(scenario)


def test_a_drain_that_an_operator_undoes_leaves_the_daemon_ready() -> None:
    async def scenario(found: Probed) -> None:
        await found.started()
        await found.daemon.draining.begin(SECONDS, stay=True)
        assert await found.says(READY) == NOT_SERVING
        await found.daemon.draining.undo()
        assert await found.says(READY) == SERVING

    play(scenario)


def test_a_signal_has_the_last_word_over_an_operator_who_undoes_a_drain_meanwhile() -> None:
    async def scenario(found: Probed) -> None:
        await found.started()
        await found.daemon.draining.begin(SECONDS, stay=True)
        await asyncio.gather(found.daemon.draining.undo(), found.daemon.drain())
        assert found.daemon.host is not None and found.daemon.host.is_draining
        assert await found.says(READY) == NOT_SERVING
        with pytest.raises(DrainingError, match="stopping"):
            await found.daemon.draining.undo()

    play(scenario)


def test_a_host_that_somebody_else_drains_is_not_ready() -> None:
    async def scenario(found: Probed) -> None:
        await found.started()
        assert found.daemon.host is not None
        found.daemon.host.drain()
        await found.becomes(READY, NOT_SERVING)
        assert await found.says(LIVE) == SERVING

    play(scenario)


def test_a_daemon_lives_and_is_ready_until_its_last_device_is_lost() -> None:
    async def scenario(found: Probed) -> None:
        await found.started()
        first, second = found.devices
        first.script.lose()
        assert await found.says(LIVE) == await found.says(READY) == SERVING
        second.script.lose()
        await found.becomes(LIVE, NOT_SERVING)
        await found.becomes(READY, NOT_SERVING)

    play(scenario, devices=2)


class Members:
    """A pool whose members' devices a test puts there and takes away."""

    members = reaches = daemons = ()

    def __init__(self) -> None:
        self.devices: list[FakeDevice] = []

    def start(self, *_: object) -> None: ...

    def why_missing(self, device: str) -> None: ...

    def close(self) -> None: ...


def test_a_head_is_ready_as_long_as_it_has_a_device_whoever_has_that() -> None:
    own, member, pool = FakeDevice("fake0"), FakeDevice("left/fake0"), Members()
    host = Host(Registry.of(own), pool=pool)
    try:
        assert host.is_accepting and not host.is_beyond_help
        pool.devices.append(member)
        own.script.lose()
        assert host.is_accepting and not host.is_beyond_help
        pool.devices.clear()
        assert not host.is_accepting and host.is_beyond_help
    finally:
        host.close()
        member.close()


def test_a_head_without_a_device_of_its_own_waits_for_members_instead_of_a_restart() -> None:
    pool = Members()
    host = Host(Registry.of(), pool=pool)
    try:
        assert not host.is_accepting and not host.is_beyond_help
    finally:
        host.close()


def test_where_probes_are_answered_nothing_else_is() -> None:
    async def scenario(found: Probed) -> None:
        await found.started()
        devices = device_pb2_grpc.DeviceServiceStub(found.channel)
        with pytest.raises(aio.AioRpcError) as refused:
            await devices.ListDevices(device_pb2.ListDevicesRequest(), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    play(scenario)


@pytest.mark.parametrize(
    "text", ["7071", "host", "grpc://host:1", "host:port", "host:1/path", ":7071", "[::1]"]
)
def test_where_probes_are_answered_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigurationError, match="health_listen") as refused:
        Health(SERVICES, text)
    assert "HOST:PORT" in refused.value.advice


def test_an_address_for_probes_may_be_of_any_host_and_family() -> None:
    for text in ("0.0.0.0:7071", "[::]:7071"):
        assert str(host_and_port(text, "health_listen")) == f"grpc://{text}"


# The command


def asks(*arguments: str) -> int:
    return main(["health", *arguments])


def test_the_exit_status_says_whether_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(found: Probed) -> None:
        def ask(*arguments: str) -> asyncio.Future[int]:
            return asyncio.ensure_future(asyncio.to_thread(asks, "--server", found.probes, *arguments))

        assert await ask("--service", "live") == 0
        assert await ask("--service", "ready") == 1
        assert await ask() == 1
        assert await ask("--service", "nothing") == 2
        waiting = ask("--service", "ready", "--wait", str(SECONDS))
        await found.started()
        assert await waiting == 0
        told = capsys.readouterr()
        assert told.out.splitlines() == [
            f"{found.probes} live: serving",
            f"{found.probes} ready: not serving",
            f"{found.probes}: not serving",
            f"{found.probes} ready: serving",
        ]
        assert told.err == f"{found.probes} nothing: no such service; live and ready are there\n"

    play(scenario)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("grpc://127.0.0.1:1", "refused"),
        ("unix:///nowhere/socket", "unreachable"),
        ("grpcs://127.0.0.1:1", "refused"),
    ],
)
def test_what_cannot_be_asked_has_a_status_of_its_own(
    url: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asks("--server", url) == asks("--server", url, "--wait", "0.2") == 2
    told = capsys.readouterr()
    assert told.out == ""
    first, second = told.err.splitlines()
    assert first.startswith(f"{url}: ") and why in first and second.startswith(f"{url}: ")


@pytest.mark.parametrize("url", ["http://127.0.0.1?token=secret", "grpc://127.0.0.1:x?token=secret"])
def test_an_address_that_is_none_is_not_repeated(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asks("--server", url) == 2
    told = capsys.readouterr().err
    assert "bad address" in told and "secret" not in told


def test_a_token_in_the_address_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert asks("--server", "grpc://127.0.0.1:1?token=secret") == 2
    assert capsys.readouterr().err.startswith("grpc://127.0.0.1:1: unreachable")


def test_a_file_of_authorities_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELIOGRAPH_CA", "/nowhere/ca.crt")
    assert asks("--server", "grpcs://127.0.0.1:1") == 2
    assert "cannot read /nowhere/ca.crt" in capsys.readouterr().err


def test_the_command_finds_the_daemon_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELIOGRAPH_SERVER", "grpc://127.0.0.1:1")
    assert asks() == 2
    assert capsys.readouterr().err.startswith("grpc://127.0.0.1:1: ")


#: Prints what asking has loaded of what takes long.
LOADED = """
import sys
sys.argv[:] = {arguments!r}
try:
    import heliograph
finally:
    print(*sorted(sys.modules.keys() & {{"numpy", "numba", "google.protobuf", "heliograph.session"}}))
"""


@pytest.mark.parametrize("command", [["heliograph"], ["-m"]])
def test_asking_loads_no_more_than_it_needs(command: Sequence[str]) -> None:
    arguments = [*command, "health", "--server", "grpc://127.0.0.1:1"]
    found = subprocess.run(
        [sys.executable, "-c", LOADED.format(arguments=arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert found.returncode == 2 and "unreachable" in found.stderr
    assert found.stdout.strip() == ""


def test_a_script_of_another_name_that_loads_the_package_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "health.py"
    script.write_text("import heliograph; print(heliograph.Graph.__name__)")
    found = subprocess.run(
        [sys.executable, str(script), "health"], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert found.stdout == "Graph\n"


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[str, Authority]]:
    """Where a server with a certificate for "heliograph" and the authority's is asked; it serves."""
    authority = Authority(tmp_path)
    pair = authority.server("heliograph")
    credentials = grpc.ssl_server_credentials(
        [(Path(pair.key).read_bytes(), Path(pair.certificate).read_bytes())]
    )
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield f"grpcs://127.0.0.1:{port}", authority
        server.stop(None).wait()


def test_a_daemon_with_a_certificate_is_asked_for_its_name(
    secured: tuple[str, Authority], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, authority = secured
    monkeypatch.setenv("HELIOGRAPH_CA", authority.ca)
    assert asks("--server", f"{url}?tls_name=heliograph") == 0
    assert asks("--server", url) == 2
    monkeypatch.delenv("HELIOGRAPH_CA")
    assert asks("--server", f"{url}?tls_name=heliograph") == 2
    told = capsys.readouterr()
    assert told.out == f"{url}: serving\n" and told.err.count("unreachable") == 2


def test_a_probe_needs_no_token_where_everybody_else_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_token(tmp_path / "tokens", Token("somebody", hash_of(new_token())))
    with thread_daemon(tokens=str(tmp_path / "tokens")) as daemon:
        with pytest.raises(hg.UnauthenticatedError):
            hg.connect(daemon.url)
        assert asks("--server", daemon.url) == asks("--server", daemon.url, "--service", "live") == 0
    assert capsys.readouterr().err == ""
