"""Headers of model files: the tensors of safetensors and GGUF files, read as untrusted input.

Only the header is read, everything that it announces is bounded, and every tensor must lie inside
of the file. Tensors of unsupported types are left out, by name.

The formats: https://huggingface.co/docs/safetensors and
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from heliograph_proto.errors import InvalidModelError
from heliograph_proto.graph import MAX_NAME
from heliograph_proto.types import MAX_DIMENSIONS, DType, TensorType, dtype, shape_problem

#: The longest header, in bytes, and the most tensors and other entries.
MAX_HEADER_BYTES = 64 * 2**20
MAX_TENSORS = 250_000
MAX_ENTRIES = 100_000

_SAFETENSORS = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL")
#: GGUF's numbers of data types.
_GGUF = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 30: "bf16",
}  # fmt: skip
#: The bytes of GGUF's plain values by type number; 8 is a string, 9 a list.
_GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_TEXT, _GGUF_LIST, _GGUF_U32 = 8, 9, 4
_ALIGNMENT_KEY = "general.alignment"


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor in a file."""

    name: str
    type: TensorType
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a file, and those left out, with their types."""

    extents: tuple[Extent, ...]
    left_out: tuple[str, ...]


class _BadError(Exception):
    """A malformed header, with the reason."""


def read_header(path: Path, name: str) -> Header:
    """Read the tensors of a file, by its suffix. Raises InvalidModelError, which calls the file
    `name`."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            made = FORMATS[path.suffix](file, size)
    except _BadError as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, RecursionError, struct.error) as error:
        reason = f"its header cannot be read: {error}"[:200]
    else:
        return made
    raise InvalidModelError(
        f"{name} is not a valid model: {reason}", advice="copy the file to the server again"
    )


def _header(found: Iterator[tuple[str, str, DType | None, tuple[int, ...], int, int]], size: int) -> Header:
    """Check (name, type's name, type, shape, first byte, end or -1) of each tensor against the
    file."""
    extents: dict[str, Extent] = {}
    left_out: list[str] = []
    for name, type_name, made, shape, begin, end in found:
        if not name or len(name) > MAX_NAME:
            raise _BadError(f"a tensor's name has {len(name)} characters")
        if made is None or 0 in shape:
            left_out.append(f"{name}: {type_name} {shape}")
            continue
        type_ = TensorType(made, shape)
        if reason := shape_problem(type_):
            raise _BadError(f"tensor {name!r}: {reason}")
        if name in extents:
            raise _BadError(f"two tensors are named {name!r}")
        if begin < 0 or begin + type_.nbytes > size or end not in (-1, begin + type_.nbytes):
            raise _BadError(
                f"tensor {name!r}, {type_.nbytes} bytes from byte {begin}, is outside of its {size} bytes"
            )
        extents[name] = Extent(name, type_, begin)
    return Header(tuple(extents.values()), tuple(left_out))


# safetensors


def _read_safetensors(file: BinaryIO, size: int) -> Header:
    length = int.from_bytes(_take(file, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise _BadError(f"a header of {length} bytes")
    entries = json.loads(_take(file, length))
    if not isinstance(entries, dict) or len(entries) > MAX_TENSORS:
        raise _BadError("its header is not a table of tensors")
    entries.pop("__metadata__", None)
    return _header((_entry(name, entry, 8 + length) for name, entry in entries.items()), size)


def _entry(name: str, entry: Any, start: int) -> tuple[str, str, DType | None, tuple[int, ...], int, int]:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            type(one) is int and one >= 0 for one in shape
        ):
            made = dtype(code.lower()) if code in _SAFETENSORS else None
            if begin < 0:
                raise _BadError(f"tensor {name!r} begins before the data")
            return name, code[:40], made, tuple(shape), start + begin, start + end
    raise _BadError(f"its entry of tensor {name[:100]!r} is malformed")


# GGUF


def _read_gguf(file: BinaryIO, size: int) -> Header:
    if _take(file, 4) != b"GGUF":
        raise _BadError("it does not start as a GGUF file")
    version, tensors, entries = struct.unpack("<IQQ", _take(file, 20))
    if version not in (2, 3):
        raise _BadError(f"GGUF version {version}; 2 and 3 are supported")
    if tensors > MAX_TENSORS or entries > MAX_ENTRIES:
        raise _BadError(f"{tensors} tensors and {entries} entries")
    alignment = _skip_entries(file, entries, size)
    found = [_gguf_tensor(file) for _ in range(tensors)]
    start = -(-file.tell() // alignment) * alignment
    return _header(((*one[:4], start + one[4], -1) for one in found), size)


def _skip_entries(file: BinaryIO, count: int, size: int) -> int:
    """Skip the entries and return the alignment of the data, the only entry that is needed."""
    alignment = 32
    for _ in range(count):
        key = _text(file)
        (kind,) = struct.unpack("<I", _take(file, 4))
        if key == _ALIGNMENT_KEY and kind == _GGUF_U32:
            (alignment,) = struct.unpack("<I", _take(file, 4))
        else:
            _skip(file, kind, size)
    if not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise _BadError(f"an alignment of {alignment}")
    return alignment


def _skip(file: BinaryIO, kind: int, size: int, depth: int = 0) -> None:
    """Skip a value. Lists may be nested four deep."""
    if kind == _GGUF_TEXT:
        _pass(file, struct.unpack("<Q", _take(file, 8))[0], size)
    elif kind == _GGUF_LIST and depth < 4:
        inner, count = struct.unpack("<IQ", _take(file, 12))
        if count > MAX_HEADER_BYTES:
            raise _BadError(f"a list of {count} values")
        if inner in _GGUF_BYTES:
            _pass(file, count * _GGUF_BYTES[inner], size)
        else:
            for _ in range(count):
                _skip(file, inner, size, depth + 1)
    elif kind in _GGUF_BYTES:
        _pass(file, _GGUF_BYTES[kind], size)
    else:
        raise _BadError(f"a value of type {kind}")


def _pass(file: BinaryIO, count: int, size: int) -> None:
    if count > size - file.tell() or file.tell() + count > MAX_HEADER_BYTES:
        raise _BadError("its header exceeds the file or the limit")
    file.seek(count, 1)


def _gguf_tensor(file: BinaryIO) -> tuple[str, str, DType | None, tuple[int, ...], int]:
    name = _text(file)
    (dimensions,) = struct.unpack("<I", _take(file, 4))
    if dimensions > MAX_DIMENSIONS:
        raise _BadError(f"tensor {name!r} has {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}Q", _take(file, 8 * dimensions))
    kind, offset = struct.unpack("<IQ", _take(file, 12))
    known = _GGUF.get(kind)
    # GGUF stores the fastest dimension first, Heliograph last.
    return name, known or f"ggml type {kind}", dtype(known) if known else None, shape[::-1], offset


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _take(file, 8))
    if length > 4 * MAX_NAME:
        raise _BadError(f"a name of {length} bytes")
    return _take(file, length).decode("utf-8")


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count or file.tell() > MAX_HEADER_BYTES + 8:
        raise _BadError("its header is truncated or too long")
    return data


#: The reader of a header, by the suffix of a file.
FORMATS: dict[str, Callable[[BinaryIO, int], Header]] = {
    ".safetensors": _read_safetensors,
    ".gguf": _read_gguf,
}
