"""Kernels generated for programs over many elements: source and launch. Pure.

The source contains only fixed names and numbers: operations, data types, and operand layouts.
Values that come from a client (sizes, strides and the numbers of its ops) are parameters. So no
client text is compiled, and chains that differ in sizes share a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from heliograph_backends.cuda.driver.parameters import chain_type
from heliograph_backends.cuda.driver.sources import CHAIN
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, Strides, blocks_for
from heliograph_backends.cuda.lowering.programs import ChainInstruction, ChainPiece

THREADS = 256
#: The widest load of a thread.
WIDEST_BYTES = 16
#: The bytes that a thread loads before it uses any of them. Memory of 4 TB/s with a latency of 700
#: ns needs 3 MB in flight, which are 11 bytes for each thread of a full H200; with 64, a sixth of
#: the threads is enough.
AHEAD_BYTES = 64
#: The most vectors, and elements, that a thread computes for each load; more would only make the
#: code longer.
MOST_AHEAD, MOST_LANES = 8, 16
#: The blocks that a multiprocessor runs at once, and the tiles for each block beyond that.
BLOCKS_AT_ONCE, TILES_OF_BLOCK = 8, 4


class VectorLayout(Enum):
    """The layout of a vector's elements in an operand."""

    IN_ORDER = "in the order of the walk, without gaps"
    ROWS = "without gaps in the last dimension"
    REPEATED = "the same one"
    APART = "with gaps"
    ONE_ELEMENT = "the same one of all vectors"


WALKED = (VectorLayout.ROWS, VectorLayout.REPEATED, VectorLayout.APART)


class KernelShape(NamedTuple):
    """The properties of a piece that its kernel is generated for."""

    types: tuple[str, ...]
    readings: tuple[VectorLayout, ...]
    dimensions: int
    vector: int
    ahead: int

    @property
    def walked(self) -> tuple[int, ...]:
        """The operands whose addresses are computed from the walk."""
        return tuple(number for number, one in enumerate(self.readings) if one in WALKED)


