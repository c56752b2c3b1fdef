"""Shape and data type rules of the op table: pure functions from operand types to a result type.

Each takes the operands' types and the complete attributes, and returns the result's type or raises
InvalidGraphError, whose message has the given values and the requirement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.types import BOOL, F32, I32, I64, MAX_DIMENSIONS, U32, DType, TensorType, shape_problem

Types: TypeAlias = Sequence[TensorType]
Attributes: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Types, Attributes], TensorType]

#: The largest size, stride or offset of an attribute: ggml's have 32 bits.
LARGEST = 2**31 - 1


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast shapes by NumPy's rule: aligned at the last dimension, where a 1 stretches."""
    rank = max(map(len, shapes), default=0)
    result: list[int] = []
    for place in range(-rank, 0):
        sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
        if len(sizes) > 1:
            named = " and ".join(map(str, shapes))
            raise InvalidGraphError(
                f"shapes {named} do not broadcast: dimension {place} is {sorted(sizes)}",
                advice="sizes, aligned at the last dimension, must be equal or 1; reshape one operand",
            )
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def normalize_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the front. Raises InvalidGraphError."""
    if not -rank <= axis < rank:
        raise InvalidGraphError(f"axis {axis} does not exist: the operand has {rank} dimensions")
    return axis % rank


def normalize_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return distinct axes counted from the front. Raises InvalidGraphError."""
    found = tuple(normalize_axis(axis, rank) for axis in axes)
    if len(set(found)) != len(found):
        raise InvalidGraphError(f"axes {tuple(axes)} name a dimension twice")
    return found


#: The data type of each kind to suggest for conversions.
_ONE_OF = {"float": "f32", "int": "i64", "uint": "u64", "bool": "bool", "quantized": "q8_0"}


def require_kind(types: Types, kinds: Sequence[str]) -> None:
    """Raise unless every operand's data type is of one of the kinds."""
    for found in types:
        if found.dtype.kind not in kinds:
            raise InvalidGraphError(
                f"an operand is {found}, but this op takes {' or '.join(kinds)} elements",
                advice=_conversion(found.dtype, kinds),
            )


def _conversion(found: DType, kinds: Sequence[str]) -> str:
    """Return advice on converting an operand to one of the kinds."""
    if found.kind == "quantized":
        expand = f"hg.astype(w, '{_ONE_OF[kinds[0]]}') expands them"
        return f"use blocks as the weights of hg.ops.mul_mat, its first operand; {expand}"
    convert = f"convert the {found} operand: hg.astype(..., '{_ONE_OF[kinds[0]]}')"
    if found.name == "u8" and "quantized" in kinds:
        return f"{convert}; rows of blocks need their data type: g.weight('w', rows, dtype='q4_0')"
    return convert


def require_one_dtype(types: Types) -> DType:
    """Return the data type that all operands share, or raise."""
    names = {found.dtype.name for found in types}
    if len(names) > 1:
        raise InvalidGraphError(
            f"operands have different data types: {', '.join(map(str, types))}",
            advice="convert one of them: hg.astype(..., dtype); functions under hg. promote automatically",
        )
    return types[0].dtype


FLOATS = ("float",)
NUMBERS = ("float", "int", "uint")
INTEGERS = ("int", "uint")
PLAIN = ("float", "int", "uint", "bool")
#: The kinds that moves accept: rows of blocks, too.
ANY = (*PLAIN, "quantized")
#: The kinds of a product's weights and of tables of rows.
WEIGHTS = ("float", "quantized")
#: Floats of 16 bits.
NARROW = ("f16", "bf16")


def same(kinds: Sequence[str]) -> Rule:
    """One operand; the result has its type."""

    def rule(types: Types, attributes: Attributes) -> TensorType:
        require_kind(types, kinds)
        return types[0]

    return rule


def to_bool(kinds: Sequence[str]) -> Rule:
    """One operand; the result has its shape and is bool."""

    def rule(types: Types, attributes: Attributes) -> TensorType:
        require_kind(types, kinds)
        return TensorType(BOOL, types[0].shape)

    return rule


def binary(kinds: Sequence[str]) -> Rule:
    """Operands of one data type that broadcast."""

    def rule(types: Types, attributes: Attributes) -> TensorType:
        require_kind(types, kinds)
        dtype = require_one_dtype(types)
        return TensorType(dtype, broadcast_shapes(*(found.shape for found in types)))

    return rule


