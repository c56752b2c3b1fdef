"""Access to a tensor as to a NumPy array, which asyncio does not have because it cannot wait there."""

from __future__ import annotations

from typing import Any

import numpy as np

from heliograph._base.tensor import TensorBase


class ArrayAccess(TensorBase):
    """Errors for subscripts and `np.asarray`, which name the asyncio way."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("under hg.aio a part is written with: await tensor[key].set(array)")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise TypeError("under hg.aio a tensor is read with: await tensor.get()")
