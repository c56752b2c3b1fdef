"""Random numbers as launches. Pure."""

from __future__ import annotations

from heliograph_backends.cuda.driver.parameters import RANDOM
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, blocks_for


def is_random(op: str, result: Located) -> bool:
    """True if the kernel makes this result: its elements are contiguous."""
    return op == "philox" and result.strides == result.type.strides


def philox(seed: Located, counter: Located, result: Located) -> Launch:
    """Return the launch with one thread for each block of four numbers."""
    filling = Filling(RANDOM)
    for name, value in (("seed", seed), ("counter", counter), ("result", result)):
        filling.address(name, value)
    count = result.type.size
    filling.set(count=count, as_floats=result.type.dtype.is_float)
    return filling.launch("philox", (blocks_for(-(-count // 4), 256), 1, 1), 256)
