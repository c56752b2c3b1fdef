"""Memory: buffer types, buffers, and tensors placed in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from heliograph_backends.contract.placement import Placement, place
from heliograph_backends.contract.stream import Abort
from heliograph_proto.commands import Chunks
from heliograph_proto.devices import Usage
from heliograph_proto.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    import numpy as np

    from heliograph_backends.contract.device import Device

#: The bytes that are filled or copied between two looks at an abort.
PIECE_BYTES = 64 * 2**20


class BufferType(ABC):
    """A kind of memory of a device. `name` and `device` are required."""

    #: Unique on its device. Users name a buffer type by it; the default one often has the device's
    #: name.
    name: str
    #: The device that owns the memory.
    device: Device
    #: The alignment of every tensor; a power of two.
    alignment: int = 64
    #: The maximum size of one buffer.
    max_size: int = 2**63 - 1
    #: True if its bytes are plain host memory, row-major, accessible to all code of this process.
    #: `Buffer.array` then returns a NumPy array over them, and other devices may read them in
    #: place.
    is_host: bool = False
    #: True if other processes of this host can map it (`Buffer.descriptor`). Nothing computes on
    #: such memory, since its bytes may change at any time.
    is_mappable: bool = False

    @abstractmethod
    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> Buffer:
        """Allocate a buffer, perhaps of size 0. Contents are undefined. Raises OutOfMemoryError."""

    def zeros(self, size_bytes: int, usage: Usage = Usage.ANY, abort: Abort | None = None) -> Buffer:
        """Allocate a buffer of zeros, for memory that a client can read before it writes it.

        Default: `allocate` and `Buffer.fill`. A buffer type whose new memory is zero overrides it.
        Raises OutOfMemoryError, and CancelledError after an abort.
        """
        buffer = self.allocate(size_bytes, usage)
        try:
            buffer.fill(0, size_bytes, 0, abort)
        except BaseException:
            buffer.free()
            raise
        return buffer

    def alloc_size(self, tensor: TensorType) -> int:
        """Return the bytes of a tensor with padding. Default: its own. Pure and fast."""
        return tensor.nbytes

    @property
    def pads(self) -> bool:
        """True if tensors may take more than their bytes. Default: if `alloc_size` is
        overridden."""
        return type(self).alloc_size is not BufferType.alloc_size

    def place(self, tensors: Sequence[TensorType]) -> Placement:
        """Return the places for a list of tensors, without allocating memory.

        Tensors keep their order; a new buffer starts where the running size would exceed
        `max_size`. Raises OutOfMemoryError for a tensor that never fits.
        """
        return place([self.alloc_size(one) for one in tensors], self.alignment, self.max_size)

    def allocate_tensors(
        self, tensors: Sequence[TensorType], usage: Usage = Usage.ANY
    ) -> tuple[Buffer, tuple[Tensor, ...]]:
        """Allocate a list of tensors in one buffer, or in several that act as one. Contents are
        undefined.

        Raises OutOfMemoryError, with everything freed.
        """
        placement = self.place(tensors)
        buffers: list[Buffer] = []
        try:
            buffers.extend(self.allocate(size, usage) for size in placement.buffer_bytes)
            placed = tuple(
                Tensor(type, buffers[where.buffer], where.offset_bytes)
                for type, where in zip(tensors, placement.places, strict=True)
            )
            for tensor in placed:
                tensor.buffer.init_tensor(tensor)
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        return (buffers[0] if len(buffers) == 1 else MultiBuffer(self, buffers)), placed


class Buffer(ABC):
    """A block of memory on a device. `Tensor` checks offsets; a buffer does not.

    Calls inside a stream's work are ordered by the stream.
    """

    #: The buffer type that allocated it.
    buffer_type: BufferType
    #: The requested size, without padding.
    size_bytes: int
    #: Its use: weights, results of a plan, or anything. A hint, which never changes results.
    usage: Usage

    @property
    def is_plain(self) -> bool:
        """False if the device may keep the bytes in another order while plans use them as a weight.

        `get`, `set` and copies still have them in their own. `array` too, but perhaps as a copy
        that takes device memory as long as the buffer does: read with `get`. Default: True.
        """
        return True

    @abstractmethod
    def set(self, offset_bytes: int, data: memoryview) -> None:
        """Write bytes."""

    @abstractmethod
    def get(self, offset_bytes: int, out: memoryview) -> None:
        """Read bytes into `out`."""

    @abstractmethod
    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        """Fill bytes."""

    @abstractmethod
    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
        """Return a view as an array of the device's library (numpy.ndarray, cupy.ndarray).

        The array has `type.storage_shape` and elements of `type.dtype.storage`: bf16 is its bits,
        and a row of a block type such as q4_0 is bytes along the last axis. `strides` has the bytes
        between elements along each axis of `type.shape`, also for contiguous tensors; 0 repeats an
        element. For a block type, the last one does not apply: its bytes are contiguous.

        Raises UnsupportedError if there is no such array, as for memory of another host.
        """

    @abstractmethod
    def free(self) -> None:
        """Free the memory. Idempotent."""

    def set_2d(self, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
        """Write chunks, which are packed in `data`. Default: one `set` for each."""
        for number in range(chunks.count):
            start = number * chunks.size_bytes
            self.set(offset_bytes + number * chunks.stride_bytes, data[start : start + chunks.size_bytes])

    def get_2d(self, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
        """Read chunks, packed into `out`. Default: one `get` for each."""
        for number in range(chunks.count):
            start = number * chunks.size_bytes
            self.get(offset_bytes + number * chunks.stride_bytes, out[start : start + chunks.size_bytes])

    def copy_from(self, source: Tensor, destination: Tensor) -> bool:
        """Copy a tensor into one of this buffer, of the same type; False if it cannot. Default:
        False."""
        return False

    def copy_to(self, source: Tensor, destination: Tensor) -> bool:
        """Copy a tensor of this buffer to another of the same type; False if it cannot. Default:
        False."""
        return False

    def descriptor(self) -> int:
        """Return a new descriptor of its memory, for the caller to close. Default:
        UnsupportedError."""
        raise UnsupportedError(
            f"memory of buffer type {self.buffer_type.name} cannot be mapped by another process",
            advice="use the buffer type 'shared', which CPU and CUDA devices have",
        )

    def written(self, start: int, end: int) -> None:
        """Note that bytes in this range have changed, by whatever means. Default: nothing.

        Called after each write of bytes that are the weights of a plan, before the plan's next run.
        Data that a device has made from them, such as a packed form, is made again before that run
        uses it.
        """

    def set_usage(self, usage: Usage) -> None:
        """Set the buffer's usage."""
        self.usage = usage

    def clear(self, value: int = 0) -> None:
        """Fill the whole buffer."""
        self.memset(0, self.size_bytes, value)

    def fill(self, offset_bytes: int, size_bytes: int, value: int, abort: Abort | None = None) -> None:
        """Fill bytes in pieces, so that an abort ends the work. Raises CancelledError."""
        end = offset_bytes + size_bytes
        for start in range(offset_bytes, end, PIECE_BYTES):
            if abort is not None:
                abort.check()
            self.memset(start, min(PIECE_BYTES, end - start), value)

    def init_tensor(self, tensor: Tensor) -> None:
        """Called after a tensor was placed here. Default: nothing."""

    def free_tensor(self, tensor: Tensor) -> None:
        """Called before a tensor that was placed here is freed. Default: nothing."""

    def reset(self) -> None:
        """Drop data attached by init_tensor, before new tensors are placed. Default: nothing.

        Plans whose weights are here stay valid.
        """


