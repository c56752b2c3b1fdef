"""Headers of model files: the tensors of safetensors and GGUF files, read as untrusted input.

Only the header is read, everything that it announces is bounded, and every tensor must lie inside
of the file. Tensors of unsupported types are left out, by name.

The format of safetensors: https://huggingface.co/docs/safetensors. `heliograph_proto.gguf` has the
other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from heliograph_proto import gguf
from heliograph_proto.errors import InvalidModelError
from heliograph_proto.graph import MAX_NAME
from heliograph_proto.models import GgufSummary
from heliograph_proto.types import DType, TensorType, dtype, shape_problem

#: The longest header, in bytes, and the most tensors of safetensors.
MAX_HEADER_BYTES = 64 * 2**20
MAX_TENSORS = 250_000
#: The longest text of a summary, in characters.
MAX_SUMMARY_TEXT = 200
_MAX_U64 = 2**64 - 1

_SAFETENSORS = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL")


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor in a file."""

    name: str
    type: TensorType
    offset_bytes: int
    #: The file's path in the models' folder.
    file: str


@dataclass(frozen=True, slots=True)
class HeaderFile:
    """A file of a model."""

    #: Its path in the models' folder.
    name: str
    #: The bytes that have metadata, from the first on; 0 for formats without.
    metadata_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a model, and those left out, with their types."""

    extents: tuple[Extent, ...]
    left_out: tuple[str, ...]
    #: Several of a GGUF model that is split.
    files: tuple[HeaderFile, ...]
    #: Of a GGUF file.
    gguf: gguf.GgufHeader | None = None


class _BadError(Exception):
    """A malformed header, with the reason."""


def read_model(name: str, path_of: Callable[[str], Path]) -> Header:
    """Read the tensors of a model: of a file, or of all files of a GGUF model that is split.

    `path_of` finds a file by its name, and raises. Raises InvalidModelError, which calls a file by
    its name.
    """
    header = read_header(path_of(name), name)
    if header.gguf is None or len(names := gguf.part_names(header.gguf)) == 1:
        return header
    parts = [header if one == name else read_header(path_of(one), one) for one in names]
    return Header(
        tuple(extent for one in parts for extent in one.extents),
        tuple(text for one in parts for text in one.left_out),
        tuple(file for one in parts for file in one.files),
        gguf.joined([one.gguf for one in parts if one.gguf is not None]),
    )


def read_header(path: Path, name: str) -> Header:
    """Read the tensors of a file, by its suffix. Raises InvalidModelError, which calls the file
    `name`."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            made = FORMATS[path.suffix](file, size, name)
    except _BadError as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        reason = f"its header cannot be read: {error}"[:200]
    else:
        return made
    raise InvalidModelError(
        f"{name} is not a valid model: {reason}", advice="copy the file to the server again"
    )


def _header(
    found: Iterator[tuple[str, str, DType | None, tuple[int, ...], int, int]], size: int, file: str
) -> Header:
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
        extents[name] = Extent(name, type_, begin, file)
    return Header(tuple(extents.values()), tuple(left_out), (HeaderFile(file),))


# safetensors


def _read_safetensors(file: BinaryIO, size: int, name: str) -> Header:
    length = int.from_bytes(_take(file, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise _BadError(f"a header of {length} bytes")
    entries = json.loads(_take(file, length))
    if not isinstance(entries, dict) or len(entries) > MAX_TENSORS:
        raise _BadError("its header is not a table of tensors")
    entries.pop("__metadata__", None)
    found = (_entry(one, entry, 8 + length) for one, entry in entries.items())
    return _header(found, size, name)


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


def _read_gguf(file: BinaryIO, size: int, name: str) -> Header:
    whole = gguf.read_header(file, name)
    found = ((one, one.type) for one in whole.tensors)
    header = _header(
        (
            (one.name, one.type_name, type_.dtype if type_ else None, one.shape, one.offset_bytes, -1)
            for one, type_ in found
        ),
        size,
        name,
    )
    return replace(header, files=(HeaderFile(name, min(whole.data_offset, size)),), gguf=whole)


def summary(header: gguf.GgufHeader) -> GgufSummary:
    """Summarize a model. Entries of other types than they should have count as missing."""

    def text(key: str) -> str:
        found = header.metadata.get(key)
        return found[:MAX_SUMMARY_TEXT] if isinstance(found, str) else ""

    architecture = text("general.architecture")
    context = header.metadata.get(f"{architecture}.context_length")
    words = header.metadata.get("tokenizer.ggml.tokens")
    return GgufSummary(
        architecture,
        text("general.name"),
        min(header.parameters, _MAX_U64),
        context if type(context) is int and context > 0 else 0,
        header.quantization,
        text("tokenizer.ggml.model"),
        len(words) if isinstance(words, gguf.Words) else 0,
        bool(text("tokenizer.chat_template")),
    )


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count or file.tell() > MAX_HEADER_BYTES + 8:
        raise _BadError("its header is truncated or too long")
    return data


#: The reader of a header, by the suffix of a file.
FORMATS: dict[str, Callable[[BinaryIO, int, str], Header]] = {
    ".safetensors": _read_safetensors,
    ".gguf": _read_gguf,
}
