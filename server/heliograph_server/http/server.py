"""uvicorn's server on a bound socket, on the daemon's event loop and without its signals."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from typing import Any

from heliograph_proto.addresses import Address
from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.sockets import why_not_bound

#: The most time for requests in progress once the server ends.
STOP_SECONDS = 2.0
#: The time after which a client that takes no bytes is lost.
STALL_SECONDS = 60.0
#: Linux's option of a TCP connection: the most time for which sent bytes stay unacknowledged.
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)


class HttpServer:
    """A server of an ASGI application. `start` and `stop` are called in this order."""

    def __init__(
        self,
        tls: ssl.SSLContext | None,
        setting: str,
        address: Address,
        app: Any,
        *,
        most_at_once: int | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Bind the address of a setting.

        `tls`: see `Access.http_context`. `most_at_once`: the most connections; further ones get
        status 503. `stall_seconds`: the time after which a client that takes no bytes is lost.
        Raises ConfigurationError.
        """
        try:
            import uvicorn

            from heliograph_server.http.connections import MOST_HEAD, Connection
        except ImportError as error:
            raise missing(setting, error) from None
        settings = uvicorn.Config(
            app,
            lifespan="off",
            http=Connection,
            ws="none",
            h11_max_incomplete_event_size=MOST_HEAD,
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=most_at_once,
            timeout_graceful_shutdown=round(STOP_SECONDS),
        )
        settings.load()
        settings.ssl = tls
        self._server = uvicorn.Server(settings)
        self._server.lifespan = settings.lifespan_class(settings)
        self._socket = _listening(address, setting, stall_seconds)
        self._turning: asyncio.Task[None] | None = None
        found = replace(address, port=self._socket.getsockname()[1])
        self.url = f"{'https' if address.is_tls else 'http'}://{found.host_port}"

    def __repr__(self) -> str:
        return f"<HttpServer at {self.url}>"

    async def start(self) -> None:
        """Serve."""
        await self._server.startup(sockets=[self._socket])
        self._turning = asyncio.create_task(self._server.main_loop())

    async def stop(self) -> None:
        """End. Idempotent."""
        turning, self._turning = self._turning, None
        if turning is not None:
            self._server.should_exit = True
            await turning
            await self._server.shutdown(sockets=[self._socket])
        self._socket.close()


def missing(setting: str, error: ImportError) -> ConfigurationError:
    """The error for a setting that needs a package which is not installed."""
    extra = "web" if setting == "web" else "kserve"
    return ConfigurationError(f"{setting} needs {error.name}", advice=f"pip install 'heliograph[{extra}]'")


def listen(host: str, port: int, stall_seconds: float = STALL_SECONDS) -> socket.socket:
    """Return a socket that listens. Its connections send small answers at once, and one whose
    client takes no bytes for `stall_seconds` ends, where the system is Linux. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.create_server((host, port), family=family, backlog=256)
    # Accepted sockets inherit both. asyncio leaves out the first for sockets that it has not made.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _TCP_USER_TIMEOUT is not None:
        made.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, round(stall_seconds * 1e3))
    return made


def _listening(address: Address, setting: str, stall_seconds: float) -> socket.socket:
    """Listen at an address. Raises ConfigurationError."""
    try:
        return listen(address.host, address.port, stall_seconds)
    except OSError:
        flag = f"--{setting.replace('_', '-')}"
        raise ConfigurationError(
            f"cannot listen at {address.host_port}: {why_not_bound(address)}",
            advice=f"stop the other server, or choose another address: {flag} 127.0.0.1:0",
        ) from None
