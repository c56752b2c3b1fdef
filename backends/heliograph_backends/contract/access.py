"""Reads, writes and copies of tensors as bytes, for any strides.

Offsets and sizes count a tensor's elements in row-major order, as if it were contiguous; on a
tensor with gaps both must be whole elements. A written tensor must not overlap itself. A view that
repeats (stride 0) can be read; its size is then no bound on memory or time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from heliograph_backends.contract import Abort, Chunks, Tensor, host_bytes
from heliograph_backends.contract.memory import PIECE_BYTES
from heliograph_proto.devices import CopyPath
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import DTYPES, TensorType

#: Unsigned integers by size: moving bytes also works for data types that NumPy lacks.
_RAW = {DTYPES[name].block_bytes: DTYPES[name] for name in ("u8", "u16", "u32", "u64")}


def write(tensor: Tensor, offset_bytes: int, data: memoryview) -> None:
    """Write bytes into a tensor. Raises OutOfRangeError, InvalidArgumentError."""
    tensor.check_range(offset_bytes, data.nbytes)
    if tensor.is_contiguous:
        tensor.buffer.set(tensor.offset_bytes + offset_bytes, data)
        return
    _require_separate(tensor)
    first, last = _element_range(tensor, offset_bytes, data.nbytes)
    if first < last:
        with _reachable(tensor, writes=True) as raw:
            raw.flat[first:last] = np.frombuffer(data, raw.dtype)


def read(tensor: Tensor, offset_bytes: int, out: memoryview) -> None:
    """Read bytes of a tensor into `out`. Raises OutOfRangeError, InvalidArgumentError."""
    tensor.check_range(offset_bytes, out.nbytes)
    if tensor.is_contiguous:
        tensor.buffer.get(tensor.offset_bytes + offset_bytes, out)
        return
    first, last = _element_range(tensor, offset_bytes, out.nbytes)
    if first < last:
        with _reachable(tensor, writes=False) as raw:
            np.frombuffer(out, raw.dtype)[:] = raw.flat[first:last]


def read_whole(tensor: Tensor) -> bytearray:
    """Return all bytes of a tensor."""
    data = bytearray(tensor.type.nbytes)
    read(tensor, 0, memoryview(data))
    return data


def memset(
    tensor: Tensor, offset_bytes: int, size_bytes: int, value: int, abort: Abort | None = None
) -> None:
    """Fill bytes of a tensor. Raises OutOfRangeError, InvalidArgumentError, CancelledError."""
    tensor.check_range(offset_bytes, size_bytes)
    if not 0 <= value <= 255:
        raise InvalidArgumentError(f"memset with {value}; a byte is 0 to 255")
    if tensor.is_contiguous:
        tensor.buffer.fill(tensor.offset_bytes + offset_bytes, size_bytes, value, abort)
        return
    _require_separate(tensor)
    first, last = _element_range(tensor, offset_bytes, size_bytes)
    with _reachable(tensor, writes=True) as raw:
        raw.flat[first:last] = int.from_bytes(bytes([value]) * raw.itemsize, "little")


def write_2d(tensor: Tensor, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
    """Write chunks, packed in `data`. Raises OutOfRangeError, InvalidArgumentError."""
    check_chunks(tensor, offset_bytes, chunks)
    if chunks.total_bytes:
        tensor.buffer.set_2d(tensor.offset_bytes + offset_bytes, data, chunks)


def read_2d(tensor: Tensor, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
    """Read chunks, packed into `out`. Raises OutOfRangeError, InvalidArgumentError."""
    check_chunks(tensor, offset_bytes, chunks)
    if chunks.total_bytes:
        tensor.buffer.get_2d(tensor.offset_bytes + offset_bytes, out, chunks)


def check_chunks(tensor: Tensor, offset_bytes: int, chunks: Chunks) -> None:
    """Raise OutOfRangeError, or InvalidArgumentError for a tensor with gaps."""
    tensor.check_chunks(offset_bytes, chunks)
    if not tensor.is_contiguous:
        raise InvalidArgumentError(
            "chunks need a tensor without gaps", advice="use a view, which has strides of its own"
        )


def copy(source: Tensor, destination: Tensor, abort: Abort | None = None) -> CopyPath:
    """Copy a whole tensor to another of the same type, on any device; return the copy path.

    Tries the destination's buffer, then the source's, and finally host memory. An abort ends a copy
    in host memory between two pieces. Raises InvalidArgumentError if the types differ or the
    destination overlaps itself, and CancelledError.
    """
    if source.type != destination.type:
        raise InvalidArgumentError(f"copy of {source.type} to {destination.type}: the types differ")
    _require_separate(destination)
    if abort is None or not _on_host(source, destination):
        return _copy(source, destination)
    path = CopyPath.DESTINATION
    for start in range(0, source.type.nbytes, PIECE_BYTES):
        abort.check()
        piece = TensorType(_RAW[1], (min(PIECE_BYTES, source.type.nbytes - start),))
        path = _copy(*(Tensor(piece, one.buffer, one.offset_bytes + start) for one in (source, destination)))
    return path


def _on_host(*tensors: Tensor) -> bool:
    return all(one.is_contiguous and one.buffer.buffer_type.is_host for one in tensors)


def _copy(source: Tensor, destination: Tensor) -> CopyPath:
    if destination.buffer.copy_from(source, destination):
        return CopyPath.DESTINATION
    if source.buffer.copy_to(source, destination):
        return CopyPath.SOURCE
    bounce = np.empty(source.type.nbytes, np.uint8)
    read(source, 0, host_bytes(bounce))
    write(destination, 0, host_bytes(bounce))
    return CopyPath.HOST


@contextmanager
def _reachable(tensor: Tensor, *, writes: bool) -> Iterator[Any]:
    """Yield the elements of a tensor with gaps as an array.

    If the bytes are not plain host memory, those from the first to the last are fetched, and stored
    again if `writes`.
    """
    if tensor.buffer.buffer_type.is_host and tensor.buffer.is_plain:
        yield elements(tensor)
        return
    fetched = np.empty(tensor.extent_bytes, np.uint8)
    tensor.buffer.get(tensor.offset_bytes, host_bytes(fetched))
    item = tensor.type.dtype.block_bytes
    yield np.ndarray(tensor.type.shape, f"u{item}", fetched, 0, tensor.byte_strides)
    if writes:
        tensor.buffer.set(tensor.offset_bytes, host_bytes(fetched))


def _require_separate(tensor: Tensor) -> None:
    if tensor.overlaps_itself:
        raise InvalidArgumentError(
            f"{tensor.type} with strides {tensor.byte_strides} cannot be written: elements share bytes"
        )


def _element_range(tensor: Tensor, offset_bytes: int, size_bytes: int) -> tuple[int, int]:
    item = tensor.type.dtype.block_bytes
    if offset_bytes % item or size_bytes % item:
        raise InvalidArgumentError(
            f"bytes {offset_bytes} to {offset_bytes + size_bytes} of {tensor.type} with gaps: "
            f"offset and size must be whole elements of {item} bytes"
        )
    return offset_bytes // item, (offset_bytes + size_bytes) // item


def raw_type(type: TensorType) -> TensorType:
    """Return the type with unsigned integers as elements; a quantized type as it is."""
    return type if type.dtype.block_size > 1 else TensorType(_RAW[type.dtype.block_bytes], type.shape)


def elements(tensor: Tensor) -> Any:
    """Return the tensor's elements as unsigned integers; for quantized types, its bytes."""
    return tensor.buffer.array(raw_type(tensor.type), tensor.offset_bytes, tensor.byte_strides)
