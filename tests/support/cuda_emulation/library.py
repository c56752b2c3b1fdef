"""An array library of this host that is as strict as CuPy: `xp` of the emulated device.

NumPy computes. What CuPy has no name for, or takes no such argument of, there is not; arrays of the host are
no operands; every look at a value is a wait for the device, which is counted and refused while a capture is
recorded. Where CuPy computes otherwise than NumPy, so does this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from cuda_emulation.array import DeviceArray
from cuda_emulation.record import PATH, Record

#: Arguments of every ufunc in CuPy 13 and 14 that mean the same in both.
UFUNC_ARGUMENTS = frozenset({"out", "dtype"})
#: What `ufunc.at` can do without an order, and with which data types.
AT = {"add": "ilIefd", "subtract": "iI", "maximum": "iIfd", "minimum": "iIfd"}
#: What makes an array of the device of one of the host.
CREATING = frozenset({"array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray"})
KINDS = "biufc"


@cache
def record() -> Record:
    """What CuPy has."""
    found: Record = json.loads(PATH.read_text())
    return found


@cache
def signature(parameters: str) -> Signature:
    """Of parameters as they are recorded."""
    kind, found = Parameter.POSITIONAL_OR_KEYWORD, []
    for one in parameters.split():
        if one in ("*", "*args"):
            kind = Parameter.KEYWORD_ONLY
        if one in ("*args", "**"):
            rest = Parameter.VAR_POSITIONAL if one == "*args" else Parameter.VAR_KEYWORD
            found.append(Parameter(one.strip("*") or "rest", rest))
        elif one != "*":
            optional = None if one.endswith("=") else Parameter.empty
            found.append(Parameter(one.rstrip("="), kind, default=optional))
    return Signature(found)


class Library:
    """`xp`. `arrive` is called before memory is read or written, `wait` when a value is looked at."""

    def __init__(self, arrive: Callable[[], None], wait: Callable[[], None]) -> None:
        self._arrive, self._wait = arrive, wait
        #: How often the host waited for a value.
        self.waits = 0

    def __repr__(self) -> str:
        return f"<Library like CuPy {' and '.join(record()['versions'])}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._find(name)
        setattr(self, name, found)
        return found

    def _find(self, name: str) -> Any:
        if name in record()["others"]:
            return getattr(np, name)
        if name in record()["ufuncs"]:
            return Ufunc(self, name)
        if name in record()["functions"]:
            return partial(self.call, name)
        raise AttributeError(f"CuPy 13 or 14 has no {name}")

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """A function that is no ufunc."""
        signature(record()["functions"][name]).bind(*arguments, **named)
        if name in CREATING and isinstance(arguments[0], np.ndarray):
            # The host's may change or go.
            arguments = (self.given(arguments[0].copy()), *arguments[1:])
        given = [self.taken(one) for one in arguments]
        result = getattr(np, name)(*given, **{key: self.taken(value) for key, value in named.items()})
        if name.startswith("empty") and result.size:
            result.view(np.uint8)[...] = 0xFF if result.dtype.kind != "b" else 1
        return self.given(result)

    # Between arrays of the device and those that NumPy computes with

    def taken(self, value: Any) -> Any:
        """What NumPy is to compute with. Raises TypeError for what CuPy does not take."""
        self._arrive()
        if isinstance(value, DeviceArray):
            return value.host
        if isinstance(value, np.ndarray):
            raise TypeError(f"Unsupported type {type(value)}: an array of the host is no operand")
        if isinstance(value, tuple | list):
            return type(value)(self.taken(one) for one in value)
        return value

    def given(self, value: Any) -> Any:
        """What NumPy found as the device's: there are no scalars. Raises TypeError for data types that there
        are not."""
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.kind not in KINDS:
                raise TypeError(f"CuPy has no {value.dtype}")
            return DeviceArray(np.asarray(value), self)
        if isinstance(value, tuple | list):
            return type(value)(self.given(one) for one in value)
        return value

    def wait(self) -> None:
        """The host waits for the device. Raises where a capture may not."""
        self._wait()
        self.waits += 1


class Ufunc:
    """One of CuPy's ufuncs."""

    def __init__(self, library: Library, name: str) -> None:
        self._library = library
        self._name = name
        self._function = OTHERWISE.get(name) or getattr(np, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if others := set(named) - UFUNC_ARGUMENTS:
            raise TypeError(f"{self._name} takes no {', '.join(sorted(others))} in all of CuPy 13 and 14")
        given = [self._library.taken(one) for one in arguments]
        options = {name: self._library.taken(value) for name, value in named.items()}
        if self._name in OTHERWISE and len(given) > 2:
            options["out"] = given.pop()
        result = self._function(*given, **options)
        targets = (one for one in (*arguments, named.get("out")) if isinstance(one, DeviceArray))
        target = next((one for one in targets if one.host is result), None)
        return self._library.given(result) if target is None else target

    def at(self, target: Any, indices: Any, values: Any) -> None:
        """In no order. Raises TypeError for data types that CuPy adds without one."""
        if target.dtype.char not in AT.get(self._name, ""):
            raise TypeError(f"cupy.{self._name}.at does not take {target.dtype} in all of CuPy 13 and 14")
        taken = self._library.taken
        getattr(np, self._name).at(taken(target), taken(indices), taken(values))


# What CuPy computes otherwise


def _floor_divide(a: Any, b: Any, out: Any = None, dtype: Any = None) -> Any:
    """Of floats it is the quotient that is rounded down, also where that is infinite."""
    if np.result_type(a, b).kind != "f":
        return np.floor_divide(a, b, out=out, dtype=dtype)
    return np.floor(np.divide(a, b, dtype=dtype), out=out)


def _remainder(a: Any, b: Any, out: Any = None, dtype: Any = None) -> Any:
    if np.result_type(a, b).kind != "f":
        return np.remainder(a, b, out=out, dtype=dtype)
    return np.subtract(a, np.floor(np.divide(a, b, dtype=dtype)) * b, out=out)


OTHERWISE: Mapping[str, Callable[..., Any]] = {
    "floor_divide": _floor_divide, "remainder": _remainder, "mod": _remainder,
}  # fmt: skip
