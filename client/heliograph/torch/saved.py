"""Tensors that AOTAutograd saves for the backward pass, which stay on the server.

A forward part gives `SavedTensor` in their place: a tensor of torch without elements, which has a
tensor of the session. The autograd graph keeps it, and the backward part reads the server's tensor.
When the autograd graph goes, so does the server's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

import heliograph as hg
from heliograph.torch.elements import as_tensor, torch_dtype


class SavedTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor of a session in the form of torch's, for the autograd graph alone.

    An op of torch on it reads the elements from the server, as saved-tensor hooks do.
    """

    _remote: hg.Tensor

    @staticmethod
    def __new__(cls, remote: hg.Tensor) -> SavedTensor:
        """Return a tensor of the shape and data type of the session's."""
        found: SavedTensor = torch.Tensor._make_wrapper_subclass(
            cls, remote.shape, dtype=torch_dtype(remote.dtype), device="cpu"
        )
        found._remote = remote
        return found

    def __repr__(self) -> str:
        return f"SavedTensor({self._remote!r})"

    @property
    def remote(self) -> hg.Tensor:
        """The tensor of the session."""
        return self._remote

    def elements(self) -> torch.Tensor:
        """Return the elements, read from the server."""
        return as_tensor(self._remote.get())

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        """Apply an op to the elements. Raises UnsupportedError for one that would change them."""
        named = named or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].remote)
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else named.get(argument.name)
            if isinstance(given, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise hg.UnsupportedError(
                    f"{func} would change a tensor that is saved for the backward pass",
                    advice="change a copy: tensor.clone()",
                )
        args, named = pytree.tree_map_only(cls, cls.elements, (args, named))
        return func(*args, **named)


def saved_outputs(outputs: int) -> range:
    """Return which outputs of the forward graph that is compiled now are saved tensors.

    There is none where torch does not tell, or where compiled autograd traces the backward pass
    with the saved tensors: these come back from the server then.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    found = getattr(metadata, "tensors_saved_for_backwards_slice", None)
    if not isinstance(found, slice) or torch._dynamo.config.compiled_autograd:
        return range(0)
    # No part overwrites a saved tensor, so a second backward pass may read it.
    metadata.bw_donated_idxs = []  # type: ignore[union-attr]
    return range(outputs)[found]
