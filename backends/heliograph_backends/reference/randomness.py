"""Formula: random numbers by counter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from heliograph_backends.reference.base import Array, Attributes, Formula

#: Philox 4x32-10, "Parallel random numbers: as easy as 1, 2, 3", Salmon et al., 2011.
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
#: The key's words grow by these after each round: the golden ratio and the root of 3.
WEYL = (0x9E3779B9, 0xBB67AE85)

_WORD = 0xFFFFFFFF


def blocks(xp: Any, counter: Sequence[Array], key: Sequence[Array]) -> tuple[Array, ...]:
    """Return the four words of each block; all words are u64 arrays with values below 2**32."""
    word, bits = xp.uint64(_WORD), xp.uint64(32)
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        left, right = (xp.uint64(each) * x for each, x in zip(MULTIPLIERS, (a, c), strict=True))
        a, b, c, d = (right >> bits) ^ b ^ first, right & word, (left >> bits) ^ d ^ second, left & word
        first, second = ((x + xp.uint64(each)) & word for x, each in zip((first, second), WEYL, strict=True))
    return a, b, c, d


def philox(xp: Any, attributes: Attributes, seed: Array, counter: Array) -> Array:
    shape = tuple(attributes["shape"])
    count = math.prod(shape)
    number = xp.arange(-(-count // 4), dtype=xp.uint64)
    key, above, below = (
        _halves(xp, x)
        for x in (seed.reshape(1).astype(xp.uint64), counter.reshape(1).astype(xp.uint64), number)
    )
    bits = xp.stack(blocks(xp, (*below, *above), key), axis=-1).reshape(-1)[:count].reshape(shape)
    if attributes["dtype"].is_integer:
        return bits
    # 24 bits are exact in f32.
    return (bits >> xp.uint64(8)).astype(xp.float32) * xp.float32(2.0**-24)


def _halves(xp: Any, x: Array) -> tuple[Array, Array]:
    """Return the lower and the upper 32 bits."""
    return x & xp.uint64(_WORD), x >> xp.uint64(32)


FORMULAS: Mapping[str, Formula] = {"philox": philox}
