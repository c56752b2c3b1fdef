"""Elementwise instructions: one loop for each, over contiguous buffers of four bytes an element.

Each loop loads sixteen lanes, computes and stores, so a result may overwrite a source at the same
place. The last lanes are masked and use the same instructions, so an element's bits do not depend
on the end of its chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import types

from heliograph_backends.cpu.kernels.elementwise import integers
from heliograph_backends.cpu.kernels.elementwise.comparisons import COMPARISONS, comparison
from heliograph_backends.cpu.kernels.program.words import (
    FETCHED,
    STREAMED,
    TERNARY,
    TRANSCENDENTAL,
    TYPED,
)
from heliograph_backends.cpu.kernels.program.words import Operation as Op
from heliograph_backends.cpu.kernels.vector import vector_math as m
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    I64,
    LANES,
    Lanes,
    element,
    emitted,
    has_feature,
    integer,
    loop,
    prefetch,
    subroutine,
    tail_mask,
    woven,
)

# x, y: the two sources; p, q: the two immediates. Of three sources, p is the third one.
Formula = Callable[[Lanes, Lanes, Lanes, Lanes], Lanes]


def _of_two(formula: integers.Formula) -> Formula:
    return lambda x, y, p, q: formula(x, y)


FORMULAS: dict[Op, Formula] = {
    Op.COPY: lambda x, y, p, q: x,
    Op.ADD: lambda x, y, p, q: x + y,
    Op.SUB: lambda x, y, p, q: x - y,
    Op.MUL: lambda x, y, p, q: x * y,
    Op.DIV: lambda x, y, p, q: x / y,
    Op.MAXIMUM: lambda x, y, p, q: x.maximum(y),
    Op.MINIMUM: lambda x, y, p, q: x.minimum(y),
    Op.NEG: lambda x, y, p, q: -x,
    Op.ABS: lambda x, y, p, q: x.abs(),
    Op.SQRT: lambda x, y, p, q: x.sqrt(),
    Op.RSQRT: lambda x, y, p, q: 1.0 / x.sqrt(),
    Op.SQUARE: lambda x, y, p, q: x * x,
    Op.EXP: lambda x, y, p, q: m.exp(x),
    Op.LOG: lambda x, y, p, q: m.log(x),
    Op.ERF: lambda x, y, p, q: m.erf(x),
    Op.TANH: lambda x, y, p, q: m.tanh(x),
    Op.SIGMOID: lambda x, y, p, q: m.sigmoid(x),
    Op.RELU: lambda x, y, p, q: x.maximum(0.0),
    Op.GELU_ERF: lambda x, y, p, q: m.gelu_erf(x),
    Op.GELU: lambda x, y, p, q: m.gelu(x),
    Op.GELU_QUICK: lambda x, y, p, q: m.gelu_quick(x),
    Op.SILU: lambda x, y, p, q: m.silu(x),
    Op.SCALE_BIAS: lambda x, y, p, q: x * p + q,
    Op.CLAMP: lambda x, y, p, q: x.maximum(p).minimum(q),
    Op.SGN: lambda x, y, p, q: m.sgn(x),
    Op.STEP: lambda x, y, p, q: x.where(">", 0.0, 1.0, 0.0),
    Op.FLOOR: lambda x, y, p, q: x.call("llvm.floor"),
    Op.CEIL: lambda x, y, p, q: x.call("llvm.ceil"),
    Op.ROUND: lambda x, y, p, q: x.call("llvm.roundeven"),
    Op.TRUNC: lambda x, y, p, q: x.call("llvm.trunc"),
    Op.HARDSIGMOID: lambda x, y, p, q: m.hardsigmoid(x),
    Op.HARDSWISH: lambda x, y, p, q: x * m.hardsigmoid(x),
    Op.LEAKY_RELU: lambda x, y, p, q: x.where(">", 0.0, x, x * p),
    Op.EXPM1: lambda x, y, p, q: m.expm1(x),
    Op.ELU: lambda x, y, p, q: x.where(">", 0.0, x, m.expm1(x)),
    Op.SOFTPLUS: lambda x, y, p, q: m.softplus(x),
    Op.RELU_BACK: lambda x, y, p, q: y.where("<=", 0.0, 0.0, x),
    Op.COPYSIGN: lambda x, y, p, q: x.copysign(y),
    Op.WHERE: lambda x, y, p, q: integers.select(x, y, p),
    **{op: _of_two(formula) for op, formula in integers.FORMULAS.items()},
}
# Short loops are unrolled to reduce the share of counting. The processor overlaps formulas by
# itself, but of those with look-ups, and of the longest, it sees too few instructions at once:
# several are woven where registers suffice, which takes up to a quarter less time.
UNROLL, WOVEN = 2, 4
LONGEST = (Op.ERF, Op.GELU_ERF, Op.GELU, Op.TANH, Op.LOG, Op.SOFTPLUS)
# The distance of the prefetch of a source, in instructions with FETCHED.
FETCH_BYTES = 4096


def _body(formula: Formula, unroll: int, *, ternary: bool) -> Callable[..., None]:
    def body(
        builder: Any, result: Any, first: Any, second: Any, third: Any, p: Any, q: Any, count: Any, flags: Any
    ) -> None:
        immediates = Lanes.broadcast(builder, p), Lanes.broadcast(builder, q)
        bases = (first, second, third) if ternary else (first, second)

        def computed(sources: list[Lanes]) -> Lanes:
            x, y, *rest = sources
            return formula(x, y, *(*rest, *immediates)[:2])

        aligned = builder.icmp_signed("==", builder.and_(result, integer(63)), integer(0))
        streamed = builder.and_(aligned, _has(builder, flags, STREAMED))
        fetched = _has(builder, flags, FETCHED)
        whole = builder.and_(count, integer(-LANES * unroll))
        with loop(builder, integer(0), whole, LANES * unroll) as index:
            places = [builder.add(index, integer(LANES * part)) for part in range(unroll)]
            with builder.if_then(fetched):
                for place in places:
                    prefetch(builder, builder.add(element(builder, first, place), integer(FETCH_BYTES)))
            sources = [
                [Lanes.load(builder, element(builder, base, place)) for base in bases] for place in places
            ]
            values = woven(builder, [partial(computed, each) for each in sources])
            with builder.if_else(streamed) as (past, through):
                with past:
                    for place, lanes in zip(places, values, strict=True):
                        lanes.store_streamed(element(builder, result, place))
                with through:
                    for place, lanes in zip(places, values, strict=True):
                        lanes.store(element(builder, result, place))
        with loop(builder, whole, count, LANES) as index:
            mask = tail_mask(builder, builder.sub(count, index))
            last = [Lanes.load_masked(builder, element(builder, base, index), mask) for base in bases]
            computed(last).store_masked(element(builder, result, index), mask)

    return body


def _unroll(op: Op) -> int:
    if op in LONGEST:
        return WOVEN if has_feature("avx512f") else 1
    return 1 if op in TRANSCENDENTAL or op in TYPED - TERNARY else UNROLL


def _has(builder: Any, flags: Any, flag: int) -> Any:
    return builder.icmp_signed("!=", builder.and_(flags, integer(flag)), integer(0))


@emitted(types.void, *[types.int64] * 5, types.float32, types.float32, types.int64, types.int64)
def apply_operation(
    builder: Any,
    operation: Any,
    result: Any,
    first: Any,
    second: Any,
    third: Any,
    p: Any,
    q: Any,
    count: Any,
    flags: Any,
) -> None:
    """Compute `count` elements at address `result` from those at `first`, `second` and `third` and
    two immediates.

    STREAMED in `flags` writes past the caches if `result` is a multiple of 64; FETCHED prefetches
    `first`.
    """
    done = builder.append_basic_block("operation.done")
    switch = builder.switch(operation, done)
    bodies = {op: _body(formula, _unroll(op), ternary=op in TERNARY) for op, formula in FORMULAS.items()}
    bodies |= {op: comparison(op) for op in COMPARISONS}
    for op, body in bodies.items():
        with builder.goto_block(builder.append_basic_block(op.name.lower())):
            arguments = (I64, I64, I64, I64, F32, F32, I64, I64)
            function = subroutine(builder, f"apply_{op.name.lower()}", arguments, body)
            switch.add_case(integer(op), builder.block)
            builder.call(function, [result, first, second, third, p, q, count, flags])
            builder.branch(done)
    builder.position_at_end(done)
