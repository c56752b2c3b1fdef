"""Words of shared memory, plain and atomic, for the runner and the kernels."""

from __future__ import annotations

import inspect
from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.program.words import ENTRIES_AT, Kind, Place
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F64,
    I32,
    I64,
    call_address,
    element,
    emitted,
    integer,
    intrinsic_function,
    pointer,
)


def _word(builder: Any, base: Any, index: Any) -> Any:
    return pointer(builder, element(builder, base, index, I64), I64)


@emitted(types.int64, types.int64, types.int64)
def word(builder: Any, base: Any, index: Any) -> Any:
    """Return int64 word `index` of the array at address `base`."""
    return builder.load(_word(builder, base, index))


@emitted(types.void, types.int64, types.int64, types.int64)
def set_word(builder: Any, base: Any, index: Any, value: Any) -> None:
    """Store int64 `value` as word `index` of the array at address `base`."""
    builder.store(value, _word(builder, base, index))


@emitted(types.float32, types.int64)
def load_f32(builder: Any, address: Any) -> Any:
    """Return the float32 at `address`."""
    return builder.load(pointer(builder, address, F32))


@emitted(types.void, types.int64, types.float32)
def store_f32(builder: Any, address: Any, value: Any) -> None:
    """Store a float32 at `address`."""
    builder.store(value, pointer(builder, address, F32))


@emitted(types.float64, types.int64)
def load_double(builder: Any, address: Any) -> Any:
    """Return the float64 at `address`."""
    return builder.load(pointer(builder, address, F64))


@emitted(types.void, types.int64, types.float64)
def store_double(builder: Any, address: Any, value: Any) -> None:
    """Store a float64 at `address`."""
    builder.store(value, pointer(builder, address, F64))


@emitted(types.int64, types.int64)
def load_bits(builder: Any, address: Any) -> Any:
    """Return the eight bytes at any address as int64."""
    return builder.load(pointer(builder, address, I64), align=1)


@emitted(types.int64, types.int64)
def load_i16(builder: Any, address: Any) -> Any:
    """Return the int16 at `address`."""
    return builder.sext(builder.load(pointer(builder, address, ir.IntType(16))), I64)


@emitted(types.int64, types.int64)
def load_i32(builder: Any, address: Any) -> Any:
    """Return the int32 at `address`."""
    return builder.sext(builder.load(pointer(builder, address, I32)), I64)


@emitted(types.float64, types.int64)
def double_of_bits(builder: Any, bits: Any) -> Any:
    """Return the float64 whose pattern is `bits`."""
    return builder.bitcast(bits, F64)


@emitted(types.float32, types.int64)
def float_of_bits(builder: Any, bits: Any) -> Any:
    """Return the float32 whose pattern is the low half of `bits`."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


def _call(builder: Any, scratch: Any, place: Any, *arguments: Any) -> None:
    table = builder.load(pointer(builder, builder.add(scratch, integer(ENTRIES_AT)), I64))
    call_address(builder, builder.load(_word(builder, table, place)), *arguments)


@emitted(types.void, *[types.int64] * 5)
def call_block(builder: Any, kind: Any, step: Any, block: Any, slots: Any, scratch: Any) -> None:
    """Run one block of a step by the entry of its kind."""
    _call(builder, scratch, kind, kind, step, block, slots, scratch)


def caller(place: int, arguments: int) -> Any:
    """Return an intrinsic of the scratch and the arguments that calls the entry at this place."""

    def call_entry(builder: Any, scratch: Any, *values: Any) -> None:
        _call(builder, scratch, integer(place), *values)

    names = ["builder", "scratch", *(f"argument{number}" for number in range(arguments))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call_entry.__dict__["__signature__"] = inspect.Signature([inspect.Parameter(one, kind) for one in names])
    return emitted(types.void, *[types.int64] * (1 + arguments))(call_entry)


#: Calls of entries by other entries; the first argument is the scratch.
call_elementwise = caller(Kind.ELEMENTWISE, 7)
call_multiply_few = caller(Place.MULTIPLY_FEW, 12)
call_unpack_panels = caller(Place.UNPACK_PANELS, 7)
call_pack_row = caller(Place.PACK_ROW, 5)
call_pack_patches = caller(Place.PACK_PATCHES, 8)
call_stage_integers = caller(Place.STAGE_INTEGERS, 7)
call_multiply_integers = caller(Place.MULTIPLY_INTEGERS, 11)
call_finish_rows = caller(Place.FINISH_ROWS, 7)


@emitted(types.int64, types.int64, types.int64)
def atomic_load(builder: Any, base: Any, index: Any) -> Any:
    """Read a word; earlier writes of its writer are visible (acquire)."""
    return builder.load_atomic(_word(builder, base, index), "acquire", 8)


@emitted(types.void, types.int64, types.int64, types.int64)
def atomic_store(builder: Any, base: Any, index: Any, value: Any) -> None:
    """Write a word (sequentially consistent)."""
    builder.store_atomic(value, _word(builder, base, index), "seq_cst", 8)


@emitted(types.int64, types.int64, types.int64, types.int64)
def atomic_add(builder: Any, base: Any, index: Any, amount: Any) -> Any:
    """Add to a word and return its old value (sequentially consistent)."""
    return builder.atomic_rmw("add", _word(builder, base, index), amount, "seq_cst")


@emitted(types.int64, types.int64, types.int64, types.int64)
def atomic_exchange(builder: Any, base: Any, index: Any, value: Any) -> Any:
    """Write a word and return its old value (sequentially consistent)."""
    return builder.atomic_rmw("xchg", _word(builder, base, index), value, "seq_cst")


@emitted(types.boolean, types.int64, types.int64, types.int64, types.int64)
def atomic_replace(builder: Any, base: Any, index: Any, old: Any, new: Any) -> Any:
    """Write a word if it is `old`; return true if it was (sequentially consistent)."""
    found = builder.cmpxchg(_word(builder, base, index), old, new, "seq_cst", "seq_cst")
    return builder.extract_value(found, 1)


@emitted(types.void)
def finish_streaming(builder: Any) -> None:
    """Make this thread's writes past the caches visible before its next writes."""
    if builder.module.triple.startswith("x86_64"):
        builder.call(intrinsic_function(builder, "llvm.x86.sse.sfence", ir.VoidType()), [])


@emitted(types.void)
def pause(builder: Any) -> None:
    """Execute the core's instruction for spinning, if it has one."""
    if builder.module.triple.startswith("x86_64"):
        builder.call(intrinsic_function(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])


@emitted(types.void)
def yield_core(builder: Any) -> None:
    """Yield the core. The libc symbol is resolved when code is loaded, so cached code stays
    valid."""
    builder.call(intrinsic_function(builder, "sched_yield", I32), [])


@emitted(types.void, *[types.int64] * 3)
def call_clock(builder: Any, clock: Any, number: Any, target: Any) -> None:
    """Write the time of a numbered clock by a clock_gettime at an address."""
    call_address(builder, clock, number, target)


@emitted(types.int64)
def processor(builder: Any) -> Any:
    """Return the number of the processor that runs this thread; negative if unknown."""
    if "linux" not in builder.module.triple:
        return ir.Constant(I64, -1)
    return builder.sext(builder.call(intrinsic_function(builder, "sched_getcpu", I32), []), I64)