def mixed(kinds: Sequence[str], *, blocks: bool = False) -> Rule:
    """As binary; or, as in ggml, f16 or bf16 with f32, and with `blocks` also blocks with f32.

    The result has the first operand's data type. Blocks do not stretch.
    """
    alike = binary(kinds)

    def rule(types: Types, attributes: Attributes) -> TensorType:
        first, second = types
        stored = blocks and first.dtype.kind == "quantized"
        if second.dtype is not F32 or not (stored or first.dtype.name in NARROW):
            return alike(types, attributes)
        shape = broadcast_shapes(first.shape, second.shape)
        if stored and shape != first.shape:
            raise InvalidGraphError(f"{second} does not broadcast to the shape of {first}")
        return TensorType(first.dtype, shape)

    return rule


def comparison(kinds: Sequence[str]) -> Rule:
    """As binary, with a bool result."""
    operands = binary(kinds)

    def rule(types: Types, attributes: Attributes) -> TensorType:
        return TensorType(BOOL, operands(types, attributes).shape)

    return rule


def where(types: Types, attributes: Attributes) -> TensorType:
    """A bool condition and two operands of one data type; all broadcast."""
    require_kind(types[:1], ("bool",))
    require_kind(types[1:], PLAIN)
    dtype = require_one_dtype(types[1:])
    return TensorType(dtype, broadcast_shapes(*(found.shape for found in types)))


def require_conversion(source: DType, target: DType) -> None:
    """Raise unless one data type converts to the other: blocks convert from and to floats."""
    for one, other in ((source, target), (target, source)):
        if one.kind == "quantized" and not other.is_float and other is not one:
            raise InvalidGraphError(
                f"{source} does not convert to {target}", advice=f"{one} converts only from and to floats"
            )


def cast(types: Types, attributes: Attributes) -> TensorType:
    """Any data type to any other; blocks from and to floats."""
    require_conversion(types[0].dtype, attributes["dtype"])
    return TensorType(attributes["dtype"], types[0].shape)


def bitcast(types: Types, attributes: Attributes) -> TensorType:
    """Numbers to others of as many bytes."""
    (x,), dtype = types, attributes["dtype"]
    for one in (x.dtype, dtype):
        if one.kind not in NUMBERS:
            raise InvalidGraphError(f"bitcast of {x} to {dtype}: both must be numbers")
    if x.dtype.block_bytes != dtype.block_bytes:
        sizes = f"{x.dtype.block_bytes} and {dtype.block_bytes}"
        raise InvalidGraphError(f"bitcast of {x} to {dtype}: their elements have {sizes} bytes")
    return TensorType(dtype, x.shape)


def cpy(types: Types, attributes: Attributes) -> TensorType:
    """As cast, to the type of a second operand with as many elements."""
    x, target = types
    require_conversion(x.dtype, target.dtype)
    if x.size != target.size:
        raise InvalidGraphError(f"cpy of {x} to {target}: {x.size} and {target.size} elements")
    return target


def scale(types: Types, attributes: Attributes) -> TensorType:
    """As same; the numbers may be infinite, but not NaN."""
    for name, value in attributes.items():
        if math.isnan(value):
            raise InvalidGraphError(f"{name} is NaN")
    return same(FLOATS)(types, attributes)


def clamp(types: Types, attributes: Attributes) -> TensorType:
    """As same; the bounds must be in order."""
    if not attributes["min"] <= attributes["max"]:
        raise InvalidGraphError(f"clamp: min {attributes['min']} is not <= max {attributes['max']}")
    return same(FLOATS)(types, attributes)


def rows_with_eps(types: Types, attributes: Attributes) -> TensorType:
    """A float operand with a last dimension; eps finite and not negative."""
    require_kind(types, FLOATS)
    require_rank(types[0], 1)
    if not (math.isfinite(attributes["eps"]) and attributes["eps"] >= 0):
        raise InvalidGraphError(f"eps is {attributes['eps']}; it must be finite and not negative")
    return types[0]


def require_rank(found: TensorType, least: int) -> None:
    """Raise unless the operand has at least that many dimensions."""
    if found.ndim < least:
        raise InvalidGraphError(f"operand {found} has {found.ndim} dimensions; at least {least} needed")


def reduction(kinds: Sequence[str], *, empty: bool) -> Rule:
    """Over `axes` (empty: all). `empty`: True if an empty reduction has a result."""

    def rule(types: Types, attributes: Attributes) -> TensorType:
        require_kind(types, kinds)
        shape = types[0].shape
        axes = normalize_axes(attributes["axes"], len(shape)) or tuple(range(len(shape)))
        if not empty and any(shape[axis] == 0 for axis in axes):
            raise InvalidGraphError(f"operand {types[0]} has nothing to reduce along axes {axes}")
        if attributes["keepdims"]:
            kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
        else:
            kept = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        return TensorType(types[0].dtype, kept)

    return rule


