"""The address of the dashboard, from the daemon's start to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from heliograph_server.auth.access import Access
from heliograph_server.config.config import ServerConfig
from heliograph_server.http.server import HttpServer, missing
from heliograph_server.rpc.operators import Operators
from heliograph_server.runtime.draining import Draining
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.telemetry.audit import AuditLog
from heliograph_server.telemetry.telemetry import ModelFigures
from heliograph_server.web.explaining.explainer import Explainer
from heliograph_server.web.hub import MOST_VIEWERS, Hub
from heliograph_server.web.language_models import LanguageModelWatch
from heliograph_server.web.sign_in import Browsers

logger = logging.getLogger(__name__)

#: Connections beside those of viewers.
OTHERS = 64
#: The time after which a client that takes no bytes is lost.
STALL_SECONDS = 30.0


class Dashboard:
    """The dashboard, where the configuration has an address for it.

    The daemon calls `bind`, `start` and `stop`, in this order.
    """

    def __init__(
        self,
        config: ServerConfig,
        slot: HostSlot,
        draining: Draining,
        models: Callable[[], Iterable[ModelFigures]],
    ) -> None:
        self._config, self._slot, self._draining, self._models = config, slot, draining, models
        self._hub: Hub | None = None
        self._explainer: Explainer | None = None
        self._server: HttpServer | None = None

    def __repr__(self) -> str:
        return f"<Dashboard at {self.url or 'no address'}>"

    @property
    def url(self) -> str:
        """Its address, with its actual port; empty without."""
        return self._server.url if self._server is not None else ""

    def bind(self, access: Access, operators: Operators, audit: AuditLog) -> None:
        """Bind the address, so that a mistake shows at once. Raises ConfigurationError."""
        if (address := self._config.web_address) is None:
            return
        try:
            from heliograph_server.web.app import WebApp
        except ImportError as error:
            raise missing("web", error) from None
        browsers = Browsers(time.monotonic)
        languages = partial(LanguageModelWatch, self._config.web_llm, self._config.web_llm_token)
        self._hub = Hub(self._slot, self._draining, self._models, languages, access.why_not, browsers.use)
        self._explainer = Explainer()
        parts = self._hub, self._explainer, browsers, operators, audit
        app = WebApp(self._slot, access, *parts, address.host).app()
        self._server = HttpServer(
            access.http_context(address),
            "web",
            address,
            app,
            most_at_once=MOST_VIEWERS + OTHERS,
            stall_seconds=STALL_SECONDS,
        )

    async def start(self) -> None:
        """Serve. The host has its devices."""
        if self._server is not None:
            await self._server.start()

    async def stop(self) -> None:
        """End all streams, and the server. Idempotent."""
        if self._hub is not None:
            await self._hub.stop()
        if self._explainer is not None:
            self._explainer.stop()
        if self._server is not None:
            await self._server.stop()
