"""Arrays of the emulated device: what `library.Library` computes with."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cuda_emulation.library import Library

#: Operators and their ufuncs.
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip
COMPARISONS = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal",
    "ne": "not_equal",
}  # fmt: skip
UNARY = {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}
#: Methods that look at values.
LOOKING = frozenset({"item", "tolist", "nonzero"})


class DeviceArray:
    """Memory of the device with a shape. NumPy gets at it only by `get` and `item`."""

    def __init__(self, host: np.ndarray[Any, Any], library: Library) -> None:
        #: What the emulation computes with.
        self.host = host
        self.library = library

    def __repr__(self) -> str:
        return f"<DeviceArray {self.host.dtype}{list(self.host.shape)}>"

    # What it says of itself, and its methods

    def __getattr__(self, name: str) -> Any:
        from cuda_emulation.library import record, signature

        if name in record()["attributes"]:
            found = getattr(self.host, name)
            return self.library.given(found) if isinstance(found, np.ndarray) else found
        if name not in record()["methods"]:
            raise AttributeError(f"arrays of CuPy 13 or 14 have no {name}")

        def method(*arguments: Any, **named: Any) -> Any:
            signature(record()["methods"][name]).bind(*arguments, **named)
            taken = self.library.taken
            self.library.taken(self)
            if name in LOOKING:
                self.library.wait()
            options = {key: taken(value) for key, value in named.items()}
            found = getattr(self.host, name)(*map(taken, arguments), **options)
            return found if name in ("item", "tolist") else self.library.given(found)

        return method

    @property
    def flat(self) -> DeviceArray:
        return self.ravel()  # type: ignore[no-any-return]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.host.__array_interface__)

    def get(self) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        self.library.wait()
        return np.array(self.library.taken(self))

    # NumPy

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        function = getattr(self.library, ufunc.__name__)
        return (function if method == "__call__" else getattr(function, method))(*inputs, **named)

    def __array_function__(self, function: Any, _types: Any, arguments: Any, named: Any) -> Any:
        return getattr(self.library, function.__name__)(*arguments, **named)

    # Elements

    def __getitem__(self, key: Any) -> Any:
        return self.library.given(self.library.taken(self)[self.library.taken(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        key, value = self.library.taken(key), self.library.taken(value)
        target = self.library.taken(self)
        if not any(isinstance(one, np.ndarray | list) for one in (key if isinstance(key, tuple) else (key,))):
            target[key] = value
            return
        # Whoever comes last stays, and on a device that is anybody: here the first.
        places = np.arange(target.size).reshape(target.shape)[key]
        values = np.broadcast_to(value, places.shape).astype(target.dtype)
        target[np.unravel_index(places.ravel()[::-1], target.shape)] = values.ravel()[::-1]

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self.host)))

    def _looked_at(self) -> Any:
        self.library.wait()
        return self.library.taken(self).item()

    def __bool__(self) -> bool:
        return bool(self._looked_at())

    def __int__(self) -> int:
        return int(self._looked_at())

    def __float__(self) -> float:
        return float(self._looked_at())

    def __index__(self) -> int:
        return operator.index(self._looked_at())

    __hash__ = None  # type: ignore[assignment]


def _operators() -> None:
    """Gives DeviceArray its operators, which are ufuncs."""

    def binary(ufunc: str) -> Any:
        return lambda self, other: getattr(self.library, ufunc)(self, other)

    def reflected(ufunc: str) -> Any:
        return lambda self, other: getattr(self.library, ufunc)(other, self)

    def in_place(ufunc: str) -> Any:
        return lambda self, other: getattr(self.library, ufunc)(self, other, out=self)

    for name, ufunc in BINARY.items():
        setattr(DeviceArray, f"__{name}__", binary(ufunc))
        setattr(DeviceArray, f"__r{name}__", reflected(ufunc))
        setattr(DeviceArray, f"__i{name}__", in_place(ufunc))
    for name, ufunc in COMPARISONS.items():
        setattr(DeviceArray, f"__{name}__", binary(ufunc))
    for name, ufunc in UNARY.items():
        setattr(DeviceArray, f"__{name}__", lambda self, ufunc=ufunc: getattr(self.library, ufunc)(self))


_operators()
