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
    Source,
)
from heliograph_backends.cpu.kernels.program.tiles import MEMORY_BYTES_PER_NS, STREAM_BYTES, Strides
from heliograph_backends.cpu.kernels.program.words import (
    BINARY,
    IMMEDIATE_COUNTS,
    TERNARY,
    TRANSCENDENTAL,
    WIDE_ROW,
)

LONG_CHUNK, SHORT_CHUNK = 1024, 512
SIMPLE_NS, TRANSCENDENTAL_NS = 0.05, 0.4

#: The identity of a value; a constant's is its pattern, since 0.0 equals -0.0.
_Key = Register | Input | int


def float_bits(value: float) -> int:
    """Return the pattern of `value` as float32 (overflow becomes infinity)."""
    with np.errstate(over="ignore"):
        return int.from_bytes(np.float32(value).tobytes(), "little")


def encode_body(
    body: Elementwise, operands: Sequence[list[int]], streamed: frozenset[int], fetches: bool = False
) -> list[int]:
    """Return the words of a body with encoded operands.

    Results in `streamed` are written past the caches. With `fetches`, operands are prefetched.
    """
    numbers = _number_values(body)
    constants = [value for value in numbers if isinstance(value, int)]
    registers = sum(isinstance(value, Register) for value in numbers)
    chunk = LONG_CHUNK if len(numbers) * LONG_CHUNK * 4 <= 48 * 1024 else SHORT_CHUNK
    words = [len(operands), registers, len(constants), len(body.instructions), chunk]
    narrow = body.narrow or (0,) * len(operands)
    for operand, access, stored in zip(operands, _access(body), narrow, strict=True):
        words += [*operand, access + stored]
    words += constants
    for instruction in body.instructions:
        code = _encode(instruction, numbers)
        code[layout.OPERATION] += layout.STREAMED if code[layout.RESULT] in streamed else 0
        code[layout.OPERATION] += layout.FETCHED if fetches and code[layout.FIRST] < len(operands) else 0
        words += code
    return words


def _encode(instruction: Instruction, numbers: dict[_Key, int]) -> list[int]:
    """Return an instruction's words. One with fewer than three sources names the first again, at no
    cost."""
    first, *rest = (numbers[_key(source)] for source in instruction.sources)
    second, third = (*rest, first, first)[:2]
    result, immediates = numbers[instruction.result], immediate_word(instruction)
    return [int(instruction.operation), result, first, second, immediates, third]


def immediate_word(instruction: Instruction) -> int:
    """Return the word of an instruction's immediates."""
    low, high = (*(float_bits(value) for value in instruction.immediates), 0, 0)[:2]
    found: int = struct.unpack("<q", struct.pack("<II", low, high))[0]
    return found


def _key(source: Source) -> _Key:
    return source if isinstance(source, (Register, Input)) else float_bits(source)


def _number_values(body: Elementwise) -> dict[_Key, int]:
    """Number operands, then registers, then constants."""
    values = [_key(source) for each in body.instructions for source in (each.result, *each.sources)]
    ordered: list[_Key] = [Input(number) for number in range(len(body.operands))]
    registers = {value.number for value in values if isinstance(value, Register)}
    ordered += [Register(number) for number in sorted(registers)]
    ordered += list(dict.fromkeys(value for value in values if isinstance(value, int)))
    if len(ordered) > layout.MAXIMUM_VALUES:
        raise ValueError(f"an elementwise program of {len(ordered)} values: at most {layout.MAXIMUM_VALUES}")
    return {value: number for number, value in enumerate(ordered)}


def _access(body: Elementwise) -> list[int]:
    """Return for each operand whether it is read before a write (READ) and whether it is written
    (WRITTEN)."""
    access = [0] * len(body.operands)
    for instruction in body.instructions:
        for source in instruction.sources:
            if isinstance(source, Input) and not access[source.number] & layout.WRITTEN:
                access[source.number] |= layout.READ
        if isinstance(instruction.result, Input):
            access[instruction.result.number] |= layout.WRITTEN
    return access


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
    long = any(each.operation in TRANSCENDENTAL for each in body.instructions)
    return long and 4 * elements >= STREAM_BYTES


def check_body(body: Elementwise, shape: Sequence[int], strides: Sequence[Strides]) -> None:
    """Check the instructions' arities and references, and that no result is written through a
    broadcast axis. Raises ValueError.
    """
    written: set[Register] = set()
    for instruction in body.instructions:
        _check_arity(instruction)
        for source in instruction.sources:
            if isinstance(source, Register) and source not in written:
                raise ValueError(f"{instruction} reads a register that nothing wrote")
        values = (instruction.result, *instruction.sources)
        if any(isinstance(value, Input) and not 0 <= value.number < len(strides) for value in values):
            raise ValueError(f"{instruction} names an operand that does not exist")
        if isinstance(instruction.result, Register):
            written.add(instruction.result)
        elif 0 not in shape and any(
            step == 0 and size > 1
            for step, size in zip(strides[instruction.result.number], shape, strict=True)
        ):
            raise ValueError(f"{instruction} writes through a broadcast axis")


def _check_arity(instruction: Instruction) -> None:
    operation = instruction.operation
    arity = 3 if operation in TERNARY else 2 if operation in BINARY else 1
    immediates = IMMEDIATE_COUNTS.get(operation, 0)
    if len(instruction.sources) != arity or len(instruction.immediates) != immediates:
        raise ValueError(f"{operation.name.lower()} takes {arity} sources, not {instruction}")


def body_ns(instructions: Sequence[Instruction], operands: Sequence[Operand]) -> float:
    """Estimate one worker's time for an element."""
    arithmetic = sum(
        TRANSCENDENTAL_NS if each.operation in TRANSCENDENTAL else SIMPLE_NS for each in instructions
    )
    return arithmetic + 4.0 * len(operands) / MEMORY_BYTES_PER_NS
