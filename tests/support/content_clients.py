"""Sessions of one host that bring contents, as tests of storing and sharing them need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import CancelledError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import CompileRequest
from heliograph_proto.types import tensor_type
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session
from heliograph_server.weights.disk_cache import DiskCache
from heliograph_server.weights.model_files import ModelFiles
from heliograph_server.weights.store import ContentStore

ALICE, BOB = b"the secret of Alice", b"the secret of Bob, another"
QUOTA = 2**20


class Brought:
    """One session, and what is done with contents in it."""

    def __init__(self, host: Host, secret: bytes = ALICE) -> None:
        self.host = host
        self.session: Session = host.session(host.open_session("test", secret=secret).session)
        self.session.attach(lambda batch: None)
        self._plans = 0

    def upload(self, data: bytes, start: int = 0, until: int | None = None) -> None:
        """Uploads a content, or a part of it, after which the connection breaks."""
        upload = self.session.begin_upload(digest_of(data), len(data), start)
        upload.write(start, data[start:until])
        if until is None:
            upload.finish()
        else:
            upload.abort(CancelledError("the connection broke"))

    def is_missing(self, data: bytes) -> bool:
        return bool(self.session.missing_contents([digest_of(data)]))

    def received(self, data: bytes) -> int:
        """Where an upload may go on."""
        return self.session.received_contents([digest_of(data)])[0]

    def compile(self, data: bytes) -> None:
        """A plan whose weight the content is."""
        self._plans += 1
        request = CompileRequest(self._plans, graph_with(data))
        self.session.compile(request)

    def leave(self, *, broken: bool = False) -> None:
        """Says goodbye, or is cut off."""
        self.session.close(CancelledError("the command stream ended") if broken else None)


def graph_with(data: bytes) -> Graph:
    """y = x + w, with f32 elements."""
    type_ = tensor_type("f32", (len(data) // 4,))
    leaves = (Leaf(LeafKind.INPUT, "x", type_), Leaf(LeafKind.WEIGHT, "w", type_, digest_of(data)))
    return Graph(leaves, (Node("add", (0, 1), type_),), (Output("y", 2),))


def content(number: int, size_bytes: int = 4096) -> bytes:
    """Random bytes, the same for a number."""
    return np.random.default_rng(number).bytes(size_bytes)


@contextmanager
def host_with(
    folder: Path | None = None,
    memory_bytes: int = 2**22,
    models: ModelFiles | None = None,
    **keeping: Any,
) -> Iterator[Host]:
    """A host of one fake device, perhaps with a cache; afterwards all of the device's memory is free."""
    cache = DiskCache(folder, QUOTA) if folder is not None else None
    device = FakeDevice("fake0", memory_bytes)
    host = Host(Registry.of(device), store=ContentStore(cache, models, **keeping))
    try:
        yield host
    finally:
        host.close()
    assert device.memory().free_bytes == device.memory().total_bytes


def free_bytes(host: Host) -> int:
    """Of the device."""
    return host.memory().free_bytes


def written(host: Host) -> None:
    """Waits until the cache has what it is to keep."""
    assert host.cache_writer is not None and host.cache_writer.wait_idle(20)
