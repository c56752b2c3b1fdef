"""Binding a server to its addresses, with errors that say what to do.

What bounds connections, whatever their clients do. All of it is gRPC's own: it sees bytes before we do.

| a connection that | ends after |
|---|---|
| says nothing, or is slow with its first bytes or its TLS handshake | HANDSHAKE_SECONDS |
| has no call: idle, or slow with the headers of its first one | IDLE_SECONDS; clients connect again |
| is one too many | at once |
| answers no ping: its client is gone | the keepalive's 15 seconds |

A call whose first message does not come is the services' affair: see `services.receiving`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from heliograph.transport.allocator import give_back
from heliograph_proto.addresses import Address
from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.sockets import _check_folder, _private_files, _remove_stale, _why

if TYPE_CHECKING:
    pass


def bind(server: aio.Server, address: Address, credentials: grpc.ServerCredentials | None = None) -> Address:
    """Binds, with TLS if there are credentials; the address with the port that was chosen. Raises
    ConfigurationError."""
    if address.scheme == "unix":
        _check_folder(Path(address.path).parent)
        _remove_stale(Path(address.path))
        with _private_files():
            _add_port(server, address)
        return address
    return replace(address, port=_add_port(server, address, credentials))


def _add_port(server: aio.Server, address: Address, credentials: grpc.ServerCredentials | None = None) -> int:
    # To listen, gRPC wants "host:port"; the scheme of a target is for clients.
    name = address.grpc_target if address.scheme == "unix" else address.host_port
    try:
        port: int = (
            server.add_insecure_port(name)
            if credentials is None
            else server.add_secure_port(name, credentials)
        )
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigurationError(
            f"cannot listen at {address}: {_why(address)}",
            advice="end the other server, or choose another address: --listen grpc://127.0.0.1:0",
        )
    return port


logger = logging.getLogger(__name__)

#: How long a connection may take until it speaks HTTP/2 (and TLS, where there is any).
HANDSHAKE_SECONDS = 10.0
#: How long a connection may be without a call.
IDLE_SECONDS = 300.0
#: The most calls at once on one connection; what comes beyond that waits in its client.
MOST_CALLS = 4096
#: The same where probes alone are answered, to anybody. Of the connections there, which take descriptors too,
#: there are so many at most, and fewer where the process has few.
PROBE_IDLE_SECONDS = 60.0
MOST_PROBE_CALLS = 64
MOST_PROBE_CONNECTIONS = 1024
PROBE_SHARE = 1 / 16
#: How often free memory is looked at.
TIDY_SECONDS = 10.0
#: Of the process's descriptors, what connections leave to files, devices, shared memory and other daemons.
RESERVED_SHARE, LEAST_RESERVED = 0.25, 64


async def keep_tidy() -> None:
    """Gives back what thousands of connections, or large messages, have left behind, for as long as it
    runs: their memory lies in pieces between what is in use, which the C library keeps."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        if given := await asyncio.to_thread(give_back):
            logger.debug("%.0f MiB of free memory were given back", given / 2**20)


def connection_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """gRPC's options for a server of this configuration."""
    return _bounded(IDLE_SECONDS, MOST_CALLS, most_connections(config))


def probe_options() -> list[tuple[str, Any]]:
    """gRPC's options for a server that answers probes alone."""
    connections = min(MOST_PROBE_CONNECTIONS, max(1, int(_descriptors() * PROBE_SHARE)))
    return _bounded(PROBE_IDLE_SECONDS, MOST_PROBE_CALLS, connections)


def _bounded(idle_seconds: float, calls: int, connections: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1e3)),
        ("grpc.max_connection_idle_ms", round(idle_seconds * 1e3)),
        ("grpc.max_concurrent_streams", calls),
        ("grpc.max_allowed_incoming_connections", connections),
    ]


def most_connections(config: ServerConfig) -> int:
    """The most connections at once at each address, since gRPC counts for each by itself."""
    if config.max_connections:
        return config.max_connections
    descriptors = _descriptors()
    reserved = max(LEAST_RESERVED, int(descriptors * RESERVED_SHARE))
    return max(1, (descriptors - reserved) // sum(map(_sockets, config.addresses)))


def _sockets(address: Address) -> int:
    """How many gRPC listens on there: the name of this host has an address of each version of IP."""
    return 2 if address.host == "localhost" else 1


def _descriptors() -> int:
    """How many the process may have."""
    if sys.platform == "win32":
        return 2**13
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft
