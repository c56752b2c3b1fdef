"""The listener of ggml's RPC protocol: it accepts clients, each with a thread and a session."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from heliograph_proto.errors import ConfigurationError, HeliographError
from heliograph_server.compile.turns import CompileTurns
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.sockets import host_and_port
from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.connection import REFUSALS, Connection, ConnectionEndedError, Stream
from heliograph_server.gateways.ggml_rpc.device import RpcDevice
from heliograph_server.gateways.ggml_rpc.session import GatewaySession
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: The most clients at once; further ones are hung up on.
MOST_CONNECTIONS = 64
#: How long the end waits for the threads.
END_SECONDS = 5.0


class GgmlRpcServer:
    """Serves clients of ggml's RPC protocol. Thread-safe; `host_of` gives the host once it is
    there."""

    def __init__(
        self,
        version: wire.Version,
        host_of: Callable[[], Host],
        principal: Principal,
        turns: CompileTurns,
        compile_seconds: Callable[[], float],
        activations: str = "auto",
    ) -> None:
        self._activations = activations
        self._turns, self._compile_seconds = turns, compile_seconds
        self._version = version
        self._host_of = host_of
        self._principal = principal
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._is_ending = False

    def bind(self, host: str, port: int) -> None:
        """Bind. Raises ConfigurationError."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(MOST_CONNECTIONS)
        except OSError as error:
            listener.close()
            raise ConfigurationError(
                f"cannot listen at {host}:{port} for ggml-rpc: {error.strerror or error}",
                advice="choose another address: --ggml-rpc 127.0.0.1:0",
            ) from None
        self._listener = listener
        shown = f"[{host}]" if ":" in host else host
        #: HOST:PORT with the actual port.
        self.address = f"{shown}:{listener.getsockname()[1]}"
        logger.info("ggml-rpc %d.%d at %s", self._version.major, self._version.minor, self.address)

    def start(self) -> None:
        """Accept clients from now on."""
        threading.Thread(target=self._accept, name="heliograph-ggml-rpc", daemon=True).start()

    def stop(self) -> None:
        """Hang up, and wait for the threads for a while. Blocks."""
        with self._lock:
            self._is_ending = True
            open_now = dict(self._open)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for connection in open_now:
            _hang_up(connection)
        end = time.monotonic() + END_SECONDS
        for thread in open_now.values():
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                with self._lock:
                    if self._is_ending:
                        return
                # No descriptors are left: others may end meanwhile.
                threading.Event().wait(0.1)
                continue
            self._begin(connection, f"{address[0]}:{address[1]}")

    def _begin(self, connection: socket.socket, name: str) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection, name), name=f"heliograph-ggml-rpc-{name}", daemon=True
        )
        with self._lock:
            is_taken = not self._is_ending and len(self._open) < MOST_CONNECTIONS
            if is_taken:
                self._open[connection] = thread
                # The end waits for the threads that it finds.
                thread.start()
        if is_taken:
            return
        logger.warning("ggml-rpc client %s is refused: %d are connected", name, MOST_CONNECTIONS)
        connection.close()

    def _serve(self, connection: socket.socket, name: str) -> None:
        sessions: list[GatewaySession] = []

        def open_device() -> RpcDevice:
            made = GatewaySession(
                self._host_of(), f"ggml-rpc {name}", self._principal, lambda: _hang_up(connection),
                self._turns, self._compile_seconds,
            )  # fmt: skip
            sessions.append(made)
            return RpcDevice(sessions[0], self._version, self._activations)

        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            Connection(Stream(connection), self._version, open_device, self._memory_of).serve()
        except ConnectionEndedError:
            logger.info("ggml-rpc client %s hung up", name)
        except REFUSALS as error:
            logger.warning("ggml-rpc client %s is hung up on: %s", name, error)
        except HeliographError as error:
            logger.warning("ggml-rpc client %s is hung up on: %s", name, error.in_a_line())
        except OSError as error:
            logger.info("ggml-rpc client %s is gone: %s", name, error)
        except Exception:
            logger.exception("ggml-rpc client %s is hung up on: a defect of this server", name)
        finally:
            with suppress(OSError):
                connection.close()
            for session in sessions:
                with suppress(HeliographError):
                    session.close()
            with self._lock:
                self._open.pop(connection, None)

    def _memory_of(self, device: str) -> tuple[int, int]:
        found = self._host_of().memory_for(device, self._principal)
        return found.free_bytes, found.total_bytes


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def server_of(config: ServerConfig, host_of: Callable[[], Host], turns: CompileTurns) -> GgmlRpcServer:
    """Return the bound listener of a configuration. Raises ConfigurationError."""
    address = host_and_port(config.ggml_rpc, "ggml_rpc")
    principal = Principal(config.ggml_rpc_tenant, frozenset((Right.USE,)), config.quota, "ggml-rpc")
    version = wire.VERSIONS[config.ggml_rpc_version]
    compile_seconds = lambda: config.compile_seconds  # noqa: E731
    activations = config.ggml_rpc_activations
    made = GgmlRpcServer(version, host_of, principal, turns, compile_seconds, activations)
    made.bind(address.host, address.port)
    return made
