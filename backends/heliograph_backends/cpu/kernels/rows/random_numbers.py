"""Random numbers by counter, eight blocks of Philox 4x32-10 at a time; see `reference.randomness`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    I32,
    I64,
    emitted,
    integer,
    loop,
    pointer,
    splat,
    workspace,
)
from heliograph_backends.reference.randomness import MULTIPLIERS, ROUNDS, WEYL

BLOCKS = 8
#: The words of so many blocks.
WORDS = 4 * BLOCKS
_NARROW, _WIDE = ir.VectorType(I32, BLOCKS), ir.VectorType(I64, BLOCKS)
_ALL, _FLOATS = ir.VectorType(I32, WORDS), ir.VectorType(F32, WORDS)


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _halves(builder: Any, x: Any) -> tuple[Any, Any]:
    """Return the lower and the upper words of wide ones."""
    upper = builder.lshr(x, splat(builder, integer(32), _WIDE) if x.type == _WIDE else integer(32))
    kind = _NARROW if x.type == _WIDE else I32
    return builder.trunc(x, kind), builder.trunc(upper, kind)


def _words(builder: Any, number: Any, seed: Any, counter: Any) -> Any:
    """Return the words of the blocks from a number on."""
    numbers = builder.add(splat(builder, number, _WIDE), ir.Constant(_WIDE, list(range(BLOCKS))))
    a, b = _halves(builder, numbers)
    c, d = (splat(builder, half, _NARROW) for half in _halves(builder, counter))
    key = _halves(builder, seed)
    for _ in range(ROUNDS):
        factors = (builder.zext(x, _WIDE) for x in (a, c))
        left, right = (
            builder.mul(x, _constant(_WIDE, by)) for x, by in zip(factors, MULTIPLIERS, strict=True)
        )
        first, second = (splat(builder, one, _NARROW) for one in key)
        (low_left, high_left), (low_right, high_right) = _halves(builder, left), _halves(builder, right)
        a, b = builder.xor(builder.xor(high_right, b), first), low_right
        c, d = builder.xor(builder.xor(high_left, d), second), low_left
        key = tuple(builder.add(one, ir.Constant(I32, by)) for one, by in zip(key, WEYL, strict=True))
    pairs = ir.Constant(ir.VectorType(I32, 2 * BLOCKS), list(range(2 * BLOCKS)))
    order = [word * BLOCKS + block for block in range(BLOCKS) for word in range(4)]
    halves = [builder.shuffle_vector(*both, pairs) for both in ((a, b), (c, d))]
    return builder.shuffle_vector(*halves, ir.Constant(_ALL, order))


@emitted(types.void, *[types.int64] * 6)
def random_words(
    builder: Any, address: Any, first: Any, count: Any, seed: Any, counter: Any, as_floats: Any
) -> None:
    """Write `count` words, or as many floats, from the block `first` on."""
    space = workspace(builder, 4 * WORDS)
    is_float = builder.icmp_signed("!=", as_floats, integer(0))

    def made(index: Any) -> Any:
        """Return the elements from a word on."""
        number = builder.add(first, builder.sdiv(index, integer(4)))
        words = _words(builder, number, seed, counter)
        upper = builder.sitofp(builder.lshr(words, _constant(_ALL, 8)), _FLOATS)
        floats = builder.fmul(upper, _constant(_FLOATS, 2.0**-24))
        return builder.select(is_float, builder.bitcast(floats, _ALL), words)

    def place(base: Any, index: Any) -> Any:
        return builder.add(base, builder.mul(index, integer(4)))

    whole = builder.and_(count, integer(-WORDS))
    with loop(builder, integer(0), whole, WORDS) as index:
        builder.store(made(index), pointer(builder, place(address, index), _ALL), align=4)
    with builder.if_then(builder.icmp_signed("<", whole, count)):
        builder.store(made(whole), pointer(builder, space, _ALL), align=4)
        with loop(builder, whole, count, 1) as index:
            one = builder.load(pointer(builder, place(space, builder.sub(index, whole)), I32), align=4)
            builder.store(one, pointer(builder, place(address, index), I32), align=4)
