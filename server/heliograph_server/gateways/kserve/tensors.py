"""Elements of requests as arrays, and arrays as elements. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from heliograph_proto.errors import InvalidInputError, LimitExceededError
from heliograph_proto.types import dtype

Array: TypeAlias = np.ndarray[Any, Any]

#: Heliograph's data types by the protocol's.
DATATYPES: dict[str, str] = {
    "BOOL": "bool",
    "UINT8": "u8", "UINT16": "u16", "UINT32": "u32", "UINT64": "u64",
    "INT8": "i8", "INT16": "i16", "INT32": "i32", "INT64": "i64",
    "FP16": "f16", "FP32": "f32", "FP64": "f64", "BF16": "bf16",
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in DATATYPES.items()}
#: The data type of texts: arrays of NumPy's objects, each of which is bytes.
BYTES = "BYTES"
_KNOWN = (*DATATYPES, BYTES)
#: The field of InferTensorContents with the elements of a data type.
CONTENTS: dict[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
_KINDS = {
    "bool_contents": "?", "int_contents": "<i4", "int64_contents": "<i8", "uint_contents": "<u4",
    "uint64_contents": "<u8", "fp32_contents": "<f4", "fp64_contents": "<f8", "bytes_contents": "O",
}  # fmt: skip
#: Elements that are converted in one go: in some ms, between which other threads have their turns.
PART = 2**14
#: Requests with more bytes of typed elements or JSON are decoded on a thread.
MOST_ON_LOOP = 2**18
#: The most elements of a tensor of a request.
MOST_ELEMENTS = 2**31
#: The most texts of a tensor: each is an object, and takes a turn of the interpreter.
MOST_TEXTS = 1024
#: The size of a dimension that may have any.
ANY = -1


@dataclass(frozen=True, slots=True)
class TensorPort:
    """An input or output of a model."""

    name: str
    #: The protocol's data type.
    datatype: str
    #: Sizes, or ANY.
    shape: tuple[int, ...]
    #: True for an input that a request may leave out.
    is_optional: bool = False

    def __str__(self) -> str:
        return f"{self.name!r:.80} is {self.datatype} {list(self.shape)}"


def datatype_of(name: str) -> str:
    """Return the protocol's name of one of our data types; "" if it has none."""
    return _NAMES.get(name, "")


