"""Elementwise nodes on truth values, integers, and several data types. Pure.

Instructions work on four bytes. Other elements are staged: floats of 16 bits as float32, integers
of fewer bits, and bool, as int32. So a chain of float32, int32, uint32 and bool is one step, in
which a mask is a register. Integers of one or two bytes that lie side by side are computed as they
lie, several in a value, and elements of any size are compared so. Other integers of 64 bits are
compared as two halves; other elements of 64 bits are only cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from heliograph_backends.cpu.kernels import Operation as Op
from heliograph_backends.cpu.kernels.program.elements import READ_AS, WRITTEN_AS
from heliograph_backends.cpu.lowering import moves
from heliograph_proto.graph import Node
from heliograph_proto.types import DType, TensorType

#: Data types of values that may stay in a register between nodes of a chain.
REGISTERS = frozenset({"f32", "i32", "u32", "bool"})
FLOATS = frozenset({"f32", "f16", "bf16"})
SMALL_INTEGERS = frozenset({"i8", "u8", "i16", "u16", "i32", "u32"})

#: Operations on the sources of a node: what it reads from 0, earlier results from the last one, -1,
#: and digits of constants.
Recipe: TypeAlias = tuple[tuple[Op, tuple[int | str, ...]], ...]
ZERO = "0x0.0p+0"
COPY: Recipe = ((Op.COPY, (0,)),)


class Typed(NamedTuple):
    """The instructions of a node, and the conversions of what it reads and writes."""

    recipe: Recipe
    #: Numbers of operands, with their conversions.
    reads: tuple[tuple[int, int], ...]
    written: int


def _one(operation: Op, *sources: int | str) -> Recipe:
    return ((operation, sources or (0, 1)),)


def _not(recipe: Recipe, zero: Op = Op.IS_ZERO) -> Recipe:
    return (*recipe, (zero, (-1,)))


def _compared(equal: Op, less: Op, less_equal: Op | None = None, zero: Op = Op.IS_ZERO) -> dict[str, Recipe]:
    found = {"equal": _one(equal), "not_equal": _not(_one(equal), zero)}
    found |= {"less": _one(less), "greater": _one(less, 1, 0)}
    for name, places in (("less_equal", (0, 1)), ("greater_equal", (1, 0))):
        # Without NaN, a <= b where not b < a.
        found[name] = _one(less_equal, *places) if less_equal else _not(_one(less, *places[::-1]), zero)
    return found


_FLOAT = {
    **_compared(Op.EQUAL, Op.LESS, Op.LESS_EQUAL),
    "isnan": _one(Op.IS_NAN, 0),
    "isinf": _one(Op.IS_INF, 0),
    "isfinite": _one(Op.IS_FINITE, 0),
    "signbit": _one(Op.INT_LESS, 0, ZERO),
}
_BOOL = {
    **_compared(Op.SAME, Op.INT_LESS),
    "logical_and": _one(Op.AND),
    "logical_or": _one(Op.OR),
    "logical_xor": _one(Op.XOR),
    "logical_not": _one(Op.IS_ZERO, 0),
}
_ALL_INTEGERS = {
    "add": _one(Op.INT_ADD),
    "sub": _one(Op.INT_SUB),
    "mul": _one(Op.INT_MUL),
    "sqr": _one(Op.INT_MUL, 0, 0),
    "neg": _one(Op.INT_SUB, ZERO, 0),
    "bitwise_invert": _one(Op.INVERT, 0),
    "bitwise_and": _one(Op.AND),
    "bitwise_or": _one(Op.OR),
    "bitwise_xor": _one(Op.XOR),
    "bitwise_left_shift": _one(Op.SHIFT_LEFT),
}
_INT = {
    **_ALL_INTEGERS,
    **_compared(Op.SAME, Op.INT_LESS),
    "maximum": _one(Op.INT_MAXIMUM),
    "minimum": _one(Op.INT_MINIMUM),
    "abs": _one(Op.INT_ABS, 0),
    "sgn": _one(Op.INT_SGN, 0),
    "floor_divide": _one(Op.INT_DIVIDE),
    "remainder": _one(Op.INT_REMAINDER),
    "bitwise_right_shift": _one(Op.INT_SHIFT_RIGHT),
}
_UINT = {
    **_ALL_INTEGERS,
    **_compared(Op.SAME, Op.UINT_LESS),
    "maximum": _one(Op.UINT_MAXIMUM),
    "minimum": _one(Op.UINT_MINIMUM),
    "abs": COPY,
    "sgn": _not(_one(Op.IS_ZERO, 0)),
    "floor_divide": _one(Op.UINT_DIVIDE),
    "remainder": _one(Op.UINT_REMAINDER),
    "bitwise_right_shift": _one(Op.UINT_SHIFT_RIGHT),
}
_WIDE = frozenset({"i64", "u64"})


def _halves_compared(name: str) -> dict[str, Recipe]:
    """Return the comparisons of 64 bits; the sources are two lower halves, then two higher ones."""

    def less(a: int, b: int) -> Recipe:
        higher = Op.INT_LESS if name == "i64" else Op.UINT_LESS
        lower: Recipe = ((Op.UINT_LESS, (a, b)), (Op.SAME, (2, 3)), (Op.AND, (-1, -2)))
        return (*lower, (higher, (a + 2, b + 2)), (Op.OR, (-1, -2)))

    equal: Recipe = ((Op.SAME, (0, 1)), (Op.SAME, (2, 3)), (Op.AND, (-1, -2)))
    return {
        "equal": equal,
        "not_equal": _not(equal),
        "less": less(0, 1),
        "greater": less(1, 0),
        "less_equal": _not(less(1, 0)),
        "greater_equal": _not(less(0, 1)),
    }


_BITS = {
    "bitwise_invert": _one(Op.INVERT, 0),
    "bitwise_and": _one(Op.AND),
    "bitwise_or": _one(Op.OR),
    "bitwise_xor": _one(Op.XOR),
}
_BYTES = {
    **_BITS,
    "add": _one(Op.BYTES_ADD),
    "sub": _one(Op.BYTES_SUB),
    "neg": _one(Op.BYTES_SUB, ZERO, 0),
}
_SHORTS = {
    **_BITS,
    "add": _one(Op.SHORTS_ADD),
    "sub": _one(Op.SHORTS_SUB),
    "neg": _one(Op.SHORTS_SUB, ZERO, 0),
    "mul": _one(Op.SHORTS_MUL),
    "sqr": _one(Op.SHORTS_MUL, 0, 0),
}
#: Instructions on elements that lie side by side, several at a time, by their data type.
_AS_THEY_LIE = {
    "i8": {
        **_BYTES,
        **_compared(Op.BYTES_SAME, Op.INT_BYTES_LESS, zero=Op.BYTES_ZERO),
        "maximum": _one(Op.INT_BYTES_MAXIMUM),
        "minimum": _one(Op.INT_BYTES_MINIMUM),
    },
    "u8": {
        **_BYTES,
        **_compared(Op.BYTES_SAME, Op.UINT_BYTES_LESS, zero=Op.BYTES_ZERO),
        "maximum": _one(Op.UINT_BYTES_MAXIMUM),
        "minimum": _one(Op.UINT_BYTES_MINIMUM),
    },
    "i16": {
        **_SHORTS,
        **_compared(Op.SHORTS_SAME, Op.INT_SHORTS_LESS, zero=Op.BYTES_ZERO),
        "maximum": _one(Op.INT_SHORTS_MAXIMUM),
        "minimum": _one(Op.INT_SHORTS_MINIMUM),
    },
    "u16": {
        **_SHORTS,
        **_compared(Op.SHORTS_SAME, Op.UINT_SHORTS_LESS, zero=Op.BYTES_ZERO),
        "maximum": _one(Op.UINT_SHORTS_MAXIMUM),
        "minimum": _one(Op.UINT_SHORTS_MINIMUM),
    },
    "i32": _compared(Op.WORDS_SAME, Op.INT_WORDS_LESS, zero=Op.BYTES_ZERO),
    "u32": _compared(Op.WORDS_SAME, Op.UINT_WORDS_LESS, zero=Op.BYTES_ZERO),
    "i64": _compared(Op.LONGS_SAME, Op.INT_LONGS_LESS, zero=Op.BYTES_ZERO),
    "u64": _compared(Op.LONGS_SAME, Op.UINT_LONGS_LESS, zero=Op.BYTES_ZERO),
    "f32": {
        **_compared(Op.FLOATS_EQUAL, Op.FLOATS_LESS, Op.FLOATS_LESS_EQUAL, zero=Op.BYTES_ZERO),
        "isnan": _not(_one(Op.FLOATS_EQUAL, 0, 0), Op.BYTES_ZERO),
    },
    # Any byte but 0 is true.
    "bool": {
        "logical_and": _one(Op.BYTES_BOTH),
        "logical_or": _one(Op.BYTES_EITHER),
        "logical_xor": _one(Op.BYTES_DIFFER),
        "equal": _one(Op.BYTES_AGREE),
        "not_equal": _one(Op.BYTES_DIFFER),
        "logical_not": _one(Op.BYTES_ZERO, 0),
    },
}

_OF_HALVES = {name: _halves_compared(name) for name in _WIDE}
#: Ops that may be typed.
OPS = frozenset(_FLOAT) | frozenset(_BOOL) | frozenset(_INT) | {"where", "cast"}


def typed(node: Node, types: Sequence[TensorType]) -> Typed | None:
    """Return the instructions of a node; None if it is none of this module's, or runs on the
    definition."""
    if node.op not in OPS:
        return None
    target = node.type.dtype.name
    if node.op == "cast":
        return _cast(types[0].dtype, node.type.dtype, moved=node.type.ndim > 0)
    if node.op == "where":
        names = {types[1].dtype.name, types[2].dtype.name, target}
        read = "bits" if target in FLOATS else "int"
        if len(names) > 1 or target not in REGISTERS | FLOATS | SMALL_INTEGERS:
            return None
        return _typed(
            _one(Op.WHERE, 0, 1, 2), ("bool", "int"), (target, read), (target, read), (target, read)
        )
    name = types[0].dtype.name
    if any(each.dtype is not types[0].dtype for each in types):
        return None
    if name in _WIDE:
        recipe = _OF_HALVES[name].get(node.op)
        return _of_halves(recipe, name, len(types)) if recipe else None
    recipe = _table(name).get(node.op)
    if recipe is None or target not in (name, "bool"):
        return None
    read = "float" if name in FLOATS else "int"
    return _typed(recipe, *[(name, read)] * len(types), (target, "int"))


def as_they_lie(node: Node, types: Sequence[TensorType]) -> Recipe | None:
    """Return the instructions of a node on several elements at a time; None unless it is one of
    some ops on elements of one type and of the result's shape."""
    kind = types[0].dtype
    if any(each.dtype is not kind or each.shape != node.type.shape for each in types):
        return None
    return _AS_THEY_LIE.get(kind.name, {}).get(node.op)


