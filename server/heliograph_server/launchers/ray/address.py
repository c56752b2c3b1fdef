"""Addresses of Ray clusters: `auto` or `HOST:PORT` from a node of it, `ray://HOST:PORT` from
anywhere."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

from heliograph_proto.errors import InvalidArgumentError, UnavailableError

AUTO = "auto"
#: Ray's default ports.
CLUSTER_PORT = 6379
CLIENT_PORT = 10001
HOST = re.compile(r"[\w.:%-]+")
#: The timeout of a connection.
REACH_SECONDS = 5.0


def endpoint(address: str) -> tuple[str, int] | None:
    """Return the host and port of an address; None for `auto`. Raises InvalidArgumentError."""
    if address == AUTO:
        return None
    prefixed = address if "://" in address else f"cluster://{address}"
    try:
        parts = urlsplit(prefixed)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if (
        not HOST.fullmatch(host)
        or parts.scheme not in ("cluster", "ray")
        or parts.path.strip("/")
        or parts.query
    ):
        raise InvalidArgumentError(
            f"{address!r:.200} is not an address of a Ray cluster",
            advice="use auto, HOST:PORT, or ray://HOST:PORT",
        )
    return host, port or (CLIENT_PORT if parts.scheme == "ray" else CLUSTER_PORT)


def check_reach(address: str) -> None:
    """Raise UnavailableError if no cluster listens, as Ray would wait long. Raises
    InvalidArgumentError."""
    if (where := endpoint(address)) is None:
        return
    try:
        socket.create_connection(where, REACH_SECONDS).close()
    except OSError as error:
        raise UnavailableError(
            f"no Ray cluster at {address!r}: {error.strerror or error}",
            advice="check the address, and that the cluster runs: `ray status`",
        ) from None
