"""Elements as bytes and as numbers, which cases write to tensors and read from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.conformance.harness.outcome import MismatchError
from heliograph_proto.quantization import blocks
from heliograph_proto.types import TensorType

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A tensor's elements."""

    type: TensorType
    #: Row-major bytes, uint8 [nbytes].
    raw: Array
    #: The elements as numbers, in the tensor's shape: in the data type if NumPy has it, else in
    #: float64.
    values: Array


def is_plain(type: TensorType) -> bool:
    """True if NumPy has the data type."""
    return bool(type.dtype.numpy_name)


def encode(type: TensorType, values: Array) -> Content:
    """Round numbers to the tensor's data type."""
    values = np.asarray(values).reshape(type.shape)
    if is_plain(type):
        own = np.ascontiguousarray(values, type.dtype.numpy).reshape(type.shape)
        return Content(type, own.reshape(-1).view(np.uint8), own)
    quantized = type.dtype.block_size > 1
    stored = blocks.converted_to_blocks(values, type.dtype) if quantized else blocks.to_bits(values)
    return decode(type, np.ascontiguousarray(stored).reshape(-1).view(np.uint8))


def decode(type: TensorType, raw: Array) -> Content:
    """Convert bytes to numbers. Raises MismatchError for a bool that is neither 0 nor 1."""
    if type.dtype.kind == "bool" and raw.size and raw.max() > 1:
        place = int(np.argmax(raw > 1))
        raise MismatchError(f"element {place} is the byte {int(raw[place])}; a bool is 0 or 1")
    if is_plain(type):
        return Content(type, raw, raw.view(type.dtype.numpy).reshape(type.shape))
    stored = raw.view(type.dtype.storage).reshape(type.storage_shape)
    quantized = type.dtype.block_size > 1
    values = blocks.from_blocks(stored, type.dtype) if quantized else blocks.from_bits(stored)
    return Content(type, raw, values.astype(np.float64).reshape(type.shape))
