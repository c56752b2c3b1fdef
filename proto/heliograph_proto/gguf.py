"""The header of a GGUF file: its metadata, and where its tensors lie. Read as untrusted input.

Nothing of a header is trusted. Counts are compared with the bytes that are there before anything is
made of them, every tensor lies inside of the file and on no other, and what is refused is named
with its place. Lists of words are checked at once and decoded at their first use.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from types import MappingProxyType
from typing import Any, BinaryIO, TypeAlias, TypeVar, overload

import numpy as np

from heliograph_proto.errors import InvalidModelError
from heliograph_proto.types import DTYPES, TensorType

#: The longest header, in bytes.
MAX_HEADER_BYTES = 64 * 2**20
MAX_TENSORS = 250_000
MAX_ENTRIES = 100_000
#: The most words and inner lists of all lists together.
MAX_ITEMS = 4_000_000
#: How deep lists lie in lists.
MAX_DEPTH = 4
#: The longest key of an entry, and the longest name of a tensor, in bytes.
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 1024
#: ggml's tensors have at most four dimensions.
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
ALIGNMENT_KEY = "general.alignment"
#: The entries of a part of a model: its number from 0, the number of parts, and of all tensors.
PART_KEY, PARTS_KEY, PARTS_TENSORS_KEY = "split.no", "split.count", "split.tensors.count"
#: The most files that a model is split into.
MAX_PARTS = 1024

#: ggml's data types by number: the name, the elements of a block, its bytes.
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36), 10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136), 24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8),
    28: ("f64", 1, 8), 29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18), 42: ("q2_0", 64, 18),
}  # fmt: skip
#: Of what a file says its weights mostly are ("general.file_type"), the names.
_FILE_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s",
    12: "q3_k_m", 13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k",
    19: "iq2_xxs", 20: "iq2_xs", 21: "q2_k_s", 22: "iq3_xs", 23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl",
    26: "iq3_s", 27: "iq3_m", 28: "iq2_s", 29: "iq2_m", 30: "iq4_xs", 31: "iq1_m", 32: "bf16",
    36: "tq1_0", 37: "tq2_0", 38: "mxfp4", 39: "nvfp4", 40: "q1_0",
    41: "q2_0",
}  # fmt: skip

#: Types of an entry's value by number, as NumPy names them. 8 is a text, 9 a list.
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32, _BOOL, _TEXT, _LIST = 4, 7, 8, 9

_U32_FORM, _U64_FORM = struct.Struct("<I"), struct.Struct("<Q")
_READS = (2**20, 8 * 2**20, MAX_HEADER_BYTES)
#: The errors of `unpack_from` behind the end.
_BEHIND = (struct.error, OverflowError, IndexError)

Value: TypeAlias = "bool | int | float | str | np.ndarray[Any, Any] | Words | tuple[Any, ...]"
T = TypeVar("T", bool, int, float, str)


class Words(Sequence[str]):
    """A list of texts in a header, decoded at its first use. Raises InvalidModelError there for a
    text that is not UTF-8."""

    __slots__ = ("_count", "_data", "_decoded", "_place")

    def __init__(self, data: bytes, count: int, place: str) -> None:
        self._data = data
        self._count = count
        self._place = place
        self._decoded: tuple[str, ...] | None = None

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __repr__(self) -> str:
        return f"<Words {self._place}, {self._count} of them>"

    def _all(self) -> tuple[str, ...]:
        if self._decoded is None:
            found, at, data, length = [], 0, self._data, _U64_FORM.unpack_from
            try:
                for _ in repeat(None, self._count):
                    begin = at + 8
                    at = begin + length(data, at)[0]
                    found.append(data[begin:at].decode())
            except UnicodeDecodeError:
                raise InvalidModelError(f"{self._place}: word {len(found)} is not UTF-8") from None
            self._decoded = tuple(found)
        return self._decoded


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file."""

    name: str
    #: ggml's name of the type in small letters, or "ggml type N" where it is unknown.
    type_name: str
    #: Slowest dimension first, as everywhere here; GGUF has them the other way round.
    shape: tuple[int, ...]
    #: Where its bytes begin in the file.
    offset_bytes: int
    #: None for an unknown type.
    nbytes: int | None
    #: The file that has it, of a model that is split: its number from 0.
    part: int = 0

    @property
    def type(self) -> TensorType | None:
        """The type of the tensor; None where there is no such data type here, or no element."""
        known = DTYPES.get(self.type_name)
        return None if known is None or 0 in self.shape else TensorType(known, self.shape)


