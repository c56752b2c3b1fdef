"""The parts of a session from which an image is taken, and into which one is restored."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from heliograph_server.compile.compiler import Compiler
from heliograph_server.resources.membership import SessionDevices
from heliograph_server.resources.quotas import Holding
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.session.executor import Executor
from heliograph_server.session.protocol.core import SessionCore
from heliograph_server.weights.session_weights import SessionWeights


@dataclass(frozen=True, slots=True)
class SessionInside:
    """The parts of a session."""

    executor: Executor
    compiler: Compiler
    contents: SessionWeights
    devices: SessionDevices
    holding: Holding
    room: MemoryReclaim

    @property
    def core(self) -> SessionCore:
        """The protocol's state, under `lock`."""
        return self.executor.core

    @property
    def lock(self) -> threading.RLock:
        """Guards the core."""
        return self.executor.lock
