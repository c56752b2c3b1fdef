"""Tensors as raw elements: every data type, also those that NumPy has no type for.

Arrays here are in the storage of a tensor's type (`DType.storage`, `TensorType.storage_shape`): bf16 as its
bits, rows of blocks as rows of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from heliograph._arrays import byte_view
from heliograph._procedures import Sending, write
from heliograph._taps import Node, next_raw
from heliograph.plan import RunFuture
from heliograph.session import Session
from heliograph.tensor import Tensor
from heliograph_proto import commands as c
from heliograph_proto.types import TensorType

Array = np.ndarray[Any, Any]


def put(session: Session, array: Array, type_: TensorType, device: str, timeout: float | None) -> Tensor:
    """A new tensor of these elements, which may be overwritten afterwards."""
    tensor = session.empty(type_.shape, type_.dtype, device)
    set_bytes(tensor, byte_view(np.ascontiguousarray(array)), 0, timeout)
    return tensor


def get(tensor: Tensor, timeout: float | None) -> Array:
    """The elements of a tensor."""
    out = np.empty(tensor.type.storage_shape, tensor.dtype.storage)
    return tensor.get(out=out, timeout=timeout)


def taps(run: RunFuture, timeout: float | None) -> Iterator[tuple[Node, Array]]:
    """The observed nodes of a run and their elements, as they come."""
    shell = run._shell
    while (found := shell.drive(next_raw(shell.core, run._run), timeout, run._what)) is not None:
        yield found


def set_bytes(tensor: Tensor, data: memoryview, offset_bytes: int, timeout: float | None) -> None:
    """Writes bytes into a tensor; returns when they may be overwritten."""
    shell, command = tensor._shell, c.SetTensor(tensor._live_handle, offset_bytes)
    what = tensor._doing("writing")
    shell.drive(write(shell.core, command, data, tensor._item_bytes, Sending(what=what)), timeout, what)
