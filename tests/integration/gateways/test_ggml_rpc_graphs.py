"""Graphs of a client of ggml's RPC protocol: every byte is as one node after the other would leave
it."""

from __future__ import annotations

import logging
import struct

import numpy as np
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from ggml_rpc_client import F16, F32, I32, I64, RpcClient, real, rpc_client
from ggml_rpc_memory import RandomMemory

from heliograph_proto.sessions import Quota
from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.device import MOST_COMPILED

RANDOM = np.random.default_rng(11)
#: ggml's number of the type.
Q8_0 = 8


def randoms(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return RANDOM.standard_normal(shape, np.float32)


def test_every_node_of_a_graph_can_be_read_afterwards(client: RpcClient) -> None:
    a, b = randoms(3, 8), randoms(8)
    x, y = client.array(a), client.array(b)
    total = client.tensor(F32, (8, 3), x, y, op="add")
    scaled = client.tensor(F32, (8, 3), total, op="scale", params=(real(2.0), real(-1.0)))
    client.compute(total, scaled)
    assert np.array_equal(client.get(total)[0, 0], a + b)
    assert np.array_equal(client.get(scaled)[0, 0], (a + b) * 2 - 1)


def test_products_have_weights_by_rows(client: RpcClient) -> None:
    weights, rows = randoms(6, 32).astype(np.float16), randoms(4, 32)
    made = client.tensor(F32, (6, 4), client.array(weights), client.array(rows), op="mul_mat")
    client.compute(made)
    assert np.allclose(client.get(made)[0, 0], rows @ weights.astype(np.float32).T, atol=1e-4)


def test_a_graph_is_computed_again_by_its_number_with_new_inputs(client: RpcClient) -> None:
    x = client.array(np.ones(16, np.float32))
    made = client.tensor(F32, (16,), x, op="sqr")
    client.compute(made, uid=7)
    for value in (2.0, 3.0):
        client.set(x, np.full(16, value, np.float32).tobytes())
        client.recompute(7)
        assert (client.get(made) == value * value).all()


def test_the_last_graph_is_computed_again_in_version_7() -> None:
    with (
        thread_daemon(ggml_rpc="127.0.0.1:0", ggml_rpc_version="7.0") as daemon,
        rpc_client(daemon.ggml_rpc_port, version=wire.VERSIONS["7.0"]) as client,
    ):
        assert client.hello[:3] == bytes((7, 0, 0))
        x = client.array(np.ones(16, np.float32))
        made = client.tensor(F32, (16,), x, op="sqr")
        client.compute(made)
        client.set(x, np.full(16, 3, np.float32).tobytes())
        client.recompute(0)
        assert (client.get(made) == 9).all()


def test_graphs_stay_known_when_a_buffer_is_freed_that_they_do_not_use(client: RpcClient) -> None:
    made = client.tensor(F32, (16,), client.array(np.full(16, 3, np.float32)), op="sqr")
    mine = client.buffer
    client.compute(made, uid=1)
    other = client.allocate(4096)
    client.free(other)
    client.recompute(1)
    assert (client.get(made) == 9).all()
    client.free(mine)
    client.recompute(1)
    assert client.is_hung_up_on()


def test_an_equal_graph_under_another_number_is_not_compiled_again(
    client: RpcClient, caplog: pytest.LogCaptureFixture
) -> None:
    made = client.tensor(F32, (16,), client.array(np.ones(16, np.float32)), op="sqr")
    with caplog.at_level(logging.INFO, "heliograph_server.session.session"):
        for uid in range(1, 5):
            client.compute(made, uid=uid)
        assert (client.get(made) == 1).all()
    assert sum("compiled" in record.message for record in caplog.records) == 1


def test_graphs_without_a_number_do_not_stay_compiled_for_ever(gateway: ThreadDaemon) -> None:
    with rpc_client(gateway.ggml_rpc_port) as client:
        x = client.array(np.ones(4, np.float32))
        for number in range(MOST_COMPILED + 20):
            made = client.tensor(F32, (4,), x, op="scale", params=(real(float(number)), 0))
            client.compute(made)
        assert (client.get(made) == number).all()
        assert max(one.statistics().plans for one in gateway.host.sessions) == MOST_COMPILED


@pytest.mark.parametrize("type", [F16, F32])
def test_rows_are_written_in_place_into_a_cache_that_later_nodes_read(client: RpcClient, type: int) -> None:
    dtype = np.float16 if type == F16 else np.float32
    before, rows = randoms(10, 4).astype(dtype), randoms(3, 4)
    cache, places = client.array(before), client.array(np.array([7, 0, 2], np.int64))
    source = client.array(rows)
    # The result of SET_ROWS is memory of the cache.
    at = cache.data - client.base
    written = client.tensor(type, (4, 10), source, places, cache, op="set_rows", at=at, view_src=cache.id)
    part = client.tensor(type, (4, 5), at=at, view_src=cache.id)
    doubled = client.tensor(F32, (4, 5), part, op="cpy")
    client.compute(written, doubled, uid=3)
    expected = before.copy()
    expected[[7, 0, 2]] = rows.astype(dtype)
    assert np.array_equal(client.get(cache)[0, 0], expected)
    assert np.array_equal(client.get(doubled)[0, 0], expected[:5].astype(np.float32))
    client.set(places, np.array([9, 1, 4], np.int64).tobytes())
    client.recompute(3)
    expected[[9, 1, 4]] = rows.astype(dtype)
    assert np.array_equal(client.get(cache)[0, 0], expected)
    assert np.array_equal(client.get(doubled)[0, 0], expected[:5].astype(np.float32))


def test_columns_of_a_transposed_cache_are_written_and_read(client: RpcClient) -> None:
    values = randoms(6, 16)
    cache, given = client.array(values), randoms(2, 6)
    at = cache.data - client.base
    columns = client.tensor(F32, (2, 6), nb=(4, 64), at=at + 20)
    turned = client.tensor(F32, (2, 6), client.array(given), nb=(24, 4), at=client._used - 64)
    written = client.tensor(F32, (2, 6), turned, columns, op="cpy", nb=(4, 64), at=at + 20)
    read = client.tensor(F32, (3, 6), nb=(4, 64), at=at + 16)
    total = client.tensor(F32, (1, 6), read, op="sum_rows")
    client.compute(written, total)
    values[:, 5:7] = given.T
    assert np.array_equal(client.get(cache)[0, 0], values)
    assert np.allclose(client.get(total).ravel(), values[:, 4:7].sum(1), atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_graphs_that_use_memory_again_leave_the_bytes_of_one_node_after_the_other(
    client: RpcClient, seed: int
) -> None:
    memory = RandomMemory(client, seed)
    memory.compute(nodes=14)
    found, expected = memory.found(), memory.expected()
    assert np.array_equal(found, expected), f"seed {seed}: {np.flatnonzero(found != expected)[:10]}"


@pytest.mark.parametrize("at", [6, 14])
def test_results_that_overlap_in_the_middle_of_an_element_are_refused(client: RpcClient, at: int) -> None:
    x, place = client.array(randoms(4)), client._used
    first = client.tensor(F32, (4,), x, op="sqr")
    client.compute(first, client.tensor(F16, (4,), x, op="cpy", at=place + at))
    assert client.is_hung_up_on()


def test_nodes_without_the_flag_are_not_computed(client: RpcClient) -> None:
    x = client.array(np.full(4, 3, np.float32))
    made = client.array(np.zeros(4, np.float32))
    at = made.data - client.base
    node = client.tensor(F32, (4,), x, op="sqr", at=at, flags=0)
    client.compute(node)
    assert (client.get(made) == 0).all()


def test_an_index_out_of_range_ends_the_connection_and_no_other(client: RpcClient, port: int) -> None:
    rows = client.tensor(
        F32, (4, 2), client.array(randoms(5, 4)), client.array(np.array([1, 99], np.int32)), op="get_rows"
    )
    client.compute(rows)
    # Before anything is asked for.
    assert not client.socket.recv(1)
    with rpc_client(port) as other:
        assert other.get(other.array(np.ones(4, np.float32))).all()


def test_an_index_out_of_range_ends_the_connection_also_when_a_graph_is_computed_again(
    client: RpcClient, port: int
) -> None:
    indices = client.array(np.array([1, 2], np.int32))
    rows = client.tensor(F32, (4, 2), client.array(randoms(5, 4)), indices, op="get_rows")
    client.compute(rows, uid=3)
    for _ in range(2):
        client.recompute(3)
        assert client.get(rows).any()
    client.set(indices, np.array([1, 99], np.int32).tobytes())
    client.recompute(3)
    assert not client.socket.recv(1)
    with rpc_client(port) as other:
        assert other.get(other.array(np.ones(4, np.float32))).all()


def test_quotas_of_the_tenant_bound_the_memory_of_its_clients() -> None:
    quota = Quota(device_memory_bytes=8 << 20)
    with (
        thread_daemon(ggml_rpc="127.0.0.1:0", ggml_rpc_tenant="llamas", quota=quota) as daemon,
        rpc_client(daemon.ggml_rpc_port) as one,
        rpc_client(daemon.ggml_rpc_port) as other,
    ):
        assert one.allocate(4 << 20) and not other.allocate(4 << 20)
        free, _ = struct.unpack("<QQ", other.ask(wire.Command.GET_DEVICE_MEMORY, bytes(4)))
        assert free <= 4 << 20


def test_attention_with_a_mask_is_that_of_numpy(client: RpcClient) -> None:
    q, k, v = randoms(2, 3, 16), randoms(1, 5, 16), randoms(1, 5, 16)
    mask = np.where(np.tri(3, 5, 2) > 0, 0, -np.inf).astype(np.float16)
    sources = [client.array(each) for each in (q, k.astype(np.float16), v.astype(np.float16), mask)]
    made = client.tensor(F32, (16, 2, 3), *sources, op="flash_attn_ext", params=(real(0.25), real(0.0), 0))
    client.compute(made)
    scores = np.einsum("hmd,xnd->hmn", q, k.astype(np.float16).astype(np.float32)) * 0.25 + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("hmn,xnd->mhd", weights, v.astype(np.float16).astype(np.float32))
    assert np.allclose(client.get(made)[0], expected, atol=2e-3)


def test_numbers_are_converted_where_a_node_copies(client: RpcClient) -> None:
    x = client.array(np.array([1.0, -2.5, 3.25, 100.0], np.float32))
    half, whole = client.tensor(F16, (4,), x, op="cpy"), client.tensor(I32, (4,), x, op="cpy")
    client.compute(half, whole)
    assert client.get(half).ravel().tolist() == [1.0, -2.5, 3.25, 100.0]
    assert client.get(whole).ravel().tolist() == [1, -2, 3, 100]
    assert I64 not in (half.type, whole.type)


def test_halves_become_the_quanta_of_ggmls_cpu(client: RpcClient) -> None:
    """Of a block whose largest element is 146, 73 lies in the middle of two quanta."""
    x = (np.arange(64) % 32 * 2.0 - 14).astype(np.float16)
    x[::32], x[1::32] = 146, 73
    made = client.tensor(Q8_0, (64,), client.array(x), op="cpy")
    client.compute(made)
    blocks = np.frombuffer(client.get_bytes(made, 0, 68), np.uint8).reshape(2, 34)
    factor = np.float32(127) / np.float32(146)
    expected = np.rint(x.astype(np.float32) * factor).astype(np.int8).reshape(2, 32)
    assert np.array_equal(blocks[:, 2:].view(np.int8), expected)
    assert (blocks[:, :2].copy().view(np.float16) == np.float16(146 / 127)).all()


@pytest.mark.parametrize("factor", [0.0, 0.75])
def test_positions_are_embedded_without_parameters_of_yarn(client: RpcClient, factor: float) -> None:
    """ggml's own have no context, and betas of 0, where a model has no such scaling."""
    x, places = randoms(2, 1, 8), client.array(np.array([0, 3], np.int32))
    numbers = [0] * 16
    numbers[1:3] = 8, 2
    numbers[5:9] = map(real, (10_000.0, 1.0, factor, 1.0))
    given = client.array(x)
    made = client.tensor(F32, (8, 1, 2), given, places, op="rope", params=tuple(numbers))
    client.compute(made)
    found = client.get(made)[0]
    assert np.isfinite(found).all()
    if not factor:
        angles = 3 * 10_000.0 ** (-np.arange(4) / 4)
        low, high = x[1, 0, :4], x[1, 0, 4:]
        rotated = [low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles)]
        assert np.allclose(found[1, 0], np.concatenate(rotated), atol=1e-4)
    assert np.allclose(found[0, 0], x[0, 0], atol=1e-5)
