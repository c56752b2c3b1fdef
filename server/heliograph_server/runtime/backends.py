"""Backends that an operator lists, unloads and loads while the host serves. Any thread may call it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from heliograph_backends.registry import Registry
from heliograph_proto.devices import BackendInfo, BackendUse
from heliograph_proto.errors import ConfigurationError
from heliograph_server.resources.membership import MembershipChange
from heliograph_server.session.session import Session

logger = logging.getLogger(__name__)

#: The most sessions that an error names.
MOST_NAMED = 5


class HostBackends:
    """The backends of one host.

    No session opens while `opening` is held. `sessions` returns the open sessions, and `apply`
    applies a change to all of them. `free_idle` frees what is kept on devices without a user.
    """

    def __init__(
        self,
        registry: Registry,
        opening: AbstractContextManager[object],
        sessions: Callable[[], Sequence[Session]],
        apply: Callable[[MembershipChange], None],
        free_idle: Callable[[], object],
    ) -> None:
        self._registry = registry
        self._opening = opening
        self._sessions = sessions
        self._apply = apply
        self._free_idle = free_idle
        #: Held by one change at a time.
        self._changing = threading.Lock()

    def __repr__(self) -> str:
        return f"<HostBackends of {self._registry!r}>"

    def list(self) -> tuple[BackendUse, ...]:
        """All known backends, and the number of sessions that use each."""
        sessions = self._sessions()
        return tuple(
            BackendUse(one, sum(session.uses(one.devices) for session in sessions))
            for one in self._registry.backends
        )

    def unload(self, name: str) -> BackendInfo:
        """Unload a backend that no session uses. Raises ConfigurationError."""
        with self._changing:
            devices = self._registry.devices_of(name)
            info = next(one for one in self._registry.backends if one.name.casefold() == name.casefold())
            self._free_idle()
            change = MembershipChange("", lost=devices, why=f"an operator unloaded backend {info.name!r}")
            with ExitStack() as stack:
                stack.enter_context(self._opening)
                sessions = self._sessions()
                for one in sessions:
                    stack.enter_context(one.still())
                if users := [one for one in sessions if one.uses(info.devices)]:
                    raise _in_use(info.name, users)
                for one in sessions:
                    one.change_devices(change)
                self._registry.unload(info.name, checked=True)
            self._apply(change)
        logger.warning("an operator unloaded backend %s, with %s", info.name, _names(info.devices))
        return info

    def load(self, source: str, specifications: Sequence[str] = ()) -> BackendInfo:
        """Load a backend and start its devices, by default one. Raises ConfigurationError."""
        with self._changing:
            name = self._registry.load_again(source).name
            devices = self._registry.start(specifications or (name,))
            self._apply(MembershipChange("", appeared=devices))
            info = next(one for one in self._registry.backends if one.name == name)
        logger.warning("an operator loaded backend %s, with %s", info.name, _names(info.devices))
        return info


def _in_use(name: str, users: Sequence[Session]) -> ConfigurationError:
    shown = [str(one) for one in users[:MOST_NAMED]]
    more = f" and {len(users) - MOST_NAMED} more" if len(users) > MOST_NAMED else ""
    return ConfigurationError(
        f"backend {name!r} is in use by {', '.join(shown)}{more}",
        advice="end them first: heliograph sessions end ID",
    )


def _names(devices: Sequence[str]) -> str:
    return ", ".join(devices) or "no devices"
