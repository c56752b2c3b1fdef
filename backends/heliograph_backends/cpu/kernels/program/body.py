"""Encodes elementwise programs: values are numbered, instructions become words."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from heliograph_backends.cpu.kernels.program import words as layout
from heliograph_backends.cpu.kernels.program.program import (
    Elementwise,
    Input,
    Instruction,
    Operand,
    Register,
)
from heliograph_backends.cpu.kernels.program.tiles import (
    MEMORY_BYTES_PER_NS,
    STREAM_BYTES,
    TILE_ELEMENTS,
    Strides,
)
from heliograph_backends.cpu.kernels.program.words import (
    BINARY,
    IMMEDIATE_COUNTS,
    TERNARY,
    TRANSCENDENTAL,
    WIDE_ROW,
    Operation,
)

#: Elements of a chunk: those of a block where a body has nothing to stage; else so many that all
#: values of a chunk lie in the first-level cache.
WHOLE_CHUNK, LONG_CHUNK, SHORT_CHUNK = TILE_ELEMENTS, 1024, 512
SIMPLE_NS, TRANSCENDENTAL_NS = 0.05, 0.4

#: The sources and immediates of each operation.
_ARITIES = {
    each: (3 if each in TERNARY else 2 if each in BINARY else 1, IMMEDIATE_COUNTS.get(each, 0))
    for each in Operation
}


def float_bits(value: float) -> int:
    """Return the pattern of `value` as float32 (overflow becomes infinity)."""
    with np.errstate(over="ignore"):
        return int.from_bytes(np.float32(value).tobytes(), "little")


def encode_body(
    body: Elementwise,
    operands: Sequence[Sequence[int]],
    streamed: frozenset[int],
    fetches: bool = False,
    long_rows: bool = False,
) -> list[int]:
    """Return the words of a checked body with encoded operands.

    Values are numbered: operands, then registers, then constants. A constant is told by its
    pattern, since 0.0 equals -0.0. Results in `streamed` are written past the caches. With
    `fetches`, operands are prefetched. `long_rows`: no chunk has several rows.
    """
    instructions, narrow, inputs = body.instructions, body.narrow, len(operands)
    used = {each.result.number for each in instructions if isinstance(each.result, Register)}
    registers = {register: number for number, register in enumerate(sorted(used), inputs)}
    constants: dict[int, int] = {}
    first_constant = inputs + len(registers)
    access = [0] * inputs
    code: list[int] = []
    for operation, result, sources, immediates in instructions:
        read = []
        for source in sources:
            if isinstance(source, Input):
                number = source.number
                if not access[number] & layout.WRITTEN:
                    access[number] |= layout.READ
            elif isinstance(source, Register):
                number = registers[source.number]
            else:
                number = constants.setdefault(float_bits(source), first_constant + len(constants))
            read.append(number)
        word = int(operation) + (layout.FETCHED if fetches and read[0] < inputs else 0)
        if isinstance(result, Input):
            number = result.number
            access[number] |= layout.WRITTEN
            word += layout.STREAMED if number in streamed else 0
        else:
            number = registers[result.number]
        # One with fewer than three sources names the first again, at no cost.
        first, second, third = (*read, read[0], read[0])[:3]
        code += (word, number, first, second, immediate_word(immediates) if immediates else 0, third)
    count = first_constant + len(constants)
    if count > layout.MAXIMUM_VALUES:
        raise ValueError(f"an elementwise program of {count} values: at most {layout.MAXIMUM_VALUES}")
    chunk = LONG_CHUNK if count * LONG_CHUNK * 4 <= 48 * 1024 else SHORT_CHUNK
    if long_rows and count == inputs and all(map(_is_direct, operands, narrow or (0,) * inputs)):
        chunk = WHOLE_CHUNK
    words = [inputs, len(registers), len(constants), len(instructions), chunk]
    for operand, accessed, stored in zip(operands, access, narrow or (0,) * inputs, strict=True):
        words += operand
        words.append(accessed + stored)
    words += constants
    words += code
    return words


def _is_direct(operand: Sequence[int], stored: int) -> bool:
    """True if instructions read and write an operand's part of a row where it is."""
    return stored == layout.AS_THEY_LIE or (not stored and operand[layout.COLUMN_STRIDE] == 4)


def immediate_word(immediates: Sequence[float]) -> int:
    """Return the word of an instruction's immediates."""
    low, high = (*(float_bits(value) for value in immediates), 0, 0)[:2]
    found: int = struct.unpack("<q", struct.pack("<II", low, high))[0]
    return found


def streamed_results(body: Elementwise, strides: Sequence[Strides], sizes: Sequence[int]) -> frozenset[int]:
    """Return the operands that are written past the caches: large results that the body does not
    read."""
    if prod(sizes) * 4 < STREAM_BYTES or sizes[-1] < WIDE_ROW:
        return frozenset()
    read = {
        source.number for each in body.instructions for source in each.sources if isinstance(source, Input)
    }
    written = {each.result.number for each in body.instructions if isinstance(each.result, Input)}
    # Results that are staged because of their strides are scattered through the caches.
    return frozenset(number for number in written - read if strides[number][-1] == 4)


def fetches_operands(body: Elementwise, elements: int) -> bool:
    """True if operands come from memory and computing takes long enough to hide their prefetch."""
    if 4 * elements < STREAM_BYTES:
        return False
    return any(each.operation in TRANSCENDENTAL for each in body.instructions)


def check_body(body: Elementwise, shape: Sequence[int], strides: Sequence[Strides]) -> None:
    """Check the instructions' arities and references, and that no result is written through a
    broadcast axis. Raises ValueError.
    """
    written: set[int] = set()
    count = len(strides)
    for instruction in body.instructions:
        operation, result, sources, immediates = instruction
        arity = _ARITIES[operation]
        if (len(sources), len(immediates)) != arity:
            raise ValueError(f"{operation.name.lower()} takes {arity[0]} sources, not {instruction}")
        for source in sources:
            if isinstance(source, Register) and source.number not in written:
                raise ValueError(f"{instruction} reads a register that nothing wrote")
            if isinstance(source, Input) and not 0 <= source.number < count:
                raise ValueError(f"{instruction} names an operand that does not exist")
        if isinstance(result, Register):
            written.add(result.number)
        elif not 0 <= result.number < count:
            raise ValueError(f"{instruction} names an operand that does not exist")
        elif 0 in strides[result.number] and _repeats(shape, strides[result.number]):
            raise ValueError(f"{instruction} writes through a broadcast axis")


def _repeats(shape: Sequence[int], steps: Strides) -> bool:
    """True if strides visit an element of a space repeatedly."""
    return 0 not in shape and any(step == 0 and size > 1 for step, size in zip(steps, shape, strict=True))


def body_ns(instructions: Sequence[Instruction], operands: Sequence[Operand]) -> float:
    """Estimate one worker's time for an element."""
    arithmetic = sum(
        TRANSCENDENTAL_NS if each.operation in TRANSCENDENTAL else SIMPLE_NS for each in instructions
    )
    return arithmetic + 4.0 * len(operands) / MEMORY_BYTES_PER_NS