def last_axis_index(types: Types, attributes: Attributes) -> TensorType:
    """An index (i32) for each row."""
    require_kind(types, NUMBERS)
    require_rank(types[0], 1)
    if types[0].shape[-1] == 0:
        raise InvalidGraphError(f"operand {types[0]} has empty rows")
    require_i32_places(types[0].shape[-1])
    return TensorType(I32, types[0].shape[:-1])


def require_i32_places(length: int) -> None:
    """Raise unless i32 can index every place of a row."""
    if length >= 2**31:
        raise InvalidGraphError(f"rows of {length} elements: their places do not fit in i32")


def matmul(types: Types, attributes: Attributes) -> TensorType:
    """The array API's: [..., m, k] and [..., k, n] give [..., m, n]; leading dimensions
    broadcast."""
    left, right = types
    require_kind(types, NUMBERS)
    dtype = require_one_dtype(types)
    require_rank(left, 2)
    require_rank(right, 2)
    if left.shape[-1] != right.shape[-2]:
        raise InvalidGraphError(
            f"matmul of {left} and {right}: the left rows have {left.shape[-1]} elements, "
            f"the right columns {right.shape[-2]}",
            advice="transpose one of them: a @ b.mT",
        )
    batch = broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return TensorType(dtype, (*batch, left.shape[-2], right.shape[-1]))


def get_rows(types: Types, attributes: Attributes) -> TensorType:
    """Rows [..., n, d] and indices [..., r], equal leading dimensions, give [..., r, d].

    As in ggml, rows of narrow floats and of blocks come out as f32; other data types stay.
    """
    rows, indices = types
    if indices.dtype.name not in ("i32", "i64"):
        raise InvalidGraphError(f"indices are {indices}; they must be i32 or i64")
    require_rank(rows, 2)
    require_rank(indices, 1)
    if rows.shape[:-2] != indices.shape[:-1]:
        raise InvalidGraphError(f"get_rows of {rows} at {indices}: leading dimensions differ")
    narrow = rows.dtype.name in NARROW or rows.dtype.kind == "quantized"
    dtype = F32 if narrow else rows.dtype
    return TensorType(dtype, (*indices.shape, rows.shape[-1]))


def reshape(types: Types, attributes: Attributes) -> TensorType:
    """The same elements in row-major order; one size may be -1. Blocks stay whole."""
    target = list(attributes["shape"])
    size = types[0].size
    if target.count(-1) > 1 or any(length < -1 for length in target):
        raise InvalidGraphError(f"reshape to {tuple(target)}: at most one -1, others not negative")
    if -1 in target:
        rest = math.prod(length for length in target if length != -1)
        target[target.index(-1)] = size // rest if rest and size % rest == 0 else -1
    if -1 in target or math.prod(target) != size:
        raise InvalidGraphError(f"reshape of {types[0]} to {attributes['shape']}: {size} elements")
    return TensorType(types[0].dtype, tuple(target))


def permute(types: Types, attributes: Attributes) -> TensorType:
    """Dimensions in another order; of blocks, the last one stays the last."""
    shape, axes = types[0].shape, attributes["axes"]
    if len(axes) != len(shape):
        raise InvalidGraphError(f"permute of {types[0]} by {tuple(axes)}: every axis exactly once")
    order = normalize_axes(axes, len(shape))
    if types[0].dtype.kind == "quantized" and order[-1] != len(shape) - 1:
        raise InvalidGraphError(
            f"permute of {types[0]} by {tuple(axes)}: blocks lie along the last axis",
            advice="hg.ops.mul_mat(w, x) multiplies by the transpose of w; hg.astype(w, 'f32') expands w",
        )
    return TensorType(types[0].dtype, tuple(shape[axis] for axis in order))


def broadcast_to(types: Types, attributes: Attributes) -> TensorType:
    """Dimensions of size 1 repeated, and new ones in front."""
    target = tuple(attributes["shape"])
    if any(size < 0 for size in target) or len(target) > MAX_DIMENSIONS:
        raise InvalidGraphError(f"broadcast_to {target}: at most {MAX_DIMENSIONS} sizes, none < 0")
    if broadcast_shapes(types[0].shape, target) != target:
        raise InvalidGraphError(f"{types[0]} does not broadcast to {target}")
    return TensorType(types[0].dtype, target)


