"""The gateways that a configuration names. Their modules are imported only then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from heliograph_server.auth.access import Access
from heliograph_server.compile.turns import CompileTurns
from heliograph_server.config.config import ServerConfig
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.telemetry.telemetry import ModelFigures

if TYPE_CHECKING:
    from heliograph_server.gateways.ggml_rpc.server import GgmlRpcServer
    from heliograph_server.gateways.kserve.listener import KserveListener


class Gateways:
    """The daemon calls `bind`, `start` and `stop`, in this order."""

    def __init__(self, config: ServerConfig, slot: HostSlot, turns: CompileTurns) -> None:
        self._config, self._slot, self._turns = config, slot, turns
        self._kserve: KserveListener | None = None
        self._ggml_rpc: GgmlRpcServer | None = None

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        """The setting and the address, with its actual port, of each listener."""
        kserve = self._kserve.addresses if self._kserve is not None else ()
        ggml_rpc = (self._ggml_rpc.address,) if self._ggml_rpc is not None else ()
        return (*(("kserve", one) for one in kserve), *(("ggml-rpc", one) for one in ggml_rpc))

    def models(self) -> Iterable[ModelFigures]:
        """Return the figures of the models that are loaded."""
        return self._kserve.models.figures() if self._kserve is not None else ()

    def bind(self, access: Access) -> None:
        """Bind the addresses, so that a mistake shows at once. Raises ConfigurationError."""
        if self._config.gateways:
            from heliograph_server.gateways.kserve.listener import KserveListener

            self._kserve = KserveListener(self._config, self._slot)
            self._kserve.bind(access)
        if self._config.ggml_rpc:
            from heliograph_server.gateways.ggml_rpc.server import server_of

            self._ggml_rpc = server_of(self._config, lambda: self._slot.host, self._turns)

    async def start(self) -> None:
        """Serve. The host has its devices."""
        if self._kserve is not None:
            await self._kserve.start()
        if self._ggml_rpc is not None:
            self._ggml_rpc.start()

    async def stop(self) -> None:
        """End all listeners."""
        if self._ggml_rpc is not None:
            await asyncio.to_thread(self._ggml_rpc.stop)
        if self._kserve is not None:
            await self._kserve.stop()
