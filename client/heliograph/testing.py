"""A real `heliograph serve` in a process of its own, for tests, demos and benchmarks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from heliograph.errors import UnavailableError
from heliograph.transport.channels import credentials_of, open_channel
from heliograph_proto.addresses import parse_address

#: The time until a daemon serves, with devices that may be slow to start.
START_SECONDS = 180.0
#: The time that a daemon may take to end after SIGTERM before it is killed.
STOP_SECONDS = 40.0


@contextmanager
def running_daemon(*arguments: str, listen: str = "grpc://127.0.0.1:0") -> Iterator[str]:
    """Run `heliograph serve` in its own process, and yield its URL once it serves.

    It listens on a free loopback port, and ends with the context. With TLS
    (`listen="grpcs://127.0.0.1:0"`), $HELIOGRAPH_CA must name the authority to trust. Raises
    UnavailableError if the daemon does not start.
    """
    command = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", listen]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    with serving(process) as url:
        yield url


@contextmanager
def serving(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the URL of a daemon, started with its stdout in a pipe, once it serves; then end it.

    Raises UnavailableError if it does not start.
    """
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise UnavailableError(f"the daemon did not start: its first line is {line!r}")
        url = line.removeprefix("listening on ").strip()
        wait_until_serving(url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()


def wait_until_serving(url: str, seconds: float = START_SECONDS) -> None:
    """Wait until grpc.health.v1 reports SERVING. Raises UnavailableError after `seconds`."""
    from grpc_health.v1 import health_pb2

    address = parse_address(url)
    with open_channel(address, (), credentials_of(address)) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answers = watch(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
        try:
            for answer in answers:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise UnavailableError(f"the daemon at {address} did not become ready: {error}") from None
        finally:
            answers.cancel()
