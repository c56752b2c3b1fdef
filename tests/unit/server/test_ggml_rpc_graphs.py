"""Graphs of addresses as graphs of ours."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from heliograph_server.gateways.ggml_rpc import ops, wire
from heliograph_server.gateways.ggml_rpc.buffers import Buffer, Buffers
from heliograph_server.gateways.ggml_rpc.graphs import COMPUTE_FLAG, bound_graphs, steps_of

F32 = 0


def described(
    buffer: Buffer, number: int, at: int, ne: int, op: str = "none", source: int = 0
) -> wire.Tensor:
    """A vector of floats in a buffer."""
    strides = (4, 4 * ne, 4 * ne, 4 * ne)
    return wire.Tensor(
        number, F32, buffer.handle, (ne, 1, 1, 1), strides, ops.NAMES.index(op), (0,) * 16,
        COMPUTE_FLAG if source else 0, (source, *(0,) * 9), 0, 0, buffer.base + at, op, 0,
    )  # fmt: skip


def calls_of(nodes: int, apart: int) -> int:
    """The calls of Python for a graph of nodes whose sources of 64 bytes are `apart` bytes apart."""
    buffers = Buffers()
    buffer = buffers.add(0, 1 << 24)
    tensors = []
    for number in range(nodes):
        source = described(buffer, 2 * number + 1, number * apart, 16)
        made = described(buffer, 2 * number + 2, (1 << 23) + 64 * number, 16, "sqr", source.id)
        tensors += [source, made]
    found = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    message = wire.GraphMessage(0, 0, tuple(range(2, 2 * nodes + 1, 2)), tuple(tensors))
    sys.setprofile(count)
    try:
        bound_graphs(steps_of(message, buffers))
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("apart", [32, 64])
def test_the_work_for_a_graph_grows_with_its_nodes_and_not_with_their_square(apart: int) -> None:
    calls_of(50, apart)
    assert calls_of(1000, apart) < 5 * calls_of(250, apart)


def product_of(
    weight_type: int, block_bytes: int, block: int, matrices: int
) -> tuple[wire.GraphMessage, Buffers]:
    """A product of a matrix of 4 by 64 with 3 rows."""
    row_bytes = 64 // block * block_bytes
    buffers = Buffers()
    buffer = buffers.add(0, 1 << 16)

    def tensor(
        number: int, type: int, at: int, ne: tuple[int, ...], nb: tuple[int, ...], *source: int
    ) -> Any:
        return wire.Tensor(
            number, type, buffer.handle, ne, nb, ops.NAMES.index("mul_mat") if source else 0, (0,) * 16,
            COMPUTE_FLAG if source else 0, (*source, *(0,) * (10 - len(source))), 0, 0, buffer.base + at,
            "t", 0,
        )  # fmt: skip

    weight_bytes = (block_bytes, row_bytes, 4 * row_bytes, 4 * row_bytes * matrices)
    weight = tensor(1, weight_type, 0, (64, 4, matrices, 1), weight_bytes)
    x = tensor(2, F32, 1 << 14, (64, 3, matrices, 1), (4, 256, 768, 768 * matrices))
    y = tensor(3, F32, 1 << 15, (4, 3, matrices, 1), (4, 16, 48, 48 * matrices), 1, 2)
    message = wire.GraphMessage(0, 0, (3,), (weight, x, y))
    return message, buffers


@pytest.mark.parametrize(
    ("weight_type", "block_bytes", "block", "matrices", "rounds"),
    [(2, 18, 32, 1, True), (2, 18, 32, 2, False), (1, 2, 1, 1, False), (F32, 4, 1, 1, False)],
    ids=["q4_0", "two of q4_0", "f16", "f32"],
)
def test_rows_are_rounded_for_a_matrix_of_blocks_if_that_is_asked_for(
    weight_type: int, block_bytes: int, block: int, matrices: int, rounds: bool
) -> None:
    message, buffers = product_of(weight_type, block_bytes, block, matrices)
    for asked in (True, False):
        (found,) = bound_graphs(steps_of(message, buffers), rounds_rows=asked)
        rounded = [node for node in found.graph.nodes if node.op == "cast" and "q8_0" in str(node)]
        assert bool(rounded) == (rounds and asked)
