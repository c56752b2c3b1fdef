"""Access of the services to the host, which exists once the devices are ready. Event loop only."""

from __future__ import annotations

from collections import Counter

from heliograph_proto.errors import UnavailableError
from heliograph_server.resources.principals import current_principal
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session


class HostSlot:
    """The host, once its devices are ready."""

    def __init__(self, host: Host | None = None) -> None:
        self._host = host
        #: The number of refused calls by the error's reason. Used on the event loop.
        self.refused: Counter[int] = Counter()

    def fill(self, host: Host) -> None:
        self._host = host

    @property
    def is_filled(self) -> bool:
        """True if the devices are ready."""
        return self._host is not None

    @property
    def host(self) -> Host:
        """The host. Raises UnavailableError while the devices are starting."""
        if self._host is None:
            raise UnavailableError("the server is starting its devices", advice="try again in a moment")
        return self._host

    def session(self, token: bytes) -> Session:
        """A session of the caller. Raises SessionClosedError, UnavailableError."""
        return self.host.session(token, current_principal())
