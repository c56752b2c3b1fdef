"""Addresses of Ray clusters: `auto`, `HOST:PORT` of its head, from a node of it; `ray://HOST:PORT` from anywhere."""

from __future__ import annotations

from urllib.parse import urlsplit

from heliograph_proto.errors import InvalidArgumentError

AUTO = "auto"
#: Ports that Ray takes if it is told none.
CLUSTER_PORT = 6379
CLIENT_PORT = 10001


def endpoint(address: str) -> tuple[str, int] | None:
    """The host and port of an address; None for `auto`. Raises InvalidArgumentError."""
    if address == AUTO:
        return None
    prefixed = address if "://" in address else f"cluster://{address}"
    try:
        parts = urlsplit(prefixed)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or parts.scheme not in ("cluster", "ray") or parts.path.strip("/") or parts.query:
        raise InvalidArgumentError(
            f"{address!r:.200} is no address of a Ray cluster",
            advice="use auto, HOST:PORT, or ray://HOST:PORT",
        )
    return host, port or (CLIENT_PORT if parts.scheme == "ray" else CLUSTER_PORT)
