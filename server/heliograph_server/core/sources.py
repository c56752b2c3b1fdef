"""Where contents come from that nobody need upload: the cache on disk, and models in an operator's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from heliograph_proto.description import ModelInfo


class Source(Protocol):
    """A content that can be read, until `close`."""

    size_bytes: int
    #: To be called with why, if the bytes are not what they should be.
    spoilt: Callable[[str], None]

    def read_into(self, offset_bytes: int, out: memoryview) -> int:
        """Reads bytes from an offset on; how many, 0 at the end. Raises OSError."""
        ...

    def close(self) -> None: ...


class Cache(Protocol):
    """What the core needs of `heliograph_server.storage.disk.DiskCache`."""

    def holds(self, tenant: bytes, digest: bytes) -> bool: ...

    def open(self, digest: bytes) -> Source | None: ...

    def add(self, tenant: bytes, digest: bytes, size_bytes: int, pieces: Iterable[memoryview]) -> bool: ...


class ModelFolder(Protocol):
    """What the core needs of `heliograph_server.storage.models.ModelFiles`."""

    def names(self) -> tuple[str, ...]: ...

    def describe(self, name: str) -> ModelInfo: ...

    def holds(self, digest: bytes) -> bool: ...

    def open(self, digest: bytes) -> Source | None: ...
