"""Matrices of a client that are weights: kernels have them in an order of their own, which no
message shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from ggml_rpc_client import F16, F32, RpcClient, warm_up

from heliograph_backends.host_memory.buffers import HostBuffer
from heliograph_backends.host_memory.order import ByteOrder
from heliograph_server.gateways.ggml_rpc import wire

RANDOM = np.random.default_rng(23)
ROWS, DEPTH = 48, 64
Array: TypeAlias = np.ndarray[Any, Any]


class Weights:
    """Two matrices in a buffer of their own, and products with rows in another."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.values = [RANDOM.standard_normal((ROWS, DEPTH)).astype(np.float16) for _ in range(2)]
        self.mine = client.buffer, client.base
        client.allocate(1 << 16)
        self.tensors = [client.array(one) for one in self.values]
        self.theirs = client.buffer, client.base
        client.buffer, client.base = self.mine
        self.x = RANDOM.standard_normal((3, DEPTH)).astype(np.float32)
        self.rows = client.array(self.x)
        self.products = [client.tensor(F32, (ROWS, 3), one, self.rows, op="mul_mat") for one in self.tensors]

    def in_their_buffer(self, type: int, shape: tuple[int, ...], *sources: wire.Tensor, **how: Any) -> Any:
        """A tensor in the buffer of the weights."""
        self.client.buffer, self.client.base = self.theirs
        made = self.client.tensor(type, shape, *sources, **how)
        self.client.buffer, self.client.base = self.mine
        return made

    def check(self) -> None:
        for product, matrix in zip(self.products, self.values, strict=True):
            expected = self.x @ matrix.astype(np.float32).T
            assert np.allclose(self.client.get(product)[0, 0], expected, atol=1e-4)

    def check_bytes(self) -> None:
        for tensor, matrix in zip(self.tensors, self.values, strict=True):
            assert np.array_equal(self.client.get(tensor)[0, 0], matrix)


@pytest.fixture(scope="module")
def gateway() -> Iterator[ThreadDaemon]:
    """One whose device has the compiled kernels."""
    with thread_daemon(native=True, ggml_rpc="127.0.0.1:0") as daemon:
        warm_up(daemon)
        yield daemon


@pytest.fixture
def weights(client: RpcClient) -> Weights:
    made = Weights(client)
    client.compute(*made.products, uid=1)
    made.check()
    return made


def orders_of(gateway: ThreadDaemon) -> list[ByteOrder]:
    """The orders of buffers that have parts in a form."""
    stores = [one for session in gateway.host.sessions for one in session.inside.core.resources.storages]
    buffers = [one.buffer for one in stores if isinstance(one.buffer, HostBuffer)]
    return [one._order for one in buffers if one._order is not None and one._order.parts]


def test_each_matrix_of_a_buffer_is_brought_into_the_order_of_kernels(
    gateway: ThreadDaemon, weights: Weights
) -> None:
    (order,) = orders_of(gateway)
    assert order.parts == 2
    weights.check_bytes()


def test_rows_that_are_set_later_are_in_the_next_result(weights: Weights) -> None:
    row = RANDOM.standard_normal(DEPTH).astype(np.float16)
    weights.client.set(weights.tensors[1], row.tobytes(), offset=2 * DEPTH * 5)
    weights.values[1][5] = row
    weights.client.recompute(1)
    weights.check()
    weights.check_bytes()


def test_another_graph_reads_the_rows_as_they_were_set(weights: Weights) -> None:
    client, places = weights.client, weights.client.array(np.array([7, 0], np.int32))
    rows = client.tensor(F32, (DEPTH, 2), weights.tensors[0], places, op="get_rows")
    client.compute(rows, uid=2)
    assert np.array_equal(client.get(rows)[0, 0], weights.values[0][[7, 0]].astype(np.float32))
    client.recompute(1)
    weights.check()


def test_a_graph_that_reads_across_two_matrices_reads_them_as_they_were_set(weights: Weights) -> None:
    client = weights.client
    start = weights.tensors[0].data - weights.theirs[1] + 2 * DEPTH * (ROWS - 2)
    across = weights.in_their_buffer(F16, (DEPTH, 4), at=start)
    made = client.tensor(F32, (DEPTH, 4), across, op="cpy")
    client.compute(made, uid=2)
    expected = np.concatenate([weights.values[0][-2:], weights.values[1][:2]])
    assert np.array_equal(client.get(made)[0, 0], expected.astype(np.float32))
    client.recompute(1)
    weights.check()


def test_a_graph_that_writes_a_matrix_changes_what_earlier_graphs_read(
    gateway: ThreadDaemon, weights: Weights
) -> None:
    client = weights.client
    rows = RANDOM.standard_normal((2, DEPTH)).astype(np.float32)
    places = client.array(np.array([9, 3], np.int64))
    matrix = weights.tensors[0]
    at = matrix.data - weights.theirs[1]
    written = weights.in_their_buffer(
        F16, (DEPTH, ROWS), client.array(rows), places, matrix, op="set_rows", at=at, view_src=matrix.id
    )
    client.compute(written, uid=2)
    weights.values[0][[9, 3]] = rows.astype(np.float16)
    weights.check_bytes()
    client.recompute(1)
    weights.check()
    # Matrices that graphs write are no weights from then on.
    assert not orders_of(gateway)
    client.recompute(2)
    client.recompute(1)
    weights.check()


def test_a_buffer_of_weights_is_cleared(weights: Weights) -> None:
    weights.client.send(wire.Command.BUFFER_CLEAR, weights.theirs[0].to_bytes(8, "little") + b"\0")
    for one in weights.values:
        one[:] = 0
    weights.client.recompute(1)
    weights.check()
    weights.check_bytes()


def test_a_graph_that_reads_weights_in_their_own_order_does_not_hinder_one_that_writes_them(
    weights: Weights,
) -> None:
    client = weights.client
    places = client.array(np.array([7, 0], np.int32))
    rows = client.tensor(F32, (DEPTH, 2), weights.tensors[0], places, op="get_rows")
    start = weights.tensors[0].data - weights.theirs[1] + 2 * DEPTH * (ROWS - 2)
    across = client.tensor(F32, (DEPTH, 4), weights.in_their_buffer(F16, (DEPTH, 4), at=start), op="cpy")
    client.compute(rows, across, uid=2)
    new = RANDOM.standard_normal((1, DEPTH)).astype(np.float32)
    matrix = weights.tensors[0]
    written = weights.in_their_buffer(
        F16, (DEPTH, ROWS), client.array(new), client.array(np.array([7], np.int64)), matrix,
        op="set_rows", at=matrix.data - weights.theirs[1], view_src=matrix.id,
    )  # fmt: skip
    client.compute(written, uid=3)
    weights.values[0][7] = new[0].astype(np.float16)
    for _ in range(2):
        for graph in (1, 2, 3):
            client.recompute(graph)
        weights.check()
        weights.check_bytes()
        assert np.array_equal(client.get(rows)[0, 0], weights.values[0][[7, 0]].astype(np.float32))
