"""Checks of a command before anything is made of it. Pure: only numbers and layouts.

Numbers from the wire are compared as Python integers, which do not overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heliograph_backends.contract import BufferType, Device, Tensor
from heliograph_backends.contract.access import check_chunks
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    InvalidArgumentError,
    LimitExceededError,
    OutOfRangeError,
    UnknownDeviceError,
)
from heliograph_proto.types import TensorType
from heliograph_server.resources.handles import HandleStorage, TensorHandle

#: The most runs of one plan in progress at once. Each has a queue, which may cost a thread.
MAX_PIPELINE = 16


def produced_tensors(kind: c.CommandKind | None) -> tuple[int, ...]:
    """The handles of the tensors that a command creates."""
    match kind:
        case c.Allocate(tensor=number) | c.View(tensor=number) | c.PlaceTensor(tensor=number):
            return (number,)
        case c.AllocateTensors(tensors=tensors):
            return tuple(number for number, _ in tensors)
        case c.RunCommand(outputs=outputs):
            return tuple(binding.tensor for binding in outputs if binding.tensor)
    return ()


def unknown_device(name: str, known: Iterable[str]) -> UnknownDeviceError:
    """The error for an unknown device name."""
    return UnknownDeviceError(f"no device is named {name[:64]!r}", advice=f"there are: {', '.join(known)}")


def check_living(device: Device) -> Device:
    """Return the device. Raises DeviceLostError if it is lost."""
    if device.lost is not None:
        raise device.lost.at(device.lost.origin)
    return device


def len_bytes(data: c.Bytes) -> int:
    return data.nbytes if isinstance(data, memoryview) else len(data)


def check_range(tensor: Tensor, offset_bytes: int, size_bytes: int) -> None:
    """Raise OutOfRangeError or InvalidArgumentError, as `contract.access` would later."""
    tensor.check_range(offset_bytes, size_bytes)
    item = tensor.type.dtype.block_bytes
    if not tensor.is_contiguous and (offset_bytes % item or size_bytes % item):
        raise InvalidArgumentError(
            f"bytes {offset_bytes} to {offset_bytes + size_bytes} of {tensor.type} with gaps: "
            f"offset and size must be whole elements of {item} bytes"
        )


def check_bytes(tensor: Tensor, offset_bytes: int, size_bytes: int, chunks: c.Chunks | None) -> None:
    """As `check_range`, also for chunks, whose sizes must add up to that of the command."""
    if chunks is None:
        check_range(tensor, offset_bytes, size_bytes)
        return
    if chunks.total_bytes != size_bytes:
        raise InvalidArgumentError(
            f"{chunks.count} chunks of {chunks.size_bytes} bytes in a command of {size_bytes} bytes"
        )
    check_chunks(tensor, offset_bytes, chunks)


def check_leaf(tensor: TensorHandle, type: TensorType, number: int) -> None:
    """Raise InvalidArgumentError for a tensor that cannot be a leaf of this type."""
    if tensor.type != type:
        raise InvalidArgumentError(f"tensor {number} is {tensor.type}, but its leaf is {type}")
    if not tensor.layout.is_contiguous:
        raise InvalidArgumentError(f"tensor {number} has gaps; a leaf is contiguous", advice="copy it first")


def check_weight(tensor: TensorHandle, number: int) -> None:
    """Raise InvalidArgumentError for bytes that are still being written, or their error if that
    failed."""
    if storage_of(tensor).writer is not None:
        raise InvalidArgumentError(
            f"tensor {number} is still being written", advice="wait for that command before compiling"
        )
    if (error := tensor.problem()) is not None:
        raise error


def check_made(tensor: TensorHandle, number: int) -> None:
    """Raise InvalidArgumentError for a tensor without bytes yet, or its error if it will never have
    any."""
    storage = storage_of(tensor)
    if storage.error is not None:
        raise storage.error.anew()
    if storage.buffer is None:
        raise InvalidArgumentError(
            f"tensor {number} is still being allocated", advice="wait for that command"
        )


def check_separate(written: Sequence[TensorHandle], others: Sequence[TensorHandle]) -> None:
    """Raise InvalidArgumentError if an output overlaps another output, an input or a variable. O(n
    log n)."""
    if not written:
        return
    spans: dict[HandleStorage, list[tuple[int, int, bool]]] = {}
    for tensors, is_written in ((written, True), (others, False)):
        for tensor in tensors:
            if tensor.storage is not None and tensor.layout.extent_bytes:
                spans.setdefault(tensor.storage, []).append((*tensor.span, is_written))
    for found in spans.values():
        end, written_end = 0, 0
        for start, stop, is_written in sorted(found):
            if start < written_end or (is_written and start < end):
                raise InvalidArgumentError(
                    "an output into a tensor that overlaps another tensor of the run",
                    advice="write it to a tensor of its own",
                )
            end = max(end, stop)
            written_end = max(written_end, stop) if is_written else written_end


def check_place(kind: c.PlaceTensor, storage: HandleStorage, memory: BufferType) -> None:
    """Check the place of a tensor in a buffer. Raises InvalidArgumentError or OutOfRangeError."""
    if kind.offset_bytes % memory.alignment:
        raise InvalidArgumentError(
            f"a tensor at byte {kind.offset_bytes}: the device requires multiples of {memory.alignment}"
        )
    end = kind.offset_bytes + memory.alloc_size(kind.type)
    if end > storage.size_bytes:
        raise OutOfRangeError(f"{kind.type} up to byte {end} of a buffer of {storage.size_bytes} bytes")


def view_of(source: Tensor, kind: c.View) -> Tensor:
    """The layout of a view. Raises OutOfRangeError or InvalidArgumentError.

    Kernels read whole elements, so offsets and strides are multiples of the element size.
    """
    dtype = kind.type.dtype
    # Blocks are read byte by byte.
    strides, item = kind.strides_bytes, dtype.block_bytes if dtype.block_size == 1 else 1
    if strides and (len(strides) != kind.type.ndim or kind.type.dtype.block_size > 1):
        raise InvalidArgumentError(
            f"{len(strides)} strides for a view of {kind.type}: one for each dimension, none for blocks"
        )
    if any(step < 0 for step in strides):
        raise OutOfRangeError(f"a view with the strides {strides}: each must be 0 or more")
    # Offsets count from the storage's first byte, which is aligned for every type.
    if any(number % item for number in (source.offset_bytes + kind.offset_bytes, *strides)):
        raise InvalidArgumentError(f"offset and strides of a view of {kind.type} must be multiples of {item}")
    return source.view(kind.type, kind.offset_bytes, strides)


def overlap(one: TensorHandle, other: TensorHandle) -> bool:
    """True if two tensors may share bytes."""
    if one.storage is not other.storage or 0 in (one.layout.extent_bytes, other.layout.extent_bytes):
        return False
    (start, end), (other_start, other_end) = one.span, other.span
    return start < other_end and other_start < end


def check_pipeline(copies: int) -> None:
    """Check the number of concurrent runs of a plan. Raises InvalidArgumentError,
    LimitExceededError."""
    if copies < 1:
        raise InvalidArgumentError(f"a pipeline of {copies} runs", advice="use 1, or the number of stages")
    if copies > MAX_PIPELINE:
        raise LimitExceededError(f"a pipeline of {copies:,} runs; this server allows {MAX_PIPELINE}")


def check_transfer(transfer: int) -> None:
    if not 0 < transfer < 2**64:
        raise InvalidArgumentError(f"transfer {transfer} is not a number of 64 bits")


def storage_of(tensor: TensorHandle) -> HandleStorage:
    assert tensor.storage is not None  # a handle from `HandleTable.get` has no error
    return tensor.storage
