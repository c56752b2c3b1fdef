"""The place where services find the host, once its devices are ready. Event loop."""

from __future__ import annotations

from collections import Counter

from heliograph_proto.errors import UnavailableError
from heliograph_server.resources.principals import current_principal
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session


class HostSlot:
    """Where services find the host, once the devices are ready."""

    def __init__(self, host: Host | None = None) -> None:
        self._host = host
        #: How many calls were refused, by the reason of the error. The event loop's.
        self.refused: Counter[int] = Counter()

    def fill(self, host: Host) -> None:
        self._host = host

    @property
    def is_filled(self) -> bool:
        """Whether the devices are ready."""
        return self._host is not None

    @property
    def host(self) -> Host:
        """Raises UnavailableError while the devices are starting."""
        if self._host is None:
            raise UnavailableError("the server is starting its devices", advice="try again in a moment")
        return self._host

    def session(self, token: bytes) -> Session:
        """A session of whoever makes the call. Raises SessionClosedError, UnavailableError."""
        return self.host.session(token, current_principal())
