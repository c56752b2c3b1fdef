"""The inner loop of the f32 matrix product, and the packing of its right side.

Contract. Each element of the product is one chain `acc = fma(a[m, k], b[k, n], acc)` over k = 0, 1,
... from +0. The chain, and so the bits, do not depend on the vector width, the tile, the number of
rows, or the threads. If K is cut in blocks, the accumulators are stored in C in float32, which
continues the same chain.

Theory of operation. The right side is packed in panels of 32 columns, `[N/32][K][32]`, so that the
inner loop reads it in order; the last panel may be narrower. With AVX-512 a kernel call keeps 12
rows by 32 columns in 24 registers; each step of k costs two loads of b, twelve broadcasts of a and
24 multiply-adds (the scheme of BLIS: Van Zee, van de Geijn, "BLIS: a framework for rapidly
instantiating BLAS functionality", 2015). Elsewhere it keeps 6 by 16, and handles the panel in two
halves. There is a kernel for each number of rows, so that short tiles waste no work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    I64,
    LANES,
    Lanes,
    emitted,
    has_feature,
    integer,
    loop,
    pointer,
    prefetch,
    subroutine,
    tail_mask,
)

KERNEL_ROWS, KERNEL_COLUMNS = (12, 32) if has_feature("avx512f") else (6, 16)
VECTORS = KERNEL_COLUMNS // LANES
# With few rows the panels stream from memory. Measured on Zen 5: 16 rows gain a quarter from 8 KiB
# on, and more than 12 KiB changes nothing. A prefetch after the last panel has no effect.
PREFETCH_BYTES = 16 * 1024
_ARGUMENTS = (I64,) * 9


def _load_accumulators(builder: Any, cells: list[Any], rows: int, c: Any, c_row: Any, columns: Any) -> None:
    for row in range(rows):
        for vector in range(VECTORS):
            offset = builder.add(builder.mul(c_row, integer(row)), integer(64 * vector))
            mask = tail_mask(builder, builder.sub(columns, integer(LANES * vector)))
            old = Lanes.load_masked(builder, builder.add(c, offset), mask)
            builder.store(old.value, cells[row * VECTORS + vector])


def _store_accumulators(builder: Any, cells: list[Any], rows: int, c: Any, c_row: Any, columns: Any) -> None:
    full = builder.icmp_signed(">=", columns, integer(KERNEL_COLUMNS))
    with builder.if_else(full) as (whole, part):
        for branch, masked in ((whole, False), (part, True)):
            with branch:
                for row in range(rows):
                    for vector in range(VECTORS):
                        offset = builder.add(builder.mul(c_row, integer(row)), integer(64 * vector))
                        place = builder.add(c, offset)
                        lanes = Lanes(builder, builder.load(cells[row * VECTORS + vector]))
                        if masked:
                            rest = builder.sub(columns, integer(LANES * vector))
                            lanes.store_masked(place, tail_mask(builder, rest))
                        else:
                            lanes.store(place)


def _kernel(rows: int) -> Callable[..., None]:
    def body(
        builder: Any,
        c: Any,
        c_row: Any,
        a: Any,
        a_row: Any,
        b: Any,
        b_row: Any,
        depth: Any,
        columns: Any,
        first: Any,
    ) -> None:
        cells = [builder.alloca(F32_VECTOR) for _ in range(rows * VECTORS)]
        for cell in cells:
            builder.store(ir.Constant(F32_VECTOR, [0.0] * LANES), cell)
        with builder.if_then(builder.icmp_signed("==", first, integer(0))):
            _load_accumulators(builder, cells, rows, c, c_row, columns)
        # Three rows share a base pointer by base + index * scale addressing, so four pointers move
        # instead of twelve.
        bases = [builder.add(a, builder.mul(a_row, integer(3 * group))) for group in range((rows + 2) // 3)]
        with loop(builder, integer(0), depth, 1) as index:
            here = builder.add(b, builder.mul(index, b_row))
            right = [Lanes.load(builder, builder.add(here, integer(64 * v))) for v in range(VECTORS)]
            for vector in range(VECTORS):
                prefetch(builder, builder.add(here, integer(PREFETCH_BYTES + 64 * vector)))
            step = builder.mul(index, integer(4))
            for row in range(rows):
                moving = builder.add(bases[row // 3], step)
                address = builder.add(moving, builder.mul(a_row, integer(row % 3)))
                left = Lanes.broadcast(builder, builder.load(pointer(builder, address, F32)))
                for vector in range(VECTORS):
                    cell = cells[row * VECTORS + vector]
                    accumulator = Lanes(builder, builder.load(cell))
                    builder.store(right[vector].fma(left, accumulator).value, cell)
        _store_accumulators(builder, cells, rows, c, c_row, columns)

    return body


@emitted(types.void, *[types.int64] * 10)
def multiply_strip(
    builder: Any,
    rows: Any,
    c: Any,
    c_row: Any,
    a: Any,
    a_row: Any,
    b: Any,
    b_row: Any,
    depth: Any,
    columns: Any,
    first: Any,
) -> None:
    """Multiply up to KERNEL_ROWS rows of a by one panel (or half) of b; strides in bytes.

    Whole vectors of b are read, also beyond `columns`.
    """
    done = builder.append_basic_block("strip.done")
    switch = builder.switch(rows, done)
    for count in range(1, KERNEL_ROWS + 1):
        with builder.goto_block(builder.append_basic_block(f"strip.{count}")):
            kernel = subroutine(builder, f"multiply_{count}_rows", _ARGUMENTS, _kernel(count))
            builder.call(kernel, [c, c_row, a, a_row, b, b_row, depth, columns, first])
            switch.add_case(integer(count), builder.block)
            builder.branch(done)
    builder.position_at_end(done)
