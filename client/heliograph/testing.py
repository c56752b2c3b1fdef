"""A daemon of one's own, for tests, demos and benchmarks: a real `heliograph serve` in its own process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from heliograph.errors import UnavailableError
from heliograph.transport.channels import credentials_of, open_channel
from heliograph_proto.addresses import parse_address

#: How long a daemon may take to serve: its first start on a machine compiles the CPU kernels.
START_SECONDS = 180.0
#: How long it may take to end after SIGTERM before it is killed.
STOP_SECONDS = 40.0


@contextmanager
def running_daemon(*arguments: str, listen: str = "grpc://127.0.0.1:0") -> Iterator[str]:
    """A `heliograph serve` on a free loopback port, as its own process; gives its URL once it serves. With
    TLS (`listen="grpcs://127.0.0.1:0"`) it is trusted as $HELIOGRAPH_CA says."""
    command = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", listen]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    with serving(process) as url:
        yield url


@contextmanager
def serving(process: subprocess.Popen[str]) -> Iterator[str]:
    """The URL of a daemon that was just started with its stdout in a pipe, once it serves; ends it."""
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise UnavailableError(f"the daemon did not start: it said {line!r}")
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
    """Waits until grpc.health.v1 says SERVING. Raises UnavailableError."""
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
            raise UnavailableError(f"the daemon at {url} did not become ready: {error}") from None
        finally:
            answers.cancel()
