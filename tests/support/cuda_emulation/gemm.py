"""Products as cuBLAS computes them, on memory of this host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from heliograph_backends.cuda.driver.driver import Gemm
from heliograph_proto.quantization import blocks

_ITEMS = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": np.uint16}


def multiply(product: Gemm, a: int, b: int, c: int) -> None:
    """c = a b, for each of the batch."""
    m, n, k = product.sizes
    for number in range(product.batch):
        shapes = (m, k), (k, n), (m, n)
        left, right, result = (
            _columns(base, name, number * stride, shape, leading, flipped)
            for base, name, stride, shape, leading, flipped in zip(
                (a, b, c), product.types, product.strides, shapes, product.leading,
                (*product.transposed, False), strict=True,
            )
        )  # fmt: skip
        wide = np.float64 if product.types[2] == "f64" else np.float32
        found = _wide(left, product.types[0], wide) @ _wide(right, product.types[1], wide)
        result[...] = blocks.to_bits(found) if product.types[2] == "bf16" else found


def view(
    address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any = None
) -> Any:
    """An array over memory, which keeps `owner`."""
    # The extent is not known here; the caller checked it.
    steps = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (steps + np.dtype(dtype).itemsize)).from_address(address)
    memory._owner = owner
    return np.ndarray(shape, dtype, memory, 0, strides)


def _columns(
    base: int, name: str, offset: int, shape: tuple[int, int], leading: int, flipped: bool
) -> np.ndarray[Any, Any]:
    """A matrix [rows, columns] whose columns, or rows if flipped, lie `leading` elements apart."""
    item = np.dtype(_ITEMS[name]).itemsize
    strides = (leading * item, item) if flipped else (item, leading * item)
    found: np.ndarray[Any, Any] = view(base + offset * item, shape, _ITEMS[name], strides)
    return found


def _wide(array: Any, name: str, wide: Any) -> Any:
    return blocks.from_bits(array) if name == "bf16" else array.astype(wide)