@dataclass(frozen=True, repr=False, eq=False)
class GgufHeader:
    """Everything that a GGUF file has before its tensors' bytes."""

    #: The name of the file in errors.
    name: str
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]
    alignment: int
    #: Where the tensors' bytes begin.
    data_offset: int

    def __repr__(self) -> str:
        return f"<GgufHeader of {self.name}: {len(self.metadata)} entries, {len(self.tensors)} tensors>"

    @property
    def architecture(self) -> str:
        """The model's architecture, such as "llama"; empty where the file has none."""
        return self.value("general.architecture", str, "")

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all tensors."""
        return sum(math.prod(one.shape) for one in self.tensors)

    @property
    def quantization(self) -> str:
        """The type of most weights: the file's own name of it ("q4_k_m"), else the type with the
        most elements."""
        named = self.metadata.get("general.file_type")
        if type(named) is int and named in _FILE_TYPES:
            return _FILE_TYPES[named]
        counts: dict[str, int] = {}
        for one in self.tensors:
            counts[one.type_name] = counts.get(one.type_name, 0) + math.prod(one.shape)
        return max(counts, key=lambda one: counts[one], default="")

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of an entry, which must be of a kind: bool, int, float or str.

        Raises InvalidModelError where it is of another, or missing without a default.
        """
        found = self.metadata.get(key)
        if found is None:
            if default is None:
                raise InvalidModelError(f"{self.name} has no entry {key!r}", advice=_INCOMPLETE)
            return default
        if kind is float and type(found) is int:
            return kind(found)
        if type(found) is not kind:
            raise InvalidModelError(
                f"{self.name}: entry {key!r} is {_described(found)}, not {kind.__name__}", advice=_INCOMPLETE
            )
        return found

    def words(self, key: str) -> Words:
        """The texts of a list. Raises InvalidModelError if the entry is none, or missing."""
        found = self.metadata.get(key)
        if isinstance(found, Words):
            return found
        what = "is missing" if found is None else f"is {_described(found)}, not a list of texts"
        raise InvalidModelError(f"{self.name}: entry {key!r} {what}", advice=_INCOMPLETE)

    def numbers(self, key: str) -> np.ndarray[Any, Any]:
        """The numbers of a list, read-only. Raises InvalidModelError if the entry is none, or
        missing."""
        found = self.metadata.get(key)
        if isinstance(found, np.ndarray):
            return found
        what = "is missing" if found is None else f"is {_described(found)}, not a list of numbers"
        raise InvalidModelError(f"{self.name}: entry {key!r} {what}", advice=_INCOMPLETE)


_INCOMPLETE = "convert the model to GGUF again, with a newer converter"


def _described(value: Value) -> str:
    if isinstance(value, (bool, int, float, str)):
        return f"{type(value).__name__} {value!r:.60}"
    return f"a list of {len(value)}"


def read_header(file: BinaryIO, name: str) -> GgufHeader:
    """Read the header of an open file, and of its tensors nothing.

    Raises InvalidModelError, which calls the file `name`.
    """
    size = file.seek(0, 2)
    data = b""
    for count in _READS:
        file.seek(0)
        data = file.read(min(count, size))
        try:
            return _Reader(data, size, name).header()
        except _ShortError:
            continue
    return parse_header(data, size, name)


def parse_header(data: bytes, size: int, name: str) -> GgufHeader:
    """Parse a header, with which `data` begins, of a file of `size` bytes.

    Raises InvalidModelError, which calls the file `name`.
    """
    reader = _Reader(data, size, name)
    try:
        return reader.header()
    except _ShortError:
        raise reader.refusal(f"the header goes on behind byte {len(data)}") from None


class _ShortError(Exception):
    """The header needs more bytes than are at hand, of those that the file has."""


