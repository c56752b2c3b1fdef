"""New arrays for elements from a server, and arrays as bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.types import TensorType


def empty_array(type_: TensorType) -> np.ndarray[Any, Any]:
    """Return a new array for a tensor's elements; for a quantized type, for its rows of bytes."""
    if type_.dtype.kind != "quantized":
        return room_for(type_.shape, type_.dtype.numpy)
    return room_for(type_.storage_shape, np.dtype(np.uint8))


def room_for(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a new array.

    Raises OutOfMemoryError if this process, the client, has no memory for it.
    """
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):
        size = math.prod(shape) * dtype.itemsize
    raise OutOfMemoryError(
        f"an array of {size:,} bytes does not fit into this process's memory",
        advice="read a part, tensor[:1000].get(), or leave outputs on the server, plan.run(..., fetch=False)",
    )


def byte_view(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a contiguous array."""
    view: Any = array.reshape(-1).view(np.uint8)
    return memoryview(view)
