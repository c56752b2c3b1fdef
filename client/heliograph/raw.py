"""Tensors as raw elements of every data type, including those without a NumPy type.

Arrays here have the storage of a tensor's type (`DType.storage`, `TensorType.storage_shape`): bf16
as its bits, rows of blocks as rows of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from heliograph._base.streams import StreamBase, stream_handle
from heliograph.core.arrays import byte_view
from heliograph.procedures.taps import TappedNode, next_raw
from heliograph.procedures.transfer import Sending, read, write
from heliograph.run_future import RunFuture
from heliograph.session import Session
from heliograph.tensor import Tensor
from heliograph_proto.commands import Chunks, GetTensor, SetTensor
from heliograph_proto.types import TensorType

Array = np.ndarray[Any, Any]


def put(session: Session, array: Array, type_: TensorType, device: str, timeout: float | None) -> Tensor:
    """Create a tensor with these elements. The array may be overwritten afterwards."""
    tensor = session.empty(type_.shape, type_.dtype, device)
    write_bytes(tensor, 0, byte_view(np.ascontiguousarray(array)), timeout=timeout)
    return tensor


def get(tensor: Tensor, timeout: float | None) -> Array:
    """Return the elements of a tensor."""
    out = np.empty(tensor.type.storage_shape, tensor.dtype.storage)
    return tensor.get(out=out, timeout=timeout)


def taps(run: RunFuture, timeout: float | None) -> Iterator[tuple[TappedNode, Array]]:
    """Iterate over the observed nodes of a run and their elements."""
    shell = run._shell
    while (found := shell.drive(next_raw(shell.core, run._run), timeout, run._what)) is not None:
        yield found


def write_bytes(
    tensor: Tensor,
    offset_bytes: int,
    data: memoryview,
    chunks: Chunks | None = None,
    stream: StreamBase | None = None,
    timeout: float | None = None,
) -> None:
    """Write contiguous bytes, which may be overwritten afterwards.

    With `chunks` the bytes are scattered to these places.
    """
    offset, _ = tensor._range(offset_bytes, data.nbytes if chunks is None else chunks.extent_bytes)
    command = SetTensor(tensor._live_handle, offset, chunks=chunks)
    what = tensor._doing("writing")
    how = Sending(stream_handle(tensor._shell, stream), what=what)
    tensor._shell.drive(
        write(tensor._shell.core, command, _bytes(data), tensor.dtype.block_bytes, how), timeout, what
    )


def read_bytes(
    tensor: Tensor,
    offset_bytes: int,
    out: memoryview,
    chunks: Chunks | None = None,
    stream: StreamBase | None = None,
) -> None:
    """Fill contiguous memory with bytes. With `chunks` they are gathered from these places."""
    offset, _ = tensor._range(offset_bytes, out.nbytes if chunks is None else chunks.extent_bytes)
    command = GetTensor(tensor._live_handle, offset, out.nbytes, chunks=chunks)
    number = stream_handle(tensor._shell, stream)
    procedure = read(tensor._shell.core, command, _bytes(out), tensor.dtype.block_bytes, number)
    tensor._shell.drive(procedure, None, tensor._doing("reading"))


def _bytes(data: memoryview) -> memoryview:
    """Return contiguous memory as bytes."""
    return data.cast("B") if data.nbytes else memoryview(bytearray())
