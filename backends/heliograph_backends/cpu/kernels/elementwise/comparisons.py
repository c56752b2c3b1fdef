"""Comparisons of elements as they lie in memory: a vector of truths, a byte each, at a time.

A value of the result is four truths, and reads four elements of each source. With AVX-512 a
comparison is a mask, which becomes bytes in one instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from heliograph_backends.cpu.kernels.program.words import Operation as Op
from heliograph_backends.cpu.kernels.vector.lanes import F32, LANES, integer, loop, pointer, prefetch

#: The truths in a value.
TRUTHS = 4
#: The distance of the prefetch of long elements: an unrolled loop reads so many bytes of them that
#: processors see no loads at equal distances. A quarter of the time on Zen 5.
FETCH_BYTES, LINE_BYTES = 1024, 64
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

#: The elements that each operation compares, their bytes, and how.
COMPARISONS: dict[Op, tuple[ir.Type, int, str, str]] = {
    Op.SHORTS_SAME: (I16, 2, "icmp_signed", "=="),
    Op.INT_SHORTS_LESS: (I16, 2, "icmp_signed", "<"),
    Op.UINT_SHORTS_LESS: (I16, 2, "icmp_unsigned", "<"),
    Op.WORDS_SAME: (I32, 4, "icmp_signed", "=="),
    Op.INT_WORDS_LESS: (I32, 4, "icmp_signed", "<"),
    Op.UINT_WORDS_LESS: (I32, 4, "icmp_unsigned", "<"),
    Op.LONGS_SAME: (I64, 8, "icmp_signed", "=="),
    Op.INT_LONGS_LESS: (I64, 8, "icmp_signed", "<"),
    Op.UINT_LONGS_LESS: (I64, 8, "icmp_unsigned", "<"),
    Op.FLOATS_EQUAL: (F32, 4, "fcmp_ordered", "=="),
    Op.FLOATS_LESS: (F32, 4, "fcmp_ordered", "<"),
    Op.FLOATS_LESS_EQUAL: (F32, 4, "fcmp_ordered", "<="),
}


def comparison(op: Op) -> Callable[..., None]:
    """Return the loop of an operation over `count` values; it takes what `apply_operation` takes."""
    kind, size, method, condition = COMPARISONS[op]

    def body(builder: Any, result: Any, first: Any, second: Any, *others: Any) -> None:
        count = others[-2]
        whole = builder.and_(count, integer(-LANES))
        for start, stop, values in ((integer(0), whole, LANES), (whole, count, 1)):
            with loop(builder, start, stop, values) as index:
                place = builder.mul(index, integer(TRUTHS * size))
                some = ir.VectorType(kind, TRUTHS * values)
                for line in range(0, TRUTHS * size * values if kind is I64 else 0, LINE_BYTES):
                    for base in (first, second):
                        ahead = builder.add(place, integer(FETCH_BYTES + line))
                        prefetch(builder, builder.add(base, ahead))
                x, y = (
                    builder.load(pointer(builder, builder.add(base, place), some), align=size)
                    for base in (first, second)
                )
                truths = ir.VectorType(I8, TRUTHS * values)
                there = builder.add(result, builder.mul(index, integer(TRUTHS)))
                found = builder.zext(getattr(builder, method)(condition, x, y), truths)
                builder.store(found, pointer(builder, there, truths), align=1)

    return body
