"""Access to a tensor as to a NumPy array: assignment to parts, and `np.asarray(tensor)`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from heliograph._base.tensor import TensorBase


class ArrayAccess(TensorBase):
    """Subscript assignment and conversion to an array, which the asyncio API cannot have."""

    @abstractmethod
    def set(self, array: Any) -> Any:
        """Write an array."""

    @abstractmethod
    def get(self) -> np.ndarray[Any, Any]:
        """Return the elements."""

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
