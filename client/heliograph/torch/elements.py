"""Data types of torch as those of Heliograph, and tensors as arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

import heliograph as hg

Array: TypeAlias = np.ndarray[Any, Any]

#: Data types by torch's.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "bool",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a data type of torch. Raises UnsupportedError if there is none."""
    if dtype not in DTYPES:
        known = ", ".join(str(one) for one in DTYPES)
        raise hg.UnsupportedError(f"there is no data type for {dtype}", advice=f"there are: {known}")
    return DTYPES[dtype]


def torch_dtype(dtype: hg.DType | str) -> torch.dtype:
    """Return torch's data type for a name or data type."""
    return _TORCH[str(dtype)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has elements on the host. Raises UnsupportedError for others."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise hg.UnsupportedError(
            f"a tensor of layout {tensor.layout} is not dense", advice="convert it: tensor.to_dense()"
        )
    if tensor.is_meta:
        raise hg.UnsupportedError(
            "a tensor on the device 'meta' has no elements",
            advice="give one that has: on 'cpu', for example",
        )
    dtype_name(tensor.dtype)
    return tensor.detach().cpu().resolve_neg()


def feed_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's elements as an array that a run takes; those of bf16 as ml_dtypes has
    them."""
    found = plain(tensor).contiguous()
    if found.dtype != torch.bfloat16:
        array: Array = found.numpy()
        return array
    bits: Array = found.view(torch.int16).numpy()
    return bits.view(_bfloat16())


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array's elements as a tensor; those of bf16 too. They are shared if they are
    writable."""
    whole = np.ascontiguousarray(array).reshape(array.shape)
    if not whole.flags.writeable:
        whole = whole.copy()
    if whole.dtype.name == "bfloat16":
        return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(whole)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def new_seed() -> Array:
    """Return a seed for the random numbers of a run, from torch's generator."""
    seed: Array = torch.randint(-(2**63), 2**63 - 1, ()).numpy()
    return seed