def check_port(port: TensorPort, datatype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a request's tensor. Raises InvalidInputError if it does not fit its
    port."""
    if datatype != port.datatype:
        known = datatype in _KNOWN
        advice = f"the model takes {port.datatype}" if known else f"data types: {', '.join(_KNOWN)}"
        raise InvalidInputError(f"input {port}, and {datatype!r:.40} is given", advice=advice)
    # A shape of a message may have as many sizes as fit there.
    sizes = tuple(shape[: len(port.shape) + 1])
    fits = len(sizes) == len(port.shape)
    for want, have in zip(port.shape, sizes, strict=False):
        fits = fits and have >= 0 and want in (ANY, have)
    if not fits:
        shown = f"{list(sizes)}" if len(sizes) == len(shape) else f"of {len(shape):,} sizes"
        raise InvalidInputError(
            f"input {port}, and the shape {shown:.200} is given", advice=f"{ANY} stands for any size"
        )
    # NumPy's bound counts a size of 0 as 1.
    most = MOST_TEXTS if port.datatype == BYTES else MOST_ELEMENTS
    if math.prod([size or 1 for size in sizes]) > most:
        raise LimitExceededError(
            f"input {port.name!r:.80} has more than {most:,} elements", advice="send fewer at a time"
        )
    return sizes


def from_bytes(port: TensorPort, shape: tuple[int, ...], data: bytes | bytearray | memoryview) -> Array:
    """Return the array of little-endian bytes, which it does not copy. Raises InvalidInputError."""
    if port.datatype == BYTES:
        return _texts(port, shape, memoryview(data))
    kind = numpy_of(port.datatype)
    needed = math.prod(shape) * kind.itemsize
    if len(data) != needed:
        raise InvalidInputError(
            f"input {port.name!r:.80} of {port.datatype} {list(shape)} has {needed:,} bytes, "
            f"and {len(data):,} are given"
        )
    found = np.frombuffer(data, kind).reshape(shape)
    if port.datatype == "BOOL" and found.size and found.view(np.uint8).max() > 1:
        raise InvalidInputError(f"a byte of input {port.name!r:.80} of BOOL is neither 0 nor 1")
    return found


def _texts(port: TensorPort, shape: tuple[int, ...], data: memoryview) -> Array:
    """Return texts, each of which has its size in four bytes before it. Raises InvalidInputError."""
    found: list[bytes] = []
    place, count = 0, math.prod(shape)
    while place < len(data) and len(found) < count:
        end = place + 4 + int.from_bytes(data[place : place + 4], "little")
        if end > len(data):
            break
        found.append(bytes(data[place + 4 : end]))
        place = end
    if len(found) != count or place != len(data):
        raise InvalidInputError(
            f"input {port.name!r:.80} of {port.datatype} {list(shape)} has {count:,} texts, and its "
            f"{len(data):,} bytes are other than that many",
            advice="each text has its number of bytes before it, in 4 bytes",
        )
    return _objects(found, shape)


def _objects(texts: Sequence[Any], shape: tuple[int, ...]) -> Array:
    made = np.empty(len(texts), object)
    made[:] = texts
    return made.reshape(shape)


def from_contents(port: TensorPort, shape: tuple[int, ...], elements: Sequence[Any]) -> Array:
    """Return the array of the elements in the field of a data type. Raises InvalidInputError for
    others than the data type has, or as many."""
    _check_count(port, shape, len(elements))
    found = np.empty(len(elements), _KINDS[CONTENTS[port.datatype]])
    for start in range(0, len(elements), PART):
        found[start : start + PART] = elements[start : start + PART]
    return _as_port(port, shape, found)


def from_elements(port: TensorPort, shape: tuple[int, ...], elements: list[Any]) -> Array:
    """Return the array of elements, perhaps in lists of lists. Raises InvalidInputError for others
    than the data type has, or as many."""
    if port.datatype == BYTES:
        return _as_port(port, shape, np.asarray(elements, object))
    try:
        found = _array_of(elements)
    except (ValueError, OverflowError):
        raise InvalidInputError(f"the elements of input {port.name!r:.80} are no array") from None
    if port.datatype == "UINT64" and found.dtype.kind == "f":
        # NumPy makes floats of integers on both sides of 2^63.
        exact = np.asarray(elements, object)
        if all(type(one) is int and one >= 0 for one in exact.flat):
            found = exact.astype(np.uint64)
    return _as_port(port, shape, found)


def _array_of(elements: list[Any]) -> Array:
    """Return what NumPy makes of elements, or of lists of lists. Raises ValueError,
    OverflowError."""
    size = PART
    if elements and isinstance(elements[0], list):
        size = max(1, PART // max(1, len(elements[0])))
    if len(elements) <= size:
        return np.asarray(elements)
    starts = range(0, len(elements), size)
    return np.concatenate([np.asarray(elements[start : start + size]) for start in starts])


def _check_count(port: TensorPort, shape: tuple[int, ...], count: int) -> None:
    if count != math.prod(shape):
        raise InvalidInputError(
            f"input {port.name!r:.80} of shape {list(shape)} has {math.prod(shape):,} elements, "
            f"and {count:,} are given"
        )


def _as_port(port: TensorPort, shape: tuple[int, ...], found: Array) -> Array:
    _check_count(port, shape, found.size)
    if port.datatype == BYTES:
        return _objects([_encoded(port, one) for one in found.flat], shape)
    kind = numpy_of(port.datatype)
    if not found.size:
        return np.zeros(shape, kind)
    if not _is_kind(found, port.datatype):
        raise InvalidInputError(f"the elements of input {port.name!r:.80} are not of {port.datatype}")
    return found.astype(kind).reshape(shape)


def _encoded(port: TensorPort, element: Any) -> bytes:
    """Return a text of JSON, or bytes, as bytes. Raises InvalidInputError."""
    try:
        return element if isinstance(element, bytes) else element.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidInputError(f"the elements of input {port.name!r:.80} are not of {BYTES}") from None


def _is_kind(found: Array, datatype: str) -> bool:
    """True if elements have values of a data type."""
    if datatype == "BOOL":
        return found.dtype.kind == "b" or (found.dtype.kind in "iu" and bool(((found | 1) == 1).all()))
    if datatype[0] in "FB":
        return found.dtype.kind in "fiu"
    if found.dtype.kind not in "iu":
        return False
    bounds = np.iinfo(numpy_of(datatype))
    return int(found.min()) >= bounds.min and int(found.max()) <= bounds.max


@lru_cache
def numpy_of(datatype: str) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype of one of DATATYPES."""
    return dtype(DATATYPES[datatype]).numpy


def to_bytes(array: Array) -> bytes:
    """Return the little-endian bytes of an array; of a text, its size in four bytes and itself."""
    if array.dtype != object:
        return array.tobytes()
    return b"".join(len(one).to_bytes(4, "little") + one for one in array.flat)


def to_elements(array: Array) -> list[Any]:
    """Return the elements of an array for JSON, flat."""
    found: list[Any] = array.reshape(-1).tolist()
    return [one.decode(errors="replace") for one in found] if array.dtype == object else found


def to_json(array: Array) -> Iterator[str]:
    """Yield the elements of an array as parts of JSON, flat. Raises ValueError for numbers that
    JSON lacks."""
    flat = array.reshape(-1)
    yield "["
    for start in range(0, flat.size, PART):
        part = json.dumps(to_elements(flat[start : start + PART]), allow_nan=False)[1:-1]
        yield f", {part}" if start else part
    yield "]"


def text(value: str) -> Array:
    """Return a text as the only element of an output."""
    return _objects([value.encode(errors="replace")], (1,))


def datatype_of_array(array: Array) -> str:
    """Return the protocol's data type of an output. Raises InvalidInputError for one that the
    protocol lacks."""
    return _datatype_of_numpy(array.dtype)


# Each output of each answer asks.
@lru_cache
def _datatype_of_numpy(found: np.dtype[Any]) -> str:
    if found.hasobject:
        return BYTES
    try:
        return _NAMES[dtype(found).name]
    except (KeyError, TypeError, ValueError):
        raise InvalidInputError(f"the protocol has no data type for {found}") from None


def check_inputs(ports: Sequence[TensorPort], given: Sequence[str]) -> None:
    """Check that a request gives each input once. Raises InvalidInputError."""
    names = [port.name for port in ports]
    if given == names:
        return
    for name in given:
        if name not in names:
            raise InvalidInputError(
                f"the model has no input {name!r:.80}", advice=f"inputs: {', '.join(names):.400}"
            )
    if len(set(given)) != len(given):
        raise InvalidInputError("an input is given twice")
    if missing := [port for port in ports if port.name not in given and not port.is_optional]:
        raise InvalidInputError(f"input {missing[0].name!r:.80} is missing", advice=f"input {missing[0]}")


def wanted_outputs(ports: Sequence[TensorPort], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the outputs of an answer. Raises InvalidInputError for an unknown one."""
    names = [port.name for port in ports]
    for name in wanted:
        if name not in names:
            raise InvalidInputError(
                f"the model has no output {name!r:.80}", advice=f"outputs: {', '.join(names):.400}"
            )
    return tuple(wanted) or tuple(names)
