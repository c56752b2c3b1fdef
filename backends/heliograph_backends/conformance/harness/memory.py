"""Tensors in one buffer between guard bytes, and the check of its bytes after a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heliograph_backends.conformance.harness.content import Array, Content, decode
from heliograph_backends.conformance.harness.layouts import Laid, gather
from heliograph_backends.conformance.harness.outcome import MismatchError
from heliograph_backends.contract import Buffer, Device, Tensor, Usage, host_bytes
from heliograph_proto.types import DTYPES, TensorType

#: The number of guard bytes around each tensor, and their value.
GUARD_BYTES = 64
GUARD = 0xA5


@dataclass(frozen=True, slots=True, eq=False)
class GuardedRegion:
    """The place of a tensor in the buffer."""

    what: str
    type: TensorType
    laid: Laid
    start: int
    size_bytes: int
    #: True if a run may write its elements.
    writable: bool

    @property
    def stop(self) -> int:
        """The end of the region."""
        return self.start + self.size_bytes

    @property
    def padding(self) -> int:
        """Bytes after the tensor that the buffer type requires for it."""
        return self.size_bytes - self.laid.image.size


class GuardedMemory:
    """Several tensors in one buffer, each aligned, between guard bytes."""

    def __init__(self, device: Device, usage: Usage = Usage.ANY) -> None:
        self._buffer_type = device.buffer_type
        self._usage = usage
        self._regions: list[GuardedRegion] = []
        self._end = 0
        self._buffer: Buffer | None = None
        self._image: Array = np.empty(0, np.uint8)

    def add(self, what: str, type: TensorType, laid: Laid, *, writable: bool = False) -> int:
        """Add a region for a tensor and return its number."""
        alignment = self._buffer_type.alignment
        start = -(-(self._end + GUARD_BYTES) // alignment) * alignment
        size = max(laid.image.size, self._buffer_type.alloc_size(type))
        self._regions.append(GuardedRegion(what, type, laid, start, size, writable))
        self._end = start + size
        return len(self._regions) - 1

    def allocate(self) -> None:
        """Allocate the buffer. Its bytes are not written yet."""
        if not self._regions:
            return
        size = self._end + GUARD_BYTES
        self._image = np.full(size, GUARD, np.uint8)
        for region in self._regions:
            self._image[region.start :][: region.laid.image.size] = region.laid.image
        self._buffer = self._buffer_type.allocate(size, self._usage)
        for number in range(len(self._regions)):
            self._buffer.init_tensor(self._base(number))

    @property
    def buffer(self) -> Buffer:
        assert self._buffer is not None, "allocate comes first"
        return self._buffer

    def write(self) -> None:
        """Write all bytes, with the guards; the padding after a tensor belongs to the backend."""
        if not self._regions:
            return
        start = 0
        for region in self._regions:
            if region.padding:
                self._write(start, region.start + region.laid.image.size)
                start = region.stop
        self._write(start, self._image.size)

    def _write(self, start: int, stop: int) -> None:
        self.buffer.set(start, host_bytes(self._image[start:stop]))

    def tensor(self, number: int) -> Tensor:
        """Return a tensor with its strides."""
        region = self._regions[number]
        start = region.start + region.laid.offset_bytes
        return Tensor(region.type, self.buffer, start, region.laid.strides)

    def read(self) -> list[Content]:
        """Return the elements of all tensors. Raises MismatchError if other bytes changed."""
        if not self._regions:
            return []
        found = np.empty_like(self._image)
        self.buffer.get(0, host_bytes(found))
        expected = self._image.copy()
        for region in self._regions:
            padding = slice(region.stop - region.padding, region.stop)
            expected[padding] = found[padding]
            if region.writable:
                _take_over(region, expected, found)
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            raise MismatchError(self._describe(int(wrong[0]), wrong.size))
        return [
            decode(region.type, gather(region.laid, found[region.start :][: region.size_bytes], region.type))
            for region in self._regions
        ]

    def free(self) -> None:
        """Free the buffer."""
        if self._buffer is not None:
            for number in range(len(self._regions)):
                self._buffer.free_tensor(self._base(number))
            self._buffer.free()
            self._buffer = None

    def _base(self, number: int) -> Tensor:
        """Return the whole region as one tensor, for the backend's init_tensor and free_tensor."""
        region = self._regions[number]
        if not region.laid.strides:
            return self.tensor(number)
        return Tensor(TensorType(DTYPES["u8"], (region.laid.image.size,)), self.buffer, region.start)

    def _describe(self, place: int, count: int) -> str:
        """Describe the byte that is wrong."""
        for region in self._regions:
            if region.start <= place < region.stop:
                kind = "a gap in" if region.writable else "the run changed"
                return f"{kind} {region.what}, byte {place - region.start} ({count} bytes in all)"
        near = min(self._regions, key=lambda one: min(abs(place - one.start), abs(place - one.stop)))
        where = f"{near.start - place} before" if place < near.start else f"{place - near.stop} behind"
        return f"the run wrote the byte {where} {near.what} ({count} bytes in all)"


def _take_over(region: GuardedRegion, expected: Array, found: Array) -> None:
    """Copy the elements, which a run may write, to the expected bytes, but not the gaps between
    them."""
    here, there = (image[region.start :][: region.laid.image.size] for image in (expected, found))
    if not region.laid.strides:
        here[:] = there
    elif region.type.size:
        shape, storage = region.type.shape, region.type.dtype.storage
        place = region.laid.offset_bytes, region.laid.strides
        np.ndarray(shape, storage, here, *place)[...] = np.ndarray(shape, storage, there, *place)
