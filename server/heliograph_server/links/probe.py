"""Probes of another daemon: its incarnation, and the round trip and bandwidth of the link."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TypeAlias

import grpc
from grpc import aio

from heliograph.transport.channels import NO_CREDENTIALS, open_aio_channel
from heliograph_proto.addresses import Credentials
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.devices import ProbeResult
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_proto.plans import PeerSource, lost
from heliograph_proto.v1 import peer_pb2
from heliograph_server.links import links

logger = logging.getLogger(__name__)

#: The most bytes that one probe may send each way.
MAX_BYTES = 64 * 2**20
MAX_SECONDS = 60.0
#: Round trips, of which the shortest counts; the first one includes making the connection.
TRIPS = 6
PAYLOAD_BYTES = 2**18
#: Payloads in flight at the same time.
UNDER_WAY = 4

_Echo: TypeAlias = "aio.UnaryUnaryMultiCallable[peer_pb2.EchoRequest, peer_pb2.EchoResponse]"


def check_probe(address: str, bandwidth_bytes: int, timeout_ms: int) -> None:
    """Check the parameters of a probe. Raises InvalidArgumentError."""
    links.address_of(address)
    if bandwidth_bytes > MAX_BYTES:
        raise InvalidArgumentError(f"a probe of {bandwidth_bytes:,} bytes; at most {MAX_BYTES:,}")
    if not 1 <= timeout_ms <= MAX_SECONDS * 1000:
        raise InvalidArgumentError(f"timeout_ms is {timeout_ms}; it is 1 to {MAX_SECONDS * 1000:.0f}")


async def probe(
    address: str, bandwidth_bytes: int, seconds: float, credentials: Credentials = NO_CREDENTIALS
) -> ProbeResult:
    """Measure the link to a daemon, within `seconds`. Raises InvalidArgumentError."""
    until = time.monotonic() + seconds
    options = links.channel_options(min(seconds, links.SILENCE_SECONDS))
    async with open_aio_channel(links.address_of(address), options, credentials) as channel:
        echo: Any = channel.unary_unary(
            links.ECHO, peer_pb2.EchoRequest.SerializeToString, peer_pb2.EchoResponse.FromString
        )
        try:
            incarnation, shortest = await _round_trip(echo, until)
        except grpc.RpcError as broken:
            return ProbeResult(error=_failure(broken, PeerSource(address, b"")))
        speed = await _bandwidth(echo, bandwidth_bytes, until) if bandwidth_bytes else 0.0
    return ProbeResult(None, incarnation, shortest, speed)


def _failure(broken: grpc.RpcError, source: PeerSource) -> HeliographError:
    """The error of a daemon, or one for all other causes: the caller must not learn what else is at
    an address."""
    found = links.error_of(broken, source)
    trailing: Any = broken.trailing_metadata() if hasattr(broken, "trailing_metadata") else None
    if error_from_metadata(tuple(trailing or ())) is not None:
        return found
    logger.info("a probe of %s failed: %s", source.address, found.message)
    return lost(source, "no daemon answers there; the log of the daemon that asked has the cause")


async def _round_trip(echo: _Echo, until: float) -> tuple[bytes, float]:
    """The daemon's incarnation and the shortest round trip in seconds. Raises gRPC's error if there
    is no answer at all."""
    shortest, incarnation = 0.0, b""
    for number in range(TRIPS):
        begun = time.monotonic()
        try:
            answer = await echo(peer_pb2.EchoRequest(), timeout=max(0.001, until - begun))
        except grpc.RpcError:
            if not number:
                raise
            break
        took = time.monotonic() - begun
        shortest, incarnation = min(shortest or took, took), answer.incarnation
    return incarnation, shortest


async def _bandwidth(echo: _Echo, size_bytes: int, until: float) -> float:
    """The bandwidth in bytes per second each way, over the payloads that were echoed in time."""
    payload = bytes(min(PAYLOAD_BYTES, size_bytes))
    left = -(-size_bytes // len(payload))
    done = 0
    begun = last = time.monotonic()

    async def send() -> None:
        nonlocal left, done, last
        while left > 0 and (rest := until - time.monotonic()) > 0:
            left -= 1
            await echo(peer_pb2.EchoRequest(payload=payload), timeout=rest)
            done, last = done + len(payload), time.monotonic()

    await asyncio.gather(*(send() for _ in range(UNDER_WAY)), return_exceptions=True)
    return done / (last - begun) if done else 0.0
