"""Places of state: a folder, and the memory of another daemon, for tests of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from daemon_threads import ThreadDaemon, thread_daemon

from heliograph_proto.addresses import parse_address
from heliograph_server.links.keeping import KeeperMedium
from heliograph_server.runtime.keeper import Keeper
from heliograph_server.state.folder import FolderMedium
from heliograph_server.state.medium import Medium

SIZE_BYTES = 2**30


class Place(Protocol):
    """Where media open the same files, one after the other."""

    def open(self) -> Medium:
        """A medium on the place. Raises ConfigurationError."""


class FolderPlace:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> Medium:
        return FolderMedium(self.folder)


class KeeperPlace:
    """A state in the memory of a daemon of this process."""

    def __init__(self, daemon: ThreadDaemon, name: str = "state") -> None:
        self.daemon, self.name = daemon, name

    @property
    def keeper(self) -> Keeper:
        return self.daemon.keeper

    def open(self, **how: Any) -> KeeperMedium:
        return KeeperMedium(parse_address(self.daemon.url), self.name, **how)


@contextmanager
def keeper_place(**options: Any) -> Iterator[KeeperPlace]:
    """A daemon that keeps states of others, and has none at the end of bytes that were given back."""
    with thread_daemon(**{"kept_state_size": SIZE_BYTES} | options) as daemon:
        yield KeeperPlace(daemon)


@pytest.fixture(params=["folder", "keeper"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Either place."""
    if request.param == "folder":
        yield FolderPlace(tmp_path / "state")
        return
    with keeper_place() as made:
        yield made
