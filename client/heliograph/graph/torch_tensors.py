"""Tensors of PyTorch where arrays are taken.

This module does not import torch: a program that has a tensor of it has imported it.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np

from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import DTYPES, dtype

Array: TypeAlias = np.ndarray[Any, Any]


def is_torch_tensor(elements: object) -> bool:
    """True for a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(elements, getattr(torch, "Tensor", ()))


def host_array(elements: Any) -> Array:
    """Return elements as a NumPy array; those of a tensor without a copy, if it is on the host.

    Those of bf16 are as ml_dtypes has them. Raises InvalidArgumentError for a tensor without
    elements of a data type, and TypeError without ml_dtypes.
    """
    if not is_torch_tensor(elements):
        return np.asarray(elements)
    array, name = bits_of(elements)
    return array.view(DTYPES["bf16"].numpy) if name == "bf16" else array


def bits_of(tensor: Any) -> tuple[Array, str]:
    """Return a tensor's elements and the name of their data type; those of bf16 as their bits.

    Raises InvalidArgumentError for a tensor without elements of a data type.
    """
    try:
        name = dtype(tensor.dtype).name
        if tensor.is_quantized or tensor.is_meta or str(tensor.layout) != "torch.strided":
            raise TypeError(f"the tensor has {tensor.dtype}, {tensor.layout}, on {tensor.device}")
    except TypeError as error:
        raise InvalidArgumentError(
            f"a tensor of torch that has no plain elements: {error}",
            advice="convert it first: tensor.to_dense(), tensor.to(torch.float32)",
        ) from None
    found = tensor.detach().cpu().resolve_neg()
    if name == "bf16":
        return found.view(sys.modules["torch"].int16).numpy().view(np.uint16), name
    return found.numpy(), name