class MultiBuffer(Buffer):
    """Several buffers that are freed, cleared, reset and used as one.

    It has no bytes of its own: tensors lie in its parts, which serve reads and writes.
    """

    def __init__(self, buffer_type: BufferType, parts: Sequence[Buffer]) -> None:
        self.buffer_type = buffer_type
        self.parts = tuple(parts)
        self.size_bytes = sum(part.size_bytes for part in parts)
        self.usage = parts[0].usage if parts else Usage.ANY

    def set(self, offset_bytes: int, data: memoryview) -> None:
        raise self._no_bytes()

    def get(self, offset_bytes: int, out: memoryview) -> None:
        raise self._no_bytes()

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        raise self._no_bytes()

    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
        raise self._no_bytes()

    @staticmethod
    def _no_bytes() -> InvalidArgumentError:
        return InvalidArgumentError(
            "a multi-buffer has no bytes of its own",
            advice="read and write the tensors in its parts",
        )

    def set_usage(self, usage: Usage) -> None:
        self.usage = usage
        for part in self.parts:
            part.set_usage(usage)

    def clear(self, value: int = 0) -> None:
        for part in self.parts:
            part.clear(value)

    def reset(self) -> None:
        for part in self.parts:
            part.reset()

    def free(self) -> None:
        for part in self.parts:
            part.free()


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor placed in a buffer: type, offset, byte strides. A view is another on the same
    bytes."""

    type: TensorType
    buffer: Buffer
    offset_bytes: int = 0
    strides: tuple[int, ...] = field(default=())

    @property
    def is_contiguous(self) -> bool:
        """True if its elements lie in row-major order without gaps."""
        if not self.strides:
            return True
        pairs = zip(self.type.shape, self.byte_strides, self.type.strides, strict=True)
        return self.type.size == 0 or all(size == 1 or mine == plain for size, mine, plain in pairs)

    @property
    def byte_strides(self) -> tuple[int, ...]:
        return self.strides or self.type.strides

    @property
    def extent_bytes(self) -> int:
        """The distance from its first byte to the end of its last one."""
        if self.type.size == 0:
            return 0
        if self.type.dtype.block_size > 1:
            return self.type.nbytes
        reach = sum((n - 1) * step for n, step in zip(self.type.shape, self.byte_strides, strict=True))
        return reach + self.type.dtype.block_bytes

    @property
    def array(self) -> Any:
        """The tensor as an array of the device's library."""
        return self.buffer.array(self.type, self.offset_bytes, self.byte_strides)

    @property
    def overlaps_itself(self) -> bool:
        """True if two elements may share bytes, as in a view that repeats with stride 0."""
        if self.is_contiguous:
            return False
        reach = self.type.dtype.block_bytes
        for step, size in sorted(zip(self.byte_strides, self.type.shape, strict=True)):
            if size > 1 and step < reach:
                return True
            reach += (size - 1) * step
        return False

    def view(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...] = ()) -> Tensor:
        """Return a view of a part of this tensor; `strides` are in bytes, empty for contiguous.

        Raises OutOfRangeError if it reaches outside.
        """
        if strides and len(strides) != type.ndim:
            raise OutOfRangeError(f"a view of {type} with {len(strides)} strides for {type.ndim} dimensions")
        made = Tensor(type, self.buffer, self.offset_bytes + offset_bytes, strides)
        inside = offset_bytes >= 0 and all(step >= 0 for step in made.byte_strides)
        if not inside or offset_bytes + made.extent_bytes > self.extent_bytes:
            raise OutOfRangeError(f"a view of {type} at byte {offset_bytes} reaches outside {self.type}")
        return made

    def check_chunks(self, offset_bytes: int, chunks: Chunks) -> None:
        """Raise OutOfRangeError unless all chunks lie inside and none overlaps the next."""
        if min(chunks.size_bytes, chunks.count) < 0 or (
            chunks.count > 1 and chunks.stride_bytes < chunks.size_bytes
        ):
            raise OutOfRangeError(
                f"{chunks.count} chunks of {chunks.size_bytes} bytes, {chunks.stride_bytes} apart, overlap",
                advice="the stride must be at least the size",
            )
        self.check_range(offset_bytes, chunks.extent_bytes)

    def check_range(self, offset_bytes: int, size_bytes: int) -> None:
        """Raise OutOfRangeError unless the bytes lie inside. Python's integers cannot overflow."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.type.nbytes:
            raise OutOfRangeError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} are not within "
                f"a tensor of {self.type.nbytes} bytes ({self.type})"
            )


def host_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a contiguous array, perhaps empty or zero-dimensional, without a copy."""
    return array.reshape(-1).view("u1").data
