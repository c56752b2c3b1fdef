"""The contents of a session: bytes by digest, in the memory of devices.

A content is uploaded before anybody knows which device will need it: it goes to the first with room for it,
and moves when a plan is compiled for another. What plans use stays where they use it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial

from heliograph_backends.contract import Buffer, Device, Tensor, Usage
from heliograph_proto.errors import HeliographError, InvalidGraphError, LimitExceededError, OutOfMemoryError
from heliograph_proto.graph import Leaf
from heliograph_server.core.room import Room

#: The most contents of a session; their bytes count as the device's memory.
MAX_CONTENTS = 250_000


class Contents:
    """Contents on devices, by priority. Thread-safe."""

    def __init__(self, devices: Sequence[Device], room: Room) -> None:
        self._devices = tuple(devices)
        self._room = room
        self._lock = threading.Lock()
        #: By digest and device's name.
        self._buffers: dict[bytes, dict[str, Buffer]] = {}
        #: Those that a plan was compiled for.
        self._used: set[tuple[bytes, str]] = set()
        self._closed: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<Contents {len(self._buffers)}, {self.size_bytes:,} bytes>"

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(one.size_bytes for copies in self._buffers.values() for one in copies.values())

    def room_for(self, size_bytes: int) -> Buffer:
        """Memory for a content, on the first device that has it. Raises the first one's OutOfMemoryError."""
        refusal: OutOfMemoryError | None = None
        for device in self._devices:
            try:
                return self._room.for_work(partial(device.buffer_type.allocate, size_bytes, Usage.WEIGHTS))
            except OutOfMemoryError as error:
                refusal = refusal or error
        assert refusal is not None, "a host has devices"
        raise refusal

    def add(self, digest: bytes, buffer: Buffer) -> None:
        """Keeps verified bytes; the second of two equal ones goes.

        Raises the error of a closed session, and LimitExceededError.
        """
        with self._lock:
            is_known = digest in self._buffers
        if is_known:
            buffer.free()
        else:
            self._keep(digest, buffer.buffer_type.device, buffer)

    def missing(self, digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Those that are not here, in their order."""
        with self._lock:
            return tuple(one for one in digests if one not in self._buffers)

    def bytes_on(self, device: str, weights: Sequence[Leaf]) -> int:
        """Bytes of those weights that lie on a device."""
        with self._lock:
            there = {leaf.digest: self._buffers.get(leaf.digest, {}).get(device) for leaf in weights}
            return sum(buffer.size_bytes for buffer in there.values() if buffer is not None)

    def tensor(self, leaf: Leaf, device: Device) -> Tensor:
        """A weight's tensor on a device, for a plan; `use` it when there is one. The content must be here.

        Raises InvalidGraphError, OutOfMemoryError.
        """
        with self._lock:
            copies = dict(self._buffers[leaf.digest])
        any_copy = next(iter(copies.values()))
        if any_copy.size_bytes != leaf.type.nbytes:
            raise InvalidGraphError(
                f"weight {leaf.name!r} is {leaf.type} of {leaf.type.nbytes} bytes, "
                f"but its content has {any_copy.size_bytes}"
            )
        return Tensor(leaf.type, copies.get(device.name) or self._copy(leaf.digest, any_copy, device))

    def use(self, weights: Iterable[tuple[Leaf, Device]]) -> None:
        """A plan was compiled for those copies: they stay, and others that no plan uses go."""
        found = {(leaf.digest, device.name) for leaf, device in weights}
        with self._lock:
            self._used |= found
        for digest in {digest for digest, _ in found}:
            self._drop_unused(digest)

    def trim(self, weights: Iterable[Leaf]) -> None:
        """A compile failed: of the copies that no plan uses, one is enough."""
        for leaf in weights:
            self._drop_unused(leaf.digest)

    def _copy(self, digest: bytes, source: Buffer, device: Device) -> Buffer:
        buffer = device.buffer_type.allocate(source.size_bytes, Usage.WEIGHTS)
        try:
            bounce = memoryview(bytearray(source.size_bytes))
            source.get(0, bounce)
            buffer.set(0, bounce)
        except BaseException:
            buffer.free()
            raise
        return self._keep(digest, device, buffer)

    def _drop_unused(self, digest: bytes) -> None:
        """Frees copies of a content that no plan was compiled for, but not the last."""
        with self._lock:
            copies = self._buffers.get(digest, {})
            unused = [name for name in copies if (digest, name) not in self._used]
            if len(unused) == len(copies):
                unused = unused[1:]
            gone = [copies.pop(name) for name in unused]
        for buffer in gone:
            buffer.free()

    def _keep(self, digest: bytes, device: Device, buffer: Buffer) -> Buffer:
        with self._lock:
            refusal = self._closed
            if refusal is None and len(self._buffers) >= MAX_CONTENTS:
                refusal = LimitExceededError(
                    f"the session holds {MAX_CONTENTS:,} contents, the most there may be"
                )
            if refusal is not None:
                buffer.free()
                raise refusal
            kept = self._buffers.setdefault(digest, {}).setdefault(device.name, buffer)
        if kept is not buffer:
            buffer.free()
        return kept

    def close(self, error: HeliographError) -> None:
        """Frees all; uploads that are not finished will fail with this error."""
        with self._lock:
            self._closed = error
            buffers, self._buffers = self._buffers, {}
        for copies in buffers.values():
            for buffer in copies.values():
                buffer.free()