def generated(
    piece: ChainPiece, instructions: Sequence[ChainInstruction], multiprocessors: int, instead: Launch
) -> Launch:
    """Return the launch of a program over a piece, in its own kernel. `instead` runs if the kernel
    cannot be compiled, or if memory is not aligned for its vectors."""
    piece = _plain(piece)
    shape = _shape(piece)
    numbers = [number for one in instructions for number in one.numbers]
    walked, dimensions = len(shape.walked), shape.dimensions
    filling = Filling(chain_type(len(piece.operands), walked, dimensions, len(numbers)))
    vectors = piece.elements // shape.vector
    tiles = -(-vectors // (THREADS * shape.ahead))
    filling.set(vectors=vectors, tiles=tiles, rest=piece.elements - vectors * shape.vector)
    for place, one in enumerate(piece.operands):
        filling.address("addresses", one, place)
    if walked:
        filling.divisors((*piece.sizes[:-1], piece.sizes[-1] // shape.vector))
        filling.parameters["strides"][0][:] = [piece.steps[number] for number in shape.walked]
    if numbers:
        filling.parameters["numbers"][0][:] = numbers
    launch = filling.launch(CHAIN, (_blocks(tiles, multiprocessors), 1, 1), THREADS)
    source = "".join(f"{line}\n" for line in _source(shape, instructions, len(numbers)))
    alignment = shape.vector * max(map(_bytes, piece.operands))
    return replace(launch, source=source, alignment=alignment, instead=instead)


def _blocks(tiles: int, multiprocessors: int) -> int:
    """Return the number of blocks: one for each tile as long as all run at once, else one for
    several tiles."""
    return max(min(tiles, multiprocessors * BLOCKS_AT_ONCE), blocks_for(tiles, TILES_OF_BLOCK))


# The shape


def _plain(piece: ChainPiece) -> ChainPiece:
    """Return the piece with a dimension, even if it has one element."""
    if piece.sizes:
        return piece
    return ChainPiece((1,), piece.operands, tuple((one.type.dtype.block_bytes,) for one in piece.operands))


def _shape(piece: ChainPiece) -> KernelShape:
    readings = tuple(
        _reading(piece.sizes, step, _bytes(one))
        for one, step in zip(piece.operands, piece.steps, strict=True)
    )
    vector = WIDEST_BYTES // max(
        (
            _bytes(one)
            for one, reading in zip(piece.operands, readings, strict=True)
            if reading is not VectorLayout.ONE_ELEMENT
        ),
    )
    while vector > 1 and not _fits(piece, readings, vector):
        vector //= 2
    loaded = [
        _bytes(one) * (1 if reading is VectorLayout.REPEATED else vector)
        for one, reading in zip(piece.operands[1:], readings[1:], strict=True)
        if reading is not VectorLayout.ONE_ELEMENT
    ]
    ahead = AHEAD_BYTES // max(1, sum(loaded))
    ahead = max(1, min(ahead, MOST_AHEAD, MOST_LANES // vector))
    types = tuple(one.type.dtype.name.upper() for one in piece.operands)
    dimensions = len(piece.sizes) if any(one in WALKED for one in readings) else 0
    return KernelShape(types, readings, dimensions, vector, ahead)


def _bytes(one: Located) -> int:
    return one.type.dtype.block_bytes


def _reading(sizes: Strides, step: Strides, item: int) -> VectorLayout:
    if not any(step):
        return VectorLayout.ONE_ELEMENT
    expected, in_order = item, True
    for size, stride in zip(reversed(sizes), reversed(step), strict=True):
        in_order = in_order and stride == expected
        expected *= size
    if in_order:
        return VectorLayout.IN_ORDER
    return {item: VectorLayout.ROWS, 0: VectorLayout.REPEATED}.get(step[-1], VectorLayout.APART)


def _fits(piece: ChainPiece, readings: Sequence[VectorLayout], vector: int) -> bool:
    """True if vectors of this many elements do not cross rows and are aligned to their size."""
    if any(one in WALKED for one in readings) and piece.sizes[-1] % vector:
        return False
    for one, step, reading in zip(piece.operands, piece.steps, readings, strict=True):
        size = vector * _bytes(one)
        if reading in (VectorLayout.IN_ORDER, VectorLayout.ROWS) and one.offset % size:
            return False
        if reading is VectorLayout.ROWS and any(stride % size for stride in step[:-1]):
            return False
    return True


# The source


_DEVICE = "__device__ __forceinline__"
_PLACES = "const Places<N, ChainParameters>& at"


def _source(shape: KernelShape, instructions: Sequence[ChainInstruction], numbers: int) -> Iterator[str]:
    sizes = len(shape.types), len(shape.walked), shape.dimensions, numbers
    yield f"typedef Chain<{', '.join(map(str, sizes))}> ChainParameters;"
    yield f"enum {{ VECTOR = {shape.vector}, AHEAD = {shape.ahead} }};"
    yield from _once(shape)
    yield from _inputs(shape)
    yield from _chained(shape, instructions)
    yield from _put(shape)


def _once(shape: KernelShape) -> Iterator[str]:
    found = [
        number for number, one in enumerate(shape.readings) if number and one is VectorLayout.ONE_ELEMENT
    ]
    yield "struct Once {"
    yield from (f"  float x{number};" for number in found)
    yield f"  {_DEVICE} explicit Once(const ChainParameters& p) {{"
    for number in found:
        place = f"reinterpret_cast<const u8*>(p.addresses[{number}])"
        yield f"    x{number} = load({place}, {shape.types[number]});"
    yield "  }"
    yield "};"


def _inputs(shape: KernelShape) -> Iterator[str]:
    loaded = [
        number for number, one in enumerate(shape.readings) if number and one is not VectorLayout.ONE_ELEMENT
    ]
    yield "template <int N> struct Inputs {"
    for number in loaded:
        yield f"  {_member(shape, number)};"
    yield f"  {_DEVICE} void load(const ChainParameters& p, u64 first, int ahead, {_PLACES}) {{"
    for number in loaded:
        yield f"    {_load(shape, number)};"
    yield "  }"
    yield "};"


def _member(shape: KernelShape, number: int) -> str:
    match shape.readings[number]:
        case VectorLayout.REPEATED:
            return f"float x{number}"
        case VectorLayout.APART:
            return f"float x{number}[N]"
        case _:
            return f"Pack<{shape.types[number]}, N> x{number}"


def _load(shape: KernelShape, number: int) -> str:
    type, place = shape.types[number], _place(shape, number)
    match shape.readings[number]:
        case VectorLayout.REPEATED:
            return f"x{number} = ::load({place}, {type})"
        case VectorLayout.APART:
            return f"load_apart<{type}>({place}, {_stride(shape, number)}, x{number})"
        case _:
            return f"x{number}.load({place})"


def _place(shape: KernelShape, number: int) -> str:
    if shape.readings[number] is VectorLayout.IN_ORDER:
        return f"in_order<{shape.types[number]}, N>(p.addresses[{number}], first, ahead)"
    return f"walked(p.addresses[{number}], at.offsets[{shape.walked.index(number)}])"


def _stride(shape: KernelShape, number: int) -> str:
    """Return the expression for the stride between a vector's elements."""
    return f"p.strides[{shape.walked.index(number)}][{shape.dimensions - 1}]"


def _chained(shape: KernelShape, instructions: Sequence[ChainInstruction]) -> Iterator[str]:
    result = shape.types[0]
    yield (
        f"template <int N> static {_DEVICE} void chained("
        "const ChainParameters& p, const Once& once, const Inputs<N>& in, float (&y)[N]) {"
    )
    for number, reading in enumerate(shape.readings):
        if number and reading in (VectorLayout.IN_ORDER, VectorLayout.ROWS):
            yield f"  float x{number}[N];"
            yield f"  in.x{number}.read(x{number});"
    numbers = 0
    for number, one in enumerate(instructions):
        sources = [_value(shape, ref) for ref in one.sources]
        attributes = [f"p.numbers[{numbers + place}]" for place in range(len(one.numbers))]
        numbers += len(attributes)
        arguments = ", ".join(
            (*sources, *["0.0f"] * (2 - len(sources)), *attributes, *["0.0f"] * (2 - len(attributes)))
        )
        last = number == len(instructions) - 1
        if not last:
            yield f"  float v{number}[N];"
        target = "y" if last else f"v{number}"
        yield f"  EACH {target}[i] = op_{one.operation.name}({arguments});"
        # The last result is rounded when it is stored.
        if one.rounds and result != "F32" and not last:
            yield f"  round_to<{result}>({target});"
    yield "}"


def _value(shape: KernelShape, ref: int) -> str:
    if ref < 0:
        return f"v{-1 - ref}[i]"
    match shape.readings[ref]:
        case VectorLayout.ONE_ELEMENT:
            return f"once.x{ref}"
        case VectorLayout.REPEATED:
            return f"in.x{ref}"
        case VectorLayout.APART:
            return f"in.x{ref}[i]"
        case _:
            return f"x{ref}[i]"


def _put(shape: KernelShape) -> Iterator[str]:
    yield (
        f"template <int N> static {_DEVICE} void put("
        f"const ChainParameters& p, u64 first, int ahead, {_PLACES}, const float (&y)[N]) {{"
    )
    type, place = shape.types[0], _place(shape, 0)
    if shape.readings[0] is VectorLayout.APART:
        yield f"  store_apart<{type}>({place}, {_stride(shape, 0)}, y);"
    else:
        yield f"  Pack<{type}, N> made;"
        yield "  made.fill(y);"
        yield f"  made.store({place});"
    yield "}"
