"""Hosts that keep the state of their sessions, one after the other in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from core_client import CoreClient

from heliograph_backends.contract import Device
from heliograph_backends.registry import Registry
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type
from heliograph_server.runtime.host import Host
from heliograph_server.state.folder import FolderMedium
from heliograph_server.state.medium import Medium
from heliograph_server.state.snapshots import Snapshots
from heliograph_server.state.store import StateStore

F4 = tensor_type("f32", (4,))
F22 = tensor_type("f32", (2, 2))
F44 = tensor_type("f32", (4, 4))
X = np.arange(4, dtype=np.float32) + 1
W = np.arange(16, dtype=np.float32).reshape(4, 4)
PLAN, OTHER, TENSOR, VIEW, BUFFER, PLACED, STREAM, EVENT = 100, 101, 1, 2, 3, 4, 5, 6


def adder() -> Graph:
    """total += x, and total is returned."""
    return Graph(
        (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.VARIABLE, "total", F4)),
        (Node("add", (1, 0), F4), Node("assign", (1, 2), F4)),
        (Output("y", 3),),
    )


def product(digest: bytes) -> Graph:
    """x @ w."""
    row = tensor_type("f32", (1, 4))
    return Graph(
        (Leaf(LeafKind.INPUT, "x", row), Leaf(LeafKind.WEIGHT, "w", F44, digest)),
        (Node("matmul", (0, 1), row),),
        (Output("y", 2),),
    )


@contextmanager
def state_host(place: Path | Medium, *devices: Device, seconds: float = 0, runs: int = 0) -> Iterator[Host]:
    """A host with the sessions of a folder or another medium, which takes snapshots when asked."""
    host = Host(Registry.of(*devices))
    medium = FolderMedium(place) if isinstance(place, Path) else place
    host.snapshots = Snapshots(StateStore(medium), seconds, runs)
    try:
        host.recover()
        yield host
    finally:
        host.close()


def abandon(host: Host) -> None:
    """Let go of the folder as a killed daemon does: nothing more is written or removed."""
    assert host.snapshots is not None
    for found in host.snapshots.__dict__["_durable"].values():
        found.is_kept = True
    host.snapshots.keep_all = lambda wait_seconds=0.0: None  # type: ignore[method-assign]


def restarted(
    folder: Path,
    devices: Callable[[], Sequence[Device]],
    before: Callable[[CoreClient], None],
    after: Callable[[CoreClient], None],
) -> None:
    """Run `before` on a durable session of one host, take a snapshot, kill the host, and run `after` on
    the session in another host."""
    with state_host(folder, *devices()) as host:
        client = CoreClient(host=host, durable=True)
        before(client)
        assert host.snapshots is not None
        taken = host.snapshots.take(client.session)
        assert taken.sequence == client.session.commands
        abandon(host)
    with state_host(folder, *devices()) as host:
        after(CoreClient(host=host, token=client.token))
