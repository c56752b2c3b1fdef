"""Memory that has the bytes of a session which is restored: members of a pool kept it, or it came
ahead of a session that moves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from heliograph_backends.contract import Buffer
from heliograph_proto.errors import SessionClosedError
from heliograph_proto.sessions import WantedBytes
from heliograph_server.resources.handles import HandleStorage
from heliograph_server.session.session import Session
from heliograph_server.state.capture import PIECE_BYTES
from heliograph_server.state.image import Image, ImageStorage
from heliograph_server.state.taking_up import LEAST_PIECE_BYTES, close_keeping

#: The device ("" for any), the buffer type, the size, and the digests of the pieces.
_Key: TypeAlias = tuple[str, str, int, tuple[bytes, ...]]


class KeptMemory:
    """Buffers with known bytes, until a restored session takes them. One thread at a time."""

    def __init__(self) -> None:
        self._buffers: defaultdict[_Key, list[Buffer]] = defaultdict(list)

    def __repr__(self) -> str:
        return f"<KeptMemory of {sum(map(len, self._buffers.values()))} buffers>"

    def add(self, want: WantedBytes, buffer: Buffer) -> None:
        """Add a buffer with wanted bytes."""
        buffer_type = buffer.buffer_type.name if want.device else ""
        self._buffers[want.device, buffer_type, want.size_bytes, want.digests].append(buffer)

    def take(self, storage: ImageStorage, buffer_type: str) -> Buffer | None:
        """Take a buffer of a type with the bytes of a storage."""
        same = self._buffers.get((storage.device, buffer_type, storage.buffer_bytes, storage.pieces))
        return same.pop() if same else None

    def take_weight(self, digest: bytes, size_bytes: int) -> list[Buffer]:
        """Take the buffers with a weight, each on another device."""
        return self._buffers.pop(("", "", size_bytes, (digest,)), [])

    def free(self) -> None:
        """Free what was not taken."""
        for same in self._buffers.values():
            for buffer in same:
                buffer.free()
        self._buffers.clear()


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a session of another daemon, which came ahead of it."""

    session: Session
    image: Image
    #: In the order of the image's.
    storages: Sequence[HandleStorage]


def memory_of_copy(copied: Copied, image: Image) -> KeptMemory:
    """End a copy, and return its memory with bytes of an image; the rest is freed. Blocks."""
    found = KeptMemory()
    wanted = Counter(map(_key, image.storages))
    had = dict(zip(copied.storages, copied.image.storages, strict=True))
    gone = SessionClosedError("the session itself came after this copy")
    for storage, buffer in close_keeping(copied.session, gone):
        one = had.get(storage)
        if one is None or not one.pieces or not wanted[_key(one)]:
            buffer.free()
            continue
        wanted[_key(one)] -= 1
        found.add(WantedBytes(0, one.buffer_bytes, PIECE_BYTES, one.pieces, one.device), buffer)
    return found


def _key(storage: ImageStorage) -> _Key:
    return storage.device, storage.buffer_type, storage.buffer_bytes, storage.pieces


def wanted_of(images: Iterable[Image], own: Collection[str]) -> Sequence[WantedBytes]:
    """Return the bytes that the images need on devices other than `own`, and the weights, which may
    be anywhere. Handles are chosen later."""
    images = tuple(images)
    wanted = [
        WantedBytes(0, one.buffer_bytes, PIECE_BYTES, one.pieces, one.device)
        for image in images
        for one in image.storages
        if one.pieces and one.device not in own
    ]
    weights = {one.digest: one.size_bytes for image in images for one in image.weights if one.size_bytes}
    for digest, size_bytes in weights.items():
        wanted.append(WantedBytes(0, size_bytes, max(size_bytes, LEAST_PIECE_BYTES), (digest,)))
    return wanted
