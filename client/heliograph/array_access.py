"""Access to a tensor as to a NumPy array: assignment to parts, `np.asarray(tensor)` and DLPack."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from heliograph._base.tensor import TensorBase
from heliograph_proto.errors import UnsupportedError


class ArrayAccess(TensorBase):
    """Subscript assignment and conversion to an array, which the asyncio API cannot have."""

    @abstractmethod
    def set(self, array: Any) -> Any:
        """Write an array."""

    @abstractmethod
    def get(self) -> np.ndarray[Any, Any]:
        """Return the elements."""

    @abstractmethod
    def map(self) -> np.ndarray[Any, Any]:
        """Map the memory as an array."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write a part: `t[1:3] = array`, broadcast to the part's shape. Another tensor is copied."""
        part = self[key]
        if isinstance(value, TensorBase):
            value.copy_to(part)
        else:
            part.set(part._broadcast(value))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the elements, for `np.asarray(tensor)`. Raises ValueError for `copy=False`."""
        if copy is False:
            raise ValueError("a tensor's elements are on the server; an array of them is always a copy")
        found = self.get()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Return the memory that `map` gives, for `torch.from_dlpack(tensor)` and the like.

        Raises BufferError for a tensor that cannot be mapped.
        """
        try:
            return self.map().__dlpack__(**options)
        except UnsupportedError as error:
            raise BufferError(f"{error.message}; {error.advice}") from None

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of mapped memory, which is the host."""
        return (1, 0)