class _Reader:
    """Goes through the bytes of a header once. `place` names what is read, for a refusal."""

    def __init__(self, data: bytes, size: int, name: str) -> None:
        self.data = data
        self.size = size
        self.name = name
        self.limit = min(size, MAX_HEADER_BYTES)
        self.at = 0
        self.place = "start"
        self.items = 0

    def refusal(self, reason: str) -> InvalidModelError:
        return InvalidModelError(
            f"{self.name} is not a valid model: {reason} ({self.place}, byte {min(self.at, self.size)})",
            advice="the file is damaged or incomplete: copy it again",
        )

    def header(self) -> GgufHeader:
        version, tensors, entries = self._start()
        metadata = self._metadata(entries)
        alignment = self._alignment(metadata)
        self.place = "tensors"
        self._check_count(tensors, MAX_TENSORS, 8 + 1 + 4 + 4 + 8, "tensors")
        found = [self._tensor(number) for number in range(tensors)]
        start = -(-self.at // alignment) * alignment
        made = tuple(self._placed(start, alignment, *one) for one in found)
        self._check_apart(made)
        return GgufHeader(self.name, version, MappingProxyType(metadata), made, alignment, start)

    def _start(self) -> tuple[int, int, int]:
        magic = self._take(4)
        if magic != b"GGUF":
            raise self.refusal(f"it begins with {magic!r}, not as a GGUF file")
        version = self._u32()
        if version and version & 0xFFFF == 0:
            raise self.refusal("it is a big-endian file; convert it to little-endian")
        if version not in (2, 3):
            raise self.refusal(f"GGUF version {version}; 2 and 3 are supported")
        return version, self._u64(), self._u64()

    def _check_count(self, count: int, most: int, least_bytes: int, what: str) -> None:
        """Raises a refusal for a count that is over a limit, or that the file has no bytes for."""
        if count > most:
            raise self.refusal(f"{count} {what}; at most {most} are allowed")
        if count * least_bytes > self.limit - self.at:
            raise self.refusal(f"{count} {what} do not fit into its {self.size} bytes")

    # Entries

    def _metadata(self, count: int) -> dict[str, Value]:
        self.place = "entries"
        self._check_count(count, MAX_ENTRIES, 8 + 4 + 1, "entries")
        found: dict[str, Value] = {}
        for number in range(count):
            self.place = f"entry {number}"
            key = self._text(MAX_KEY_BYTES)
            self.place = f"entry {key[:100]!r}"
            if not key or key in found:
                raise self.refusal("an empty key" if not key else "a key that was there before")
            found[key] = self._value(self._u32(), 0)
        return found

    def _value(self, kind: int, depth: int) -> Value:
        if kind == _TEXT:
            return self._text(MAX_HEADER_BYTES)
        if kind == _LIST:
            return self._list(depth)
        if kind == _BOOL:
            value = self._take(1)[0]
            if value > 1:
                raise self.refusal(f"a truth value of {value}")
            return bool(value)
        made: bool | int | float = self._array(kind, 1)[0].item()
        return made

    def _list(self, depth: int) -> Value:
        if depth == MAX_DEPTH:
            raise self.refusal(f"lists in lists, deeper than {MAX_DEPTH}")
        kind, count = self._u32(), self._u64()
        if kind == _TEXT:
            return self._words(count)
        if kind == _LIST:
            self._spend(count, 4 + 8)
            return tuple(self._list(depth + 1) for _ in range(count))
        return self._array(kind, count)

    def _array(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        """Numbers, read-only."""
        form = "u1" if kind == _BOOL else _NUMBERS.get(kind)
        if form is None:
            raise self.refusal(f"a value of type {kind}, which GGUF does not have")
        type_ = np.dtype(form)
        self._check_count(count, MAX_HEADER_BYTES, type_.itemsize, "values")
        found = np.frombuffer(self._take(count * type_.itemsize), type_)
        if kind != _BOOL:
            return found
        if count and found.max() > 1:
            raise self.refusal(f"a truth value of {found.max()}")
        return found.view(np.bool_)

    def _words(self, count: int) -> Words:
        self._spend(count, 8)
        start = at = self.at
        length, data = _U64_FORM.unpack_from, self.data
        try:
            # One look for each word; a length that leads behind the end fails at the next look.
            for _ in repeat(None, count):
                at += length(data, at)[0] + 8
        except _BEHIND:
            at += 8
        self.at = start
        self._check(at - start)
        self.at = at
        return Words(data[start:at], count, f"{self.name}, {self.place}")

    def _spend(self, count: int, least_bytes: int) -> None:
        self._check_count(count, MAX_ITEMS - self.items, least_bytes, "values")
        self.items += count

    def _alignment(self, metadata: dict[str, Value]) -> int:
        self.place = f"entry {ALIGNMENT_KEY!r}"
        found = metadata.get(ALIGNMENT_KEY, 32)
        if type(found) is not int or not 0 < found <= MAX_ALIGNMENT or found & (found - 1):
            raise self.refusal(f"an alignment of {found!r:.40}, which is no power of two to {MAX_ALIGNMENT}")
        return found

    # Tensors

    def _tensor(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        self.place = f"tensor {number}"
        name = self._text(MAX_NAME_BYTES)
        self.place = f"tensor {name[:100]!r}"
        if not name:
            raise self.refusal("an empty name")
        dimensions = self._u32()
        if dimensions > MAX_DIMENSIONS:
            raise self.refusal(f"{dimensions} dimensions; ggml has at most {MAX_DIMENSIONS}")
        shape = tuple(self._u64() for _ in range(dimensions))
        return name, shape[::-1], self._u32(), self._u64()

    def _placed(
        self, start: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        """Check where a tensor lies, by its type's size."""
        self.place = f"tensor {name[:100]!r}"
        known, block, block_bytes = _TYPES.get(kind, (f"ggml type {kind}", 1, 0))
        row = shape[-1] if shape else 1
        if row % block:
            raise self.refusal(f"rows of {row} elements, which are no whole blocks of {known}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset % alignment:
            raise self.refusal(f"it lies at byte {offset}, which is no multiple of {alignment}")
        if nbytes + offset > self.size - start and (nbytes or offset):
            raise self.refusal(
                f"{nbytes} bytes from byte {start + offset} are outside of the file's {self.size} bytes"
            )
        return GgufTensor(name, known, shape, start + offset, nbytes if block_bytes else None)

    def _check_apart(self, tensors: tuple[GgufTensor, ...]) -> None:
        names: set[str] = set()
        end, before = 0, ""
        for one in tensors:
            self.place = f"tensor {one.name[:100]!r}"
            if one.name in names:
                raise self.refusal("two tensors have this name")
            names.add(one.name)
        for one in sorted((one for one in tensors if one.nbytes != 0), key=lambda one: one.offset_bytes):
            self.place = f"tensor {one.name[:100]!r}"
            if one.offset_bytes < end:
                raise self.refusal(f"it lies on bytes of tensor {before!r}")
            end, before = one.offset_bytes + (one.nbytes or 1), one.name[:100]

    # Bytes

    def _check(self, count: int) -> None:
        """Raises a refusal, or _ShortError, unless `count` more bytes of the header are there."""
        end = self.at + count
        if end > self.limit:
            what = "the file" if self.limit == self.size else f"the longest header, {self.limit} bytes"
            raise self.refusal(f"{count} bytes go behind the end of {what}")
        if end > len(self.data):
            raise _ShortError

    def _take(self, count: int) -> bytes:
        self._check(count)
        begin = self.at
        self.at = begin + count
        return self.data[begin : self.at]

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _text(self, most: int) -> str:
        length = self._u64()
        if length > most:
            raise self.refusal(f"a text of {length} bytes; at most {most} are allowed")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self.refusal("a text that is not UTF-8") from None


# Models that are split into several files


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of a part of a model: "stem-00001-of-00003.gguf"."""

    stem: str
    #: From 0.
    number: int
    total: int

    def of(self, number: int) -> str:
        """The name of another part."""
        return f"{self.stem}-{number + 1:05}-of-{self.total:05}.gguf"


_PART_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def part_name(name: str) -> PartName | None:
    """Return what the name of a file says of a part; None for a name of another form."""
    found = _PART_NAME.fullmatch(name)
    if found is None:
        return None
    part = PartName(found[1], int(found[2]) - 1, int(found[3]))
    return part if 0 <= part.number < part.total else None


def part_names(header: GgufHeader) -> tuple[str, ...]:
    """Return the names of the files that a model is in, in order: its own name alone if it is not
    split.

    Raises InvalidModelError where its entries and its name contradict each other.
    """
    count = header.value(PARTS_KEY, int, 1)
    if count <= 1:
        return (header.name,)
    number, found = header.value(PART_KEY, int), part_name(header.name)
    if count > MAX_PARTS:
        raise InvalidModelError(f"{header.name} is one of {count} parts; at most {MAX_PARTS} are supported")
    if found is None or (found.number, found.total) != (number, count):
        raise InvalidModelError(
            f"{header.name} says that it is part {number + 1} of {count}, and is not named so",
            advice=f"name it as it was split: MODEL-{number + 1:05}-of-{count:05}.gguf",
        )
    return tuple(map(found.of, range(count)))


def read_parts(header: GgufHeader, read: Callable[[str], GgufHeader]) -> tuple[GgufHeader, ...]:
    """Return the headers of all files of a model, in order; `header` is that of any of them.

    `read` reads another one by its name. Raises its errors, and those of `part_names`.
    """
    return tuple(header if name == header.name else read(name) for name in part_names(header))


def joined(parts: Sequence[GgufHeader]) -> GgufHeader:
    """Return the header of a whole model, which has the metadata of its first part.

    `parts` are all of its files, in order. Raises InvalidModelError if they are not of one model.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    names, places, tensors = part_names(first), dict[str, str](), list[GgufTensor]()
    for number, part in enumerate(parts):
        if part_names(part) != names or part.name != names[number]:
            raise InvalidModelError(f"{part.name} is no part of the model of {first.name}", advice=_AGAIN)
        for one in part.tensors:
            if (before := places.setdefault(one.name, part.name)) != part.name:
                raise InvalidModelError(f"{part.name} has tensor {one.name[:100]!r} of {before} again")
            tensors.append(replace(one, part=number))
    if len(tensors) != (expected := first.value(PARTS_TENSORS_KEY, int, len(tensors))):
        raise InvalidModelError(
            f"{first.name} is of a model with {expected} tensors, and its {len(parts)} parts have "
            f"{len(tensors)}",
            advice=_AGAIN,
        )
    if len(tensors) > MAX_TENSORS:
        raise InvalidModelError(f"{first.name} has {len(tensors)} tensors; at most {MAX_TENSORS} are allowed")
    return replace(first, tensors=tuple(tensors))


_AGAIN = "copy all of its parts again, from one place"
