"""Steps that move rows: copies with conversion, rows by index. Pure.

They accept any data type: floats are rounded as in the definition, blocks are converted from and to
float32, and all other types are moved by the byte. Rows of blocks must be contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import PACK, UNPACK
from heliograph_backends.cpu.kernels.program.words import OUTER_DIMENSIONS
from heliograph_backends.cpu.lowering.products import STORED
from heliograph_proto.graph import Node
from heliograph_proto.types import F32, DType, TensorType, contiguous_strides

#: Ops that copy all elements, in order.
COPIES = frozenset({"cont", "cast", "bitcast", "cpy"})
#: Ops that combine rows of the target with others, in f32.
COMBINED = {
    "add_rows": k.Conversion.ADD_F32,
    "mul_rows": k.Conversion.MUL_F32,
    "max_rows": k.Conversion.MAX_F32,
    "min_rows": k.Conversion.MIN_F32,
}
#: Ops that write rows by index, and all that move rows by index.
SCATTERS = frozenset({"set_rows", *COMBINED})
INDEXED = SCATTERS | {"get_rows", "get_rows_back"}
BLOCKS = {each.name.lower(): each for each in k.Block}

Strides = tuple[int, ...]


class Move(NamedTuple):
    """The conversion of elements from one data type to another."""

    conversion: int
    #: True if shapes count stored bytes instead of elements.
    in_bytes: bool = False


def conversion(source: DType, target: DType) -> Move | None:
    """Return the conversion of rows, or None if no kernel has it."""
    if source is target:
        return Move(k.BYTES[source.storage.itemsize], source.kind == "quantized")
    name = f"{source.name}_{target.name}".upper()
    if name in k.Conversion.__members__:
        return Move(k.Conversion[name])
    if source.kind == "quantized" and target is F32 and source.name in STORED:
        return Move(UNPACK + STORED[source.name])
    if source is F32 and target.name in BLOCKS:
        return Move(PACK + BLOCKS[target.name])
    return None


def move_of(node: Node, types: Sequence[TensorType]) -> Move | None:
    """Return the conversion of a node's rows; None if no kernel runs it. `types`: those of its
    operands."""
    if node.op == "get_rows_back":
        return Move(k.Conversion.ADD_F32) if types[0].dtype is F32 else None
    if node.op == "bitcast":
        return Move(k.BYTES[node.type.dtype.block_bytes])
    if node.op in COPIES or node.op == "get_rows":
        return conversion(types[0].dtype, node.type.dtype)
    if node.op not in SCATTERS or not cycles(types[2].shape, types[1].shape[:-1]):
        return None
    if node.op == "set_rows":
        return conversion(types[1].dtype, node.type.dtype)
    return Move(COMBINED[node.op]) if node.type.dtype is F32 else None


def cycles(found: Sequence[int], wanted: Sequence[int]) -> bool:
    """True if strides can express how indices repeat: throughout a dimension, or not at all."""
    aligned = (1,) * (len(wanted) - len(found)) + tuple(found)
    return all(size in (1, target) for size, target in zip(aligned, wanted, strict=True))


def is_dense(type: TensorType, strides: Strides) -> bool:
    """True if the stored elements of a row are contiguous."""
    return not strides or type.block_shape[-1] <= 1 or strides[-1] == type.dtype.block_bytes


def fits(node: Node, move: Move, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if a kernel accepts these strides of operands and result."""
    moved = 1 if node.op in SCATTERS else 0
    both = [(types[moved], strides[moved]), (node.type, strides[-1])]
    if node.op in SCATTERS:
        # A copy of all stored elements keeps the rows that are not set.
        both.append((types[0], strides[0]))
    if any(found.dtype.kind == "quantized" and not is_dense(found, steps) for found, steps in both):
        return False
    if move.conversion >= UNPACK and not all(is_dense(found, steps) for found, steps in both):
        return False
    if node.op in INDEXED:
        return node.type.ndim - 2 <= OUTER_DIMENSIONS
    # A copy to another shape walks the source's shape over a result without gaps; rows have whole
    # blocks.
    same = types[0].shape == node.type.shape
    whole = types[0].ndim > 0 and types[0].shape[-1] % node.type.dtype.block_size == 0
    return node.type.ndim > 0 and (same or (whole and strides[-1] == node.type.strides))


def stored_shape(type: TensorType, move: Move) -> tuple[int, ...]:
    """Return the shape that a step walks."""
    return type.storage_shape if move.in_bytes else type.shape


def in_row(operand: k.Operand, move: Move) -> k.Operand:
    """Return an operand over that shape."""
    return operand._replace(strides=(*operand.strides[:-1], 1)) if move.in_bytes else operand


# Steps


def append_random(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the step of philox; its result is contiguous."""
    seed, counter, target = places
    builder.random(node.type.size, seed, counter, target, as_floats=node.type.dtype is F32)


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the steps of a node; `places`: operands, then the result, with stride 0 where they
    repeat."""
    move = move_of(node, types)
    assert move is not None, "no kernel runs this"
    if node.op in COPIES:
        _copy(builder, types[0], node.type, move, places[0], places[-1])
        return
    scatters = node.op in SCATTERS
    if node.op == "get_rows_back":
        scatters = True
        zeros = (k.Instruction(k.Operation.COPY, k.Input(0), (0.0,)),)
        builder.elementwise(node.type.shape, k.Elementwise((places[-1],), zeros))
        # From here on it is add_rows to the zeros.
        types, places = (node.type, *types), (places[-1], *places)
    if scatters and places[0] != places[-1]:
        kept = conversion(node.type.dtype, node.type.dtype)
        assert kept is not None
        _copy(builder, node.type, node.type, kept, places[0], places[-1])
    if scatters and node.type.size == 0:
        return
    walked = types[1] if scatters else node.type
    (builder.scatter if scatters else builder.gather)(
        stored_shape(walked, move),
        types[0].shape[-2],
        in_row(places[1 if scatters else 0], move),
        places[-2],
        in_row(places[-1], move),
        move.conversion,
        types[-1].dtype.block_bytes,
    )


def _copy(
    builder: k.ProgramBuilder,
    source_type: TensorType,
    target_type: TensorType,
    move: Move,
    source: k.Operand,
    target: k.Operand,
) -> None:
    if source_type.shape != target_type.shape:
        # In the source's shape the target is contiguous.
        target = target._replace(strides=contiguous_strides(source_type.shape, target_type.dtype))
    shape = stored_shape(source_type, move)
    builder.convert(shape, in_row(source, move), in_row(target, move), move.conversion)
