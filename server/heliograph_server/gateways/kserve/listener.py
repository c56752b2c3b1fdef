"""The addresses of the protocol: a gRPC server and an HTTP server beside the daemon's own.

Both check callers as the daemon's own addresses do, and are of its event loop.
"""

from __future__ import annotations

import logging
from typing import Any

from grpc import aio

from heliograph_proto.addresses import Address
from heliograph_proto.errors import ConfigurationError
from heliograph_server.auth.access import Access
from heliograph_server.auth.interceptor import token_of
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.sockets import unbind
from heliograph_server.gateways.kserve.registry import Models
from heliograph_server.gateways.kserve.repository import Repository
from heliograph_server.gateways.kserve.shared_regions import SharedRegions
from heliograph_server.http.server import STOP_SECONDS, HttpServer, missing
from heliograph_server.rpc.listening import bind, connection_options
from heliograph_server.runtime.host_slot import HostSlot

logger = logging.getLogger(__name__)

#: The most bytes of a request.
MOST_REQUEST_BYTES = 64 * 2**20


class KserveListener:
    """The servers of the protocol, where the configuration has addresses for them.

    The daemon calls `bind`, `start` and `stop`, in this order. `addresses` are those that it
    listens at, with their actual ports.
    """

    def __init__(self, config: ServerConfig, slot: HostSlot) -> None:
        self._config, self._slot = config, slot
        self.addresses: tuple[str, ...] = ()
        self._models = Models(Repository(config.models), slot)
        self._regions = SharedRegions(_number_of(config.kserve_shared_memory))
        self._grpc: aio.Server | None = None
        self._bound: list[Address] = []
        self._http: HttpServer | None = None

    @property
    def models(self) -> Models:
        """The models of the folder."""
        return self._models

    def bind(self, access: Access) -> None:
        """Bind the addresses, so that a mistake shows at once. Raises ConfigurationError."""
        config = self._config
        if config.kserve:
            from heliograph_server.gateways.kserve.grpc_service import InferenceService

            options = [
                ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                *connection_options(config),
            ]
            self._grpc = aio.server(interceptors=access.interceptors, options=options)
            InferenceService(self._models, self._slot, self._regions).add_to(self._grpc)
            address = config.kserve_address
            assert address is not None
            self._bound.append(bind(self._grpc, address, access.credentials(address)))
            self.addresses += (str(self._bound[-1]),)
        if (web := config.kserve_http_address) is not None:
            self._http = HttpServer(access.http_context(web), "kserve_http", web, self._app(access))
            self.addresses += (self._http.url,)

    def _app(self, access: Access) -> Any:
        try:
            from heliograph_server.gateways.kserve.rest import RestService
        except ImportError as error:
            raise missing("kserve_http", error) from None

        def admit(authorization: str | None, method: str) -> None:
            if access.tokens is None or access.gate is None:
                return
            given = () if authorization is None else (("authorization", authorization),)
            principal = access.tokens.identify(token_of(given), access.gate.quota)
            access.gate.admit(principal, f"/inference.GRPCInferenceService/{method}")

        return RestService(self._models, self._slot, self._regions, admit, MOST_REQUEST_BYTES).app()

    async def start(self) -> None:
        """Serve, and begin to load the models. The host has its devices."""
        self._models.start()
        if self._grpc is not None:
            await self._grpc.start()
        if self._http is not None:
            await self._http.start()
        for address in self.addresses:
            logger.info("the open inference protocol is served at %s", address)

    async def stop(self) -> None:
        """End the servers and unload the models. Idempotent."""
        if self._http is not None:
            await self._http.stop()
        if self._grpc is not None:
            await self._grpc.stop(STOP_SECONDS)
        await self._models.stop()
        self._regions.close()
        for address in self._bound:
            unbind(address)


def _number_of(user: str) -> int | None:
    """The number of a user, given by name or number; None for none. Raises ConfigurationError."""
    if not user:
        return None
    if user.isdecimal():
        return int(user)
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigurationError(
            f"kserve_shared_memory is {user!r:.80}, and there is no such user",
            advice="give the name or number of the user of the clients",
        ) from None
