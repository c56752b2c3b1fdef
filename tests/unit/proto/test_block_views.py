"""Views of rows of blocks: chains of them are what the same chains are of the floats they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, nothing_left, run

from heliograph_backends.cpu import CpuDevice
from heliograph_proto.quantization.blocks import dequantize, quantize
from heliograph_proto.types import DTYPES

SEED = 20250314


def random_view(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """An op and its attributes that leave whole blocks of 32."""
    rank = len(shape)
    match int(random.integers(4)):
        case 0:
            return "permute", {"axes": (*map(int, random.permutation(rank - 1)), rank - 1)}
        case 1:
            start = [int(random.integers(0, max(1, size))) for size in shape[:-1]]
            step = [int(random.integers(1, 3)) for _ in start]
            block = 32 * int(random.integers(0, shape[-1] // 32))
            return "slice", {"start": (*start, block), "stop": shape, "step": (*step, 1)}
        case 2:
            return "broadcast_to", {"shape": (2, *shape) if rank < 5 else shape}
    return "reshape", {"shape": (-1, 32) if random.random() < 0.5 else (1, *shape)[: 8 if rank < 6 else rank]}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_chains_of_views(name: str, native: bool) -> None:
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    x = random.standard_normal((4, 3, 128)).astype(np.float32)
    rows = quantize(x, name)
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28, native=native)) as device:
        for _ in range(40):
            made = Maker()
            value, plain = made.input(rows, name), made.input(dequantize(rows, name))
            for _ in range(int(random.integers(1, 6))):
                op, attributes = random_view(random, made.type(value).shape)
                value, plain = (made.node(op, one, **attributes) for one in (value, plain))
            made.output(value, made.node("cast", value, dtype=DTYPES["f32"]), plain)
            blocks, found, expected = run(device, made)
            np.testing.assert_array_equal(found, expected, err_msg=str(made.nodes))
            np.testing.assert_array_equal(dequantize(blocks, name), expected, err_msg=str(made.nodes))


def test_a_view_of_a_cache_sees_what_was_set_before_it() -> None:
    """A view of blocks that is taken before a later assignment keeps the old ones."""
    rows = quantize(np.ones((4, 64), np.float32), "q8_0")
    made = Maker()
    cache = made.variable(rows, "q8_0")
    old = made.node("slice", cache, start=(1, 32), stop=(3, 64), step=(1, 1))
    new = made.node(
        "set_rows", cache, made.input(np.full((1, 64), 2.0, np.float32)), made.input(np.array([1]))
    )
    new = made.node("assign", cache, new)
    after = made.node("slice", new, start=(1, 32), stop=(3, 64), step=(1, 1))
    made.output(*(made.node("cast", one, dtype=DTYPES["f32"]) for one in (old, after)))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28)) as device:
        before, found = run(device, made)
    assert before.round(2).tolist() == [[1.0] * 32] * 2
    assert found.round(2).tolist() == [[2.0] * 32, [1.0] * 32]
