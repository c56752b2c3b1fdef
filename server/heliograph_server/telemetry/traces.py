"""The traces of a daemon, if they are configured; OpenTelemetry is imported only then."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from heliograph_proto.addresses import Address
from heliograph_proto.errors import ConfigurationError
from heliograph_server.runtime.host import Host

if TYPE_CHECKING:
    from heliograph_server.telemetry.tracing import TraceExporter

_ADVICE = "give a collector of OTLP over gRPC, such as http://127.0.0.1:4317"


class Traces:
    """The traces of a daemon, from its start to its end. Raises ConfigurationError for an invalid
    endpoint."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: "" for no traces."""
        self._endpoint = endpoint
        self.exporter: TraceExporter | None = None
        if endpoint:
            _check_endpoint(endpoint)
            _check_installed()

    def __repr__(self) -> str:
        return f"<Traces {self.exporter or 'off'}>"

    def join(self, host: Host, addresses: Sequence[Address]) -> None:
        """Start to export the traces of clients. Called before sessions are opened."""
        if not self._endpoint:
            return
        from heliograph_server.telemetry.tracing import TraceExporter

        # Daemons in containers of one host may listen on sockets with the same path.
        instance = f"{next(iter(addresses), '')} {secrets.token_hex(4)}".strip()
        self.exporter = TraceExporter(self._endpoint, host.incarnation, instance)
        host.tracing = self.exporter
        host.observers.append(self.exporter)

    def close(self) -> None:
        """Export pending traces, within a time limit. Idempotent."""
        if self.exporter is not None:
            self.exporter.close()


def _check_endpoint(endpoint: str) -> None:
    try:
        found = urlsplit(endpoint)
        is_right = found.scheme in ("http", "https") and bool(found.hostname) and bool(found.port)
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigurationError(f"traces is {endpoint!r}", advice=_ADVICE)


def _check_installed() -> None:
    try:
        import heliograph_server.telemetry.tracing  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"traces need OpenTelemetry, and {error.name} is not installed",
            advice="install it: pip install heliograph[otel]",
        ) from None
