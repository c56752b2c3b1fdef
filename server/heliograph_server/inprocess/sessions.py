"""Sessions of a daemon's own host, which its gateways open."""

from __future__ import annotations

from dataclasses import dataclass

import heliograph as hg
from heliograph_server.inprocess import aio, blocking
from heliograph_server.resources.principals import Principal
from heliograph_server.runtime.host import Host


@dataclass(frozen=True, slots=True)
class ModelSessions:
    """Opens sessions of one owner, such as those of a model."""

    host: Host
    #: The name under which operators see them.
    client: str
    principal: Principal
    secret: bytes

    def open(self) -> hg.Session:
        """Open a session. Raises the errors of `Host.open_session`."""
        return blocking.session_on(self.host, self.client, self.principal, self.secret)

    async def open_aio(self) -> hg.aio.Session:
        """Open a session of the running event loop. Raises as `open`."""
        return await aio.session_on(self.host, self.client, self.principal, self.secret)
