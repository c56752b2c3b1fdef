"""A daemon behind ways that can be cut, and graphs for sessions that survive that."""

from __future__ import annotations

from typing import Any

import numpy as np
from cutting import CutProxy
from daemon_threads import ThreadDaemon

import heliograph as hg

#: The transports: settings of the daemon.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "grpc": {},
    "direct": {"direct_connections": 0},
    "unix socket": {"shared_memory": True},
}


class Site:
    """The daemon, and the ways to it: one for gRPC, one for direct connections."""

    def __init__(self, daemon: ThreadDaemon, grpc: CutProxy, direct: CutProxy) -> None:
        self.daemon, self.grpc, self.direct = daemon, grpc, direct
        self.url = grpc.url

    def connect(self, **how: Any) -> hg.Session:
        return hg.connect(self.url, **{"progress": None} | how)

    def cut(self, *, reset: bool = False) -> None:
        """Cut all connections, also command sockets that pass by the proxies."""
        self.grpc.cut(reset=reset)
        self.direct.cut(reset=reset)

    @property
    def sessions(self) -> int:
        return len(self.daemon.host.sessions)


def doubling(session: hg.Session) -> hg.Plan:
    """Compile a plan of small runs."""
    return session.compile(doubled())


def doubled() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") * 2.0)
    return g


def counting() -> hg.Graph:
    """A variable that each run adds one to."""
    g = hg.Graph()
    count = g.variable("count", (1,), "f32")
    g.output("after", hg.assign(count, count + g.input("step", (1,), "f32")))
    return g


def four(value: float) -> np.ndarray[Any, Any]:
    return np.full(4, value, np.float32)


ONE = np.ones(1, np.float32)
