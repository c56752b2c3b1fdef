"""Element types: which of ONNX's are data types of Heliograph, and how the narrow ones are stored.

Floats of 8 and 4 bits and integers of 4 and 2 bits have no data type here. A value of such a type
is computed as its codes: u8 for floats, i8 or u8 for integers. `Coded` carries the element type
along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

import heliograph as hg

Array: TypeAlias = np.ndarray[Any, Any]

#: Data types by ONNX's element types.
DIRECT: dict[int, str] = {
    TensorProto.FLOAT: "f32",
    TensorProto.DOUBLE: "f64",
    TensorProto.FLOAT16: "f16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.BOOL: "bool",
    TensorProto.INT8: "i8",
    TensorProto.INT16: "i16",
    TensorProto.INT32: "i32",
    TensorProto.INT64: "i64",
    TensorProto.UINT8: "u8",
    TensorProto.UINT16: "u16",
    TensorProto.UINT32: "u32",
    TensorProto.UINT64: "u64",
}
_ELEMENTS = {name: element for element, name in DIRECT.items()}


@dataclass(frozen=True, slots=True)
class Narrow:
    """An element type that is stored as codes of another type."""

    name: str
    numpy: np.dtype[Any]
    #: The data type of the codes.
    storage: str
    #: Bits of an integer; 0 for floats.
    bits: int = 0


NARROW: dict[int, Narrow] = {
    TensorProto.FLOAT8E4M3FN: Narrow("float8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), "u8"),
    TensorProto.FLOAT8E4M3FNUZ: Narrow("float8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz), "u8"),
    TensorProto.FLOAT8E5M2: Narrow("float8e5m2", np.dtype(ml_dtypes.float8_e5m2), "u8"),
    TensorProto.FLOAT8E5M2FNUZ: Narrow("float8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz), "u8"),
    TensorProto.FLOAT8E8M0: Narrow("float8e8m0", np.dtype(ml_dtypes.float8_e8m0fnu), "u8"),
    TensorProto.FLOAT4E2M1: Narrow("float4e2m1", np.dtype(ml_dtypes.float4_e2m1fn), "u8"),
    TensorProto.INT4: Narrow("int4", np.dtype(ml_dtypes.int4), "i8", 4),
    TensorProto.UINT4: Narrow("uint4", np.dtype(ml_dtypes.uint4), "u8", 4),
    TensorProto.INT2: Narrow("int2", np.dtype(ml_dtypes.int2), "i8", 2),
    TensorProto.UINT2: Narrow("uint2", np.dtype(ml_dtypes.uint2), "u8", 2),
}


@dataclass(frozen=True, slots=True)
class Coded:
    """A value of a narrow element type, as its codes, or of strings, as their places in `names`."""

    codes: hg.Value
    element: int
    names: Array | None = None


@dataclass(frozen=True, slots=True)
class Bounded:
    """A value whose size along one axis a run decides: padded to the most, and how many count."""

    value: hg.Value
    axis: int
    count: hg.Value


@dataclass(frozen=True, slots=True)
class Maps:
    """A dictionary for each row of a table, by the labels of its columns."""

    value: hg.Value
    labels: tuple[int | str, ...]


#: The meaning of a name of an ONNX graph while it is imported: a value of the device, perhaps of
#: a narrow type or of a size that is not known, a constant of the host, a sequence, or an absent
#: optional.
Item: TypeAlias = "hg.Value | Coded | Bounded | Maps | Array | list[Any] | None"


def name_of(element: int) -> str:
    """Return ONNX's name of an element type, such as "float"."""
    known: dict[int, str] = {number: name.lower() for name, number in TensorProto.DataType.items()}
    return known.get(element, f"element type {element}")


def element_of(item: Item) -> int:
    """Return the element type of a tensor."""
    if isinstance(item, Coded):
        return item.element
    if isinstance(item, np.ndarray):
        return element_of_array(item)
    if isinstance(item, (Bounded, Maps)):
        return element_of(item.value)
    assert isinstance(item, hg.Value)
    return _ELEMENTS[item.dtype.name]


def element_of_array(array: Array) -> int:
    """Return the element type of an array; 0 if it has none."""
    try:
        return int(helper.np_dtype_to_tensor_dtype(array.dtype))
    except ValueError:
        return TensorProto.STRING if array.dtype.kind in "OUS" else TensorProto.UNDEFINED


def numpy_dtype(element: int) -> np.dtype[Any]:
    """Return NumPy's dtype of an element type that has a value here."""
    if element in NARROW:
        return NARROW[element].numpy
    return np.dtype(helper.tensor_dtype_to_np_dtype(element))


def storage_of(element: int) -> str | None:
    """Return the data type that stores an element type; None if there is none."""
    return NARROW[element].storage if element in NARROW else DIRECT.get(element)


def encode(array: Array) -> Array:
    """Return the codes of an array of a narrow type, and other arrays as they are."""
    found = NARROW.get(element_of_array(array))
    if found is None:
        return array
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    return (
        contiguous.astype(np.int8 if found.storage == "i8" else np.uint8)
        if found.bits
        else (contiguous.view(np.uint8))
    )


def decode(array: Array, element: int) -> Array:
    """Return codes as an array of their narrow type; the opposite of `encode`."""
    found = NARROW.get(element)
    if found is None:
        return array
    return array.astype(found.numpy) if found.bits else np.ascontiguousarray(array).view(found.numpy)