def _table(name: str) -> dict[str, Recipe]:
    if name in FLOATS:
        return _FLOAT
    if name == "u32":
        return _UINT
    return _INT if name in SMALL_INTEGERS else _BOOL if name == "bool" else {}


def _typed(recipe: Recipe, *uses: tuple[str, str]) -> Typed:
    *reads, written = uses
    pairs = tuple((place, READ_AS[each]) for place, each in enumerate(reads))
    return Typed(recipe, pairs, WRITTEN_AS[written])


def _of_halves(recipe: Recipe, name: str, operands: int) -> Typed:
    """Return the instructions that read the halves of operands of 64 bits, and write a truth
    value."""
    pairs = [(place, READ_AS[name, half]) for half in ("int", "high") for place in range(operands)]
    return Typed(recipe, tuple(pairs), WRITTEN_AS["bool", "int"])


def _cast(source: DType, target: DType, *, moved: bool) -> Typed | None:
    """Return the instructions of a cast. `moved`: those that end a chain are left to the kernel of
    moves, if it has them."""
    s, t = source.name, target.name
    ends = t not in REGISTERS or {s, t} <= FLOATS
    if s == t or (moved and ends and moves.conversion(source, target)):
        return None
    integers = SMALL_INTEGERS | {"bool"}
    if s in FLOATS:
        if t in FLOATS | {"f64", "i64"}:
            return _typed(COPY, (s, "float"), (t, "float"))
        if t in integers:
            kinds = {"bool": _not(_one(Op.EQUAL, 0, ZERO)), "u32": _one(Op.UINT_OF_FLOAT, 0)}
            return _typed(kinds.get(t, _one(Op.INT_OF_FLOAT, 0)), (s, "float"), (t, "int"))
    elif s in integers:
        if t in FLOATS:
            operation = Op.FLOAT_OF_UINT if s == "u32" else Op.FLOAT_OF_INT
            return _typed(_one(operation, 0), (s, "int"), (t, "float"))
        if t in _WIDE:
            return _typed(COPY, (s, "int"), (t, "uint" if s == "u32" else "int"))
        if t in integers:
            recipe = _not(_one(Op.IS_ZERO, 0)) if t == "bool" else COPY
            return _typed(recipe, (s, "int"), (t, "int"))
    elif s in _WIDE and t == "bool":
        return _of_halves(_not(_not(_one(Op.OR, 0, 1))), s, 1)
    elif s in _WIDE and t in SMALL_INTEGERS:
        return _typed(COPY, (s, "int"), (t, "int"))
    elif s in ("i64", "f64") and t == "f32":
        return _typed(COPY, (s, "float"), (t, "float"))
    return None