def slice_(types: Types, attributes: Attributes) -> TensorType:
    """[start, stop) by step along every dimension, within the operand; blocks stay whole."""
    shape = types[0].shape
    triples = [attributes["start"], attributes["stop"], attributes["step"]]
    if any(len(numbers) != len(shape) for numbers in triples):
        raise InvalidGraphError(
            f"slice of {types[0]}: start, stop and step need a number for every dimension"
        )
    sizes = []
    for size, start, stop, step in zip(shape, *triples, strict=True):
        if not (0 <= start <= stop <= size and step >= 1):
            raise InvalidGraphError(
                f"slice of {types[0]}: {start}:{stop}:{step} is not within a dimension of {size}",
                advice="bounds are not negative, in order, and inside; steps are at least 1",
            )
        sizes.append(len(range(start, stop, step)))
    block = types[0].dtype.block_size
    if block > 1 and (triples[0][-1] % block or triples[1][-1] % block or triples[2][-1] != 1):
        raise InvalidGraphError(
            f"slice of {types[0]}: rows can be cut only between blocks of {block} elements"
        )
    return TensorType(types[0].dtype, tuple(sizes))


def concat(types: Types, attributes: Attributes) -> TensorType:
    """Operands of one data type, equal in all dimensions but one, joined along that one."""
    dtype = require_one_dtype(types)
    require_rank(types[0], 1)
    axis = normalize_axis(attributes["axis"], types[0].ndim)
    shapes = [list(found.shape) for found in types]
    total = sum(shape[axis] for shape in shapes if len(shape) > axis)
    for shape in shapes:
        if len(shape) == len(shapes[0]):
            shape[axis] = total
    if any(shape != shapes[0] for shape in shapes):
        named = ", ".join(map(str, types))
        raise InvalidGraphError(f"concat of {named}: they may differ only in dimension {axis}")
    return TensorType(dtype, tuple(shapes[0]))


def fill(types: Types, attributes: Attributes) -> TensorType:
    """A constant of any shape; integers must fit, and bool is 0 or 1."""
    dtype: DType = attributes["dtype"]
    if dtype.kind not in PLAIN:
        raise InvalidGraphError(f"fill of {dtype} is not supported")
    is_bool = dtype.kind == "bool" and attributes["value"] in (0, 1)
    if not (dtype.is_float or is_bool or fits(attributes["value"], dtype)):
        raise InvalidGraphError(f"fill: {attributes['value']} is not a value of {dtype}")
    return TensorType(dtype, tuple(attributes["shape"]))


def fits(value: float, dtype: DType) -> bool:
    """True if an integer type can represent the number."""
    if not math.isfinite(value) or value != int(value):
        return False
    if not dtype.is_integer:
        return False
    bits = dtype.block_bytes * 8
    least = -(2 ** (bits - 1)) if dtype.kind == "int" else 0
    return bool(least <= value < least + 2**bits)


def arange(types: Types, attributes: Attributes) -> TensorType:
    """start, start + step, ... below stop; f32, as in ggml."""
    start, stop, step = (attributes[name] for name in ("start", "stop", "step"))
    if not all(map(math.isfinite, (start, stop, step))) or step == 0:
        raise InvalidGraphError(f"arange({start}, {stop}, {step}): finite numbers, step not 0")
    return TensorType(F32, (max(0, math.ceil((stop - start) / step)),))


def philox(types: Types, attributes: Attributes) -> TensorType:
    """Two i64 numbers give u32 bits or f32 numbers of any shape."""
    dtype: DType = attributes["dtype"]
    for name, found in zip(("seed", "counter"), types, strict=True):
        if found.dtype is not I64 or found.size != 1:
            raise InvalidGraphError(f"philox: the {name} is {found}; it must be one i64 element")
    if dtype not in (U32, F32):
        raise InvalidGraphError(f"philox of {dtype}: random numbers are u32 or f32")
    return TensorType(dtype, tuple(attributes["shape"]))


def assign(types: Types, attributes: Attributes) -> TensorType:
    """A variable and a value of exactly its type."""
    if types[0] != types[1]:
        raise InvalidGraphError(
            f"assign of {types[1]} to a variable of {types[0]}: the types must be equal",
            advice="convert the value with hg.astype, hg.reshape or hg.broadcast_to",
        )
    return types[0]


def check_result(found: TensorType) -> TensorType:
    """Raise if a result is not a valid tensor type. Every rule's result passes through here."""
    if problem := shape_problem(found):
        raise InvalidGraphError(f"the result would be {found}: {problem}")
    return found


def require_within(name: str, value: int, least: int, most: int = LARGEST) -> None:
    """Raise unless least <= value <= most."""
    if not least <= value <= most:
        raise InvalidGraphError(f"{name} is {value}; it must be from {least} to {most}")
