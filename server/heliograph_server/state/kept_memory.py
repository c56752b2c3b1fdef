"""Memory that members of a pool kept for sessions which are restored, by the bytes in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from heliograph_backends.contract import Buffer
from heliograph_proto.sessions import WantedBytes
from heliograph_server.state.capture import PIECE_BYTES
from heliograph_server.state.image import Image, ImageStorage
from heliograph_server.state.taking_up import LEAST_PIECE_BYTES

#: The device ("" for any), the size, and the digests of the pieces.
_Key: TypeAlias = tuple[str, int, tuple[bytes, ...]]


class KeptMemory:
    """Buffers with known bytes, until a restored session takes them. One thread at a time."""

    def __init__(self) -> None:
        self._buffers: defaultdict[_Key, list[Buffer]] = defaultdict(list)

    def __repr__(self) -> str:
        return f"<KeptMemory of {sum(map(len, self._buffers.values()))} buffers>"

    def add(self, want: WantedBytes, buffer: Buffer) -> None:
        """Add a buffer with wanted bytes."""
        self._buffers[want.device, want.size_bytes, want.digests].append(buffer)

    def take(self, storage: ImageStorage) -> Buffer | None:
        """Take a buffer with the bytes of a storage."""
        same = self._buffers.get((storage.device, storage.buffer_bytes, storage.pieces))
        return same.pop() if same else None

    def take_weight(self, digest: bytes, size_bytes: int) -> list[Buffer]:
        """Take the buffers with a weight, each on another device."""
        return self._buffers.pop(("", size_bytes, (digest,)), [])

    def free(self) -> None:
        """Free what was not taken."""
        for same in self._buffers.values():
            for buffer in same:
                buffer.free()
        self._buffers.clear()


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
