"""Data types and tensor types, and the text forms of sizes.

The unit of storage is the block: one element, or for ggml's quantized types a block of elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from heliograph_proto.v1 import tensor_pb2

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Kind: TypeAlias = Literal["float", "int", "uint", "bool", "quantized"]

#: The most dimensions of a tensor.
MAX_DIMENSIONS = 8
#: The most bytes of a tensor: offsets and sizes stay below 2**63.
MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """The type of a tensor's elements, or of its blocks. Each type is one object."""

    name: str
    number: tensor_pb2.DataType.ValueType
    kind: Kind
    block_bytes: int
    #: Elements in a block; 1 unless quantized.
    block_size: int = 1
    #: NumPy's full name; empty if NumPy has no such type.
    numpy_name: str = ""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"dtype({self.name})"

    def __reduce__(self) -> tuple[object, ...]:
        return (dtype, (self.name,))

    @property
    def itemsize(self) -> int:
        """The bytes per element; 0 for quantized types, whose unit is the block."""
        return self.block_bytes if self.block_size == 1 else 0

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype. Raises TypeError if there is none."""
        if self.name == "bf16":
            bfloat16: np.dtype[Any] = np.dtype(_bfloat16())
            return bfloat16
        if not self.numpy_name:
            raise TypeError(f"{self.name} has no NumPy dtype: it is stored in blocks of bytes")
        return np.dtype(self.numpy_name)

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype of the raw elements: uint16 for bf16's bits, uint8 for blocks."""
        if self.kind == "quantized":
            return np.dtype(np.uint8)
        return np.dtype(self.numpy_name or np.uint16)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError("bf16 in NumPy needs the package ml_dtypes: pip install ml_dtypes") from None
    return ml_dtypes.bfloat16


def _table() -> dict[str, DType]:
    number = tensor_pb2.DataType.Value
    rows = [
        DType("f64", number("DATA_TYPE_F64"), "float", 8, numpy_name="float64"),
        DType("f32", number("DATA_TYPE_F32"), "float", 4, numpy_name="float32"),
        DType("f16", number("DATA_TYPE_F16"), "float", 2, numpy_name="float16"),
        DType("bf16", number("DATA_TYPE_BF16"), "float", 2),
        DType("bool", number("DATA_TYPE_BOOL"), "bool", 1, numpy_name="bool"),
    ]
    for bits in (8, 16, 32, 64):
        signed, unsigned = number(f"DATA_TYPE_I{bits}"), number(f"DATA_TYPE_U{bits}")
        rows.append(DType(f"i{bits}", signed, "int", bits // 8, numpy_name=f"int{bits}"))
        rows.append(DType(f"u{bits}", unsigned, "uint", bits // 8, numpy_name=f"uint{bits}"))
    small = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "iq4_nl": 18, "mxfp4": 17}
    small["q8_1"] = 36
    large = {"q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210}
    large |= {"iq4_xs": 136, "tq1_0": 54, "tq2_0": 66}
    large |= {"iq1_s": 50, "iq1_m": 56, "iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82, "iq3_xxs": 98}
    large |= {"iq3_s": 110, "q8_k": 292}
    for size, blocks in ((32, small), (64, {"nvfp4": 36, "q2_0": 18}), (128, {"q1_0": 18}), (256, large)):
        for name, block_bytes in blocks.items():
            value = number(f"DATA_TYPE_{name.upper()}")
            rows.append(DType(name, value, "quantized", block_bytes, size))
    return {row.name: row for row in rows}


#: Every data type by its name.
DTYPES: dict[str, DType] = _table()
F64, F32, F16, BOOL, I32, I64, U32 = (DTYPES[n] for n in ("f64", "f32", "f16", "bool", "i32", "i64", "u32"))

_BY_NUMBER = {int(row.number): row for row in DTYPES.values()}
_BY_NUMPY_NAME = {row.numpy_name: row for row in DTYPES.values() if row.numpy_name}

DTypeArgument: TypeAlias = "DType | str | DTypeLike"


def dtype(argument: DTypeArgument) -> DType:
    """Return the data type of a Heliograph name ("f32"), a dtype of NumPy or PyTorch, or NumPy's
    full name.

    A short code has Heliograph's meaning ("i8" is eight bits). Codes with a byte order, such as
    "<i8", are rejected, since NumPy counts bytes in them. Raises TypeError.
    """
    if isinstance(argument, DType):
        return argument
    if isinstance(argument, str):
        return _by_name(argument)
    if argument is None:
        raise TypeError("a data type is missing; name one, such as 'f32'")
    if type(argument).__module__ == "torch":
        # torch.float32, by its name: torch need not be imported for that.
        return _by_name(str(argument).removeprefix("torch."))
    found = np.dtype(argument)
    if found.name == "bfloat16":
        return DTYPES["bf16"]
    if found.name not in _BY_NUMPY_NAME or not found.isnative:
        raise TypeError(f"no tensor can have NumPy's dtype {found!r}; known: {', '.join(DTYPES)}")
    return _BY_NUMPY_NAME[found.name]


def _by_name(name: str) -> DType:
    if name in DTYPES:
        return DTYPES[name]
    if name in _BY_NUMPY_NAME:
        return _BY_NUMPY_NAME[name]
    if name == "bfloat16":
        return DTYPES["bf16"]
    if name[:1] in "<>=|":
        raise TypeError(
            f"dtype {name!r}: codes with a byte order count bytes in NumPy and bits here; "
            "use a full name such as 'int64', or ours, such as 'i64'"
        )
    raise TypeError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")


def dtype_from_number(number: int) -> DType | None:
    """Return the data type of a number of the contract, or None."""
    return _BY_NUMBER.get(number)


@dataclass(frozen=True)
class TensorType:
    """Data type and shape (row-major; () is a scalar) of a tensor.

    `tensor_type` checks its arguments; the constructor does not, for the hot paths.
    """

    dtype: DType
    shape: tuple[int, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes when contiguous."""
        return self.size // self.dtype.block_size * self.dtype.block_bytes

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """The shape in blocks, the unit of `strides`; equal to `shape` unless quantized."""
        if self.dtype.block_size == 1:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // self.dtype.block_size)

    @cached_property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of its array of `dtype.storage`: rows of blocks are rows of bytes."""
        if self.dtype.block_size == 1:
            return self.shape
        return (*self.shape[:-1], self.block_shape[-1] * self.dtype.block_bytes)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The byte strides when contiguous. Quantized: the last one is the block's."""
        return contiguous_strides(self.shape, self.dtype)


def contiguous_strides(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Return the byte strides of a contiguous row-major tensor."""
    strides: list[int] = []
    step = dtype.block_bytes
    for place, size in enumerate(reversed(shape)):
        strides.append(step)
        step *= size if place else size // dtype.block_size
    return tuple(reversed(strides))


def tensor_type(dtype_argument: DTypeArgument, shape: tuple[int, ...]) -> TensorType:
    """Return a checked tensor type. Raises TypeError or ValueError with the reason."""
    made = TensorType(dtype(dtype_argument), tuple(int(size) for size in shape))
    if problem := shape_problem(made):
        raise ValueError(problem)
    return made


def shape_problem(found: TensorType) -> str:
    """Return a description of what is wrong with the shape of a tensor; empty if valid."""
    if found.ndim > MAX_DIMENSIONS:
        return f"{found.ndim} dimensions; a tensor has at most {MAX_DIMENSIONS}"
    if any(size < 0 for size in found.shape):
        return f"shape {found.shape}: a dimension cannot be negative"
    # Every non-zero dimension counts, even next to a zero, so that strides stay below 2**63 too.
    widest = math.prod(size for size in found.shape if size) * found.dtype.block_bytes
    if widest > MAX_BYTES:
        return f"shape {found.shape} of {found.dtype} passes 2**63 bytes"
    block = found.dtype.block_size
    if block > 1 and (not found.shape or found.shape[-1] % block):
        return f"shape {found.shape}: rows of {found.dtype} are whole blocks of {block} elements"
    return ""


#: The bytes of each unit; a number without a unit is bytes.
UNITS: Mapping[str, int] = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
#: For numbers that are not sizes.
NO_UNITS: Mapping[str, int] = {"": 1}
#: The maximum of a signed 64-bit integer.
MOST = 2**63 - 1


def parse_size(text: str, units: Mapping[str, int] = UNITS) -> int | None:
    """Parse a whole number followed by a unit, in bytes; None for other texts and from 2**63 on."""
    match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]*)", text)
    if match is None or match[2] not in units:
        return None
    number = int(match[1]) * units[match[2]]
    return number if number <= MOST else None


def size_text(size_bytes: float) -> str:
    """Format a number of bytes for people, in the largest unit that fits, such as "1.5 GiB"."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= UNITS[name]:
            return f"{size_bytes / UNITS[name]:.1f} {name}"
    return f"{size_bytes:.0f} B"
