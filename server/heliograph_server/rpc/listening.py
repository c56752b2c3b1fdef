"""The addresses of a server, and the bounds of connections, which gRPC enforces.

| connection | ends after |
|---|---|
| silent, or slow with its first bytes or its TLS handshake | HANDSHAKE_SECONDS |
| without a call: idle, or slow with its first headers | IDLE_SECONDS; clients connect again |
| beyond the limit | at once |
| its client is gone and answers no ping | `silence_seconds` |

The services bound the wait for the first message of a call: see `rpc.receiving`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from heliograph_proto.addresses import Address
from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.sockets import check_folder, private_files, remove_stale, why_not_bound


def bind(server: aio.Server, address: Address, credentials: grpc.ServerCredentials | None = None) -> Address:
    """Bind a server, with TLS if there are credentials, and return the address with its actual
    port. Raises ConfigurationError."""
    if address.scheme == "unix":
        check_folder(Path(address.path).parent)
        remove_stale(Path(address.path))
        with private_files():
            _add_port(server, address)
        return address
    return replace(address, port=_add_port(server, address, credentials))


def _add_port(server: aio.Server, address: Address, credentials: grpc.ServerCredentials | None = None) -> int:
    # gRPC listens at "host:port"; targets with a scheme are for clients.
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
            f"cannot listen at {address}: {why_not_bound(address)}",
            advice="stop the other server if there is one, or choose another address: "
            "--listen grpc://127.0.0.1:0",
        )
    return port


#: The timeout of the HTTP/2 (and TLS) handshake of a connection.
HANDSHAKE_SECONDS = 10.0
#: How long a connection may be without a call.
IDLE_SECONDS = 300.0
#: The most concurrent calls of one connection; further calls wait in the client.
MOST_CALLS = 4096
#: The same for a server of health probes, which any client may call. Its connections are also
#: limited to a share of the process's descriptors.
PROBE_IDLE_SECONDS = 60.0
MOST_PROBE_CALLS = 64
MOST_PROBE_CONNECTIONS = 1024
PROBE_SHARE = 1 / 16
#: The descriptors that connections leave to files, devices, shared memory and other daemons: a
#: share, and the least number.
RESERVED_SHARE, LEAST_RESERVED = 0.25, 64


def connection_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """gRPC's options for a server with this configuration."""
    return _bounded(IDLE_SECONDS, MOST_CALLS, most_connections(config))


def probe_options() -> list[tuple[str, Any]]:
    """gRPC's options for a server of health probes."""
    connections = min(MOST_PROBE_CONNECTIONS, max(1, int(_descriptors() * PROBE_SHARE)))
    return _bounded(PROBE_IDLE_SECONDS, MOST_PROBE_CALLS, connections)


def _bounded(idle_seconds: float, calls: int, connections: int) -> list[tuple[str, Any]]:
    return [
        # Compressed messages come as they are, and are refused: unpacked they could be any size.
        ("grpc.per_message_decompression", 0),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1e3)),
        ("grpc.max_connection_idle_ms", round(idle_seconds * 1e3)),
        ("grpc.max_concurrent_streams", calls),
        ("grpc.max_allowed_incoming_connections", connections),
    ]


def most_connections(config: ServerConfig) -> int:
    """The limit of connections at each address; gRPC counts each address separately."""
    if config.max_connections:
        return config.max_connections
    descriptors = _descriptors()
    reserved = max(LEAST_RESERVED, int(descriptors * RESERVED_SHARE))
    return max(1, (descriptors - reserved) // sum(map(_sockets, config.addresses)))


def _sockets(address: Address) -> int:
    """The number of listening sockets: "localhost" has an address of each version of IP."""
    return 2 if address.host == "localhost" else 1


def _descriptors() -> int:
    """The process's limit of file descriptors."""
    if sys.platform == "win32":
        return 2**13
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft
