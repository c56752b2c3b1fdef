"""Reading, writing and copying tensors as bytes, whatever their strides.

Offsets and sizes count a tensor's elements in row-major order, as if it were contiguous; on a tensor
with gaps both must be whole elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heliograph_backends.contract import Tensor, host_bytes
from heliograph_proto.errors import InvalidArgumentError


def write(tensor: Tensor, offset_bytes: int, data: memoryview) -> None:
    """Writes bytes into a tensor. Raises OutOfRangeError, InvalidArgumentError."""
    tensor.check_range(offset_bytes, data.nbytes)
    if tensor.is_contiguous:
        tensor.buffer.set(tensor.offset_bytes + offset_bytes, data)
        return
    first, last = _elements(tensor, offset_bytes, data.nbytes)
    tensor.array.flat[first:last] = _as_array_of(tensor, data)


def read(tensor: Tensor, offset_bytes: int, out: memoryview) -> None:
    """Reads bytes of a tensor into `out`. Raises OutOfRangeError, InvalidArgumentError."""
    tensor.check_range(offset_bytes, out.nbytes)
    if tensor.is_contiguous:
        tensor.buffer.get(tensor.offset_bytes + offset_bytes, out)
        return
    first, last = _elements(tensor, offset_bytes, out.nbytes)
    _as_array_of(tensor, out)[:] = tensor.array.flat[first:last]


def memset(tensor: Tensor, offset_bytes: int, size_bytes: int, value: int) -> None:
    """Fills bytes of a tensor. Raises OutOfRangeError, InvalidArgumentError."""
    tensor.check_range(offset_bytes, size_bytes)
    if not 0 <= value <= 255:
        raise InvalidArgumentError(f"memset with {value}; a byte is 0 to 255")
    if tensor.is_contiguous:
        tensor.buffer.memset(tensor.offset_bytes + offset_bytes, size_bytes, value)
        return
    write(tensor, offset_bytes, memoryview(bytes([value]) * size_bytes))


def copy(source: Tensor, destination: Tensor) -> None:
    """Copies a whole tensor to another of the same type, on any device, through host memory if needed."""
    if source.type != destination.type:
        raise InvalidArgumentError(f"copy of {source.type} to {destination.type}: the types differ")
    if source.buffer.buffer_type.is_host and destination.buffer.buffer_type.is_host:
        np.copyto(destination.array, source.array)
        return
    bounce = np.empty(source.type.nbytes, np.uint8)
    read(source, 0, host_bytes(bounce))
    write(destination, 0, host_bytes(bounce))


def _elements(tensor: Tensor, offset_bytes: int, size_bytes: int) -> tuple[int, int]:
    item = tensor.type.dtype.block_bytes
    if offset_bytes % item or size_bytes % item:
        raise InvalidArgumentError(
            f"bytes {offset_bytes} to {offset_bytes + size_bytes} of {tensor.type} with gaps: "
            f"offset and size must be whole elements of {item} bytes"
        )
    return offset_bytes // item, (offset_bytes + size_bytes) // item


def _as_array_of(tensor: Tensor, data: memoryview) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, tensor.type.dtype.numpy)
