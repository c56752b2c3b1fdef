"""Kernels for CPUs, in float32: a program of steps, built in Python and run without it.

    builder = ProgramBuilder()
    builder.gemm(16, 384, 384, left, PackedOperand(1), product)
    bound = BoundProgram(builder.build(), [inputs_address, weight_address, ...])
    status = bound.run(WorkerPool(2))

Building is plain Python. Binding and packing load the kernels that they need from the disk cache at
the first use, or wait until they are compiled; `start` and `warmup` begin earlier. Compiling needs
numba, in processes of its own; `available` is true if it is installed. This process imports no
numba.

Bits do not depend on the number of workers, on how steps are cut into tiles, or on whether an
elementwise program runs as a step or as the epilogue of a matrix product. The folders, bottom up:
`program` (encodes steps, plain Python); `vector`, `elementwise`, `matmul` and `rows` (native code);
`runtime` (compiles, caches and runs it).
"""

from heliograph_backends.cpu.kernels.program.builder import ALONE, Encodings, ProgramBuilder
from heliograph_backends.cpu.kernels.program.elements import BYTES, Block, Conversion
from heliograph_backends.cpu.kernels.program.program import (
    Attention,
    Elementwise,
    Experts,
    Geometry,
    Input,
    Instruction,
    Operand,
    PackedOperand,
    Pages,
    Program,
    Register,
    Rotation,
    StoredOperand,
)
from heliograph_backends.cpu.kernels.program.stored_types import Stored
from heliograph_backends.cpu.kernels.program.words import Operation, Status, Windowing
from heliograph_backends.cpu.kernels.runtime.bound import BoundProgram
from heliograph_backends.cpu.kernels.runtime.memory import PackedForm, Scratch
from heliograph_backends.cpu.kernels.runtime.native import (
    CacheState,
    Refusal,
    available,
    cache_state,
    find_cache,
    start,
    warmup,
)
from heliograph_backends.cpu.kernels.runtime.row_groups import RowGroups, WeightForm
from heliograph_backends.cpu.kernels.runtime.workers import WorkerPool

__all__ = [
    "ALONE",
    "BYTES",
    "Attention",
    "Block",
    "BoundProgram",
    "CacheState",
    "Conversion",
    "Elementwise",
    "Encodings",
    "Experts",
    "Geometry",
    "Input",
    "Instruction",
    "Operand",
    "Operation",
    "PackedOperand",
    "PackedForm",
    "Pages",
    "Program",
    "ProgramBuilder",
    "Refusal",
    "Register",
    "Rotation",
    "RowGroups",
    "Scratch",
    "Status",
    "Stored",
    "StoredOperand",
    "WeightForm",
    "Windowing",
    "WorkerPool",
    "available",
    "cache_state",
    "find_cache",
    "start",
    "warmup",
]
