"""Buffers and tensors of a client of ggml's RPC protocol."""

from __future__ import annotations

import struct

import numpy as np
from daemon_threads import ThreadDaemon
from ggml_rpc_client import F32, RpcClient, rpc_client

from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.connection import MOST_PAYLOAD
from heliograph_server.gateways.ggml_rpc.wire import Command


def test_a_client_is_greeted_with_the_version_and_told_of_the_devices(client: RpcClient) -> None:
    assert client.hello == bytes((8, 0, 0, 0)) + bytes(24)
    assert struct.unpack("<I", client.ask(Command.DEVICE_COUNT)) == (1,)
    alignment, most = (
        struct.unpack("<Q", client.ask(command, struct.pack("<I", 0)))[0]
        for command in (Command.GET_ALIGNMENT, Command.GET_MAX_SIZE)
    )
    free, total = struct.unpack("<QQ", client.ask(Command.GET_DEVICE_MEMORY, struct.pack("<I", 0)))
    assert alignment == 64 and most >= 1 << 40 and 0 < free <= total


def test_bytes_of_tensors_are_set_in_part_and_got_in_part(client: RpcClient) -> None:
    tensor = client.tensor(F32, (1000,))
    values = np.arange(1000, dtype=np.float32)
    client.set(tensor, values.tobytes())
    client.set(tensor, b"\xff" * 8, offset=40)
    found = client.get(tensor).ravel()
    assert np.isnan(found[10:12]).all()
    assert np.array_equal(np.delete(found, (10, 11)), np.delete(values, (10, 11)))
    assert client.get_bytes(tensor, 20, 12) == values[5:8].tobytes()


def test_a_tensor_of_many_pieces_arrives_whole(port: int) -> None:
    with rpc_client(port) as client:
        client.allocate(6 << 20)
        tensor = client.tensor(F32, (1 << 20,))
        values = np.random.default_rng(5).standard_normal(1 << 20, np.float32)
        client.set(tensor, values.tobytes())
        assert np.array_equal(client.get(tensor).ravel(), values)


def test_buffers_are_cleared_and_tensors_filled(client: RpcClient) -> None:
    tensor = client.tensor(F32, (64,))
    client.send(Command.BUFFER_CLEAR, struct.pack("<QB", client.buffer, 7))
    client.send(Command.MEMSET_TENSOR, wire.packed_tensor(tensor) + struct.pack("<QQB", 8, 16, 255))
    assert client.get_bytes(tensor, 0, 32) == b"\7" * 8 + b"\xff" * 16 + b"\7" * 8


def test_pieces_at_equal_distances_are_set_and_got(client: RpcClient) -> None:
    tensor = client.tensor(F32, (64,))
    client.send(Command.BUFFER_CLEAR, struct.pack("<QB", client.buffer, 0))
    where = wire.packed_tensor(tensor) + struct.pack("<4Q", 4, 3, 5, 10)
    client.send(Command.SET_TENSOR_2D, where + bytes(range(1, 16)))
    assert client.ask(Command.GET_TENSOR_2D, where) == bytes(range(1, 16))
    assert client.get_bytes(tensor, 14, 3) == bytes((4, 5, 6))


def test_pieces_of_more_bytes_than_other_messages_may_have_are_set_and_got(port: int) -> None:
    rows, width = 3, MOST_PAYLOAD // 8
    with rpc_client(port) as client:
        client.allocate(4 * rows * (width + 16))
        tensor = client.tensor(F32, (width + 16, rows))
        values = np.random.default_rng(6).standard_normal((rows, width), np.float32)
        where = wire.packed_tensor(tensor) + struct.pack("<4Q", 8, 4 * width, rows, 4 * (width + 16))
        client.send(Command.SET_TENSOR_2D, where + values.tobytes())
        assert np.array_equal(client.get(tensor)[0, 0][:, 2 : width + 2], values)
        assert client.ask(Command.GET_TENSOR_2D, where) == values.tobytes()


def test_a_client_is_told_that_servers_sum_no_tensors_among_each_other(client: RpcClient) -> None:
    assert client.ask(Command.COMM_INIT, bytes(wire.COMM_BYTES)) == b"\0"
    assert client.allocate(64)


def test_tensors_are_copied_on_the_server(client: RpcClient) -> None:
    one, other = client.array(np.arange(16, dtype=np.float32)), client.tensor(F32, (16,))
    both = wire.packed_tensor(one) + wire.packed_tensor(other)
    assert client.ask(Command.COPY_TENSOR, both) == b"\1"
    assert np.array_equal(client.get(other), client.get(one))


def test_a_hash_is_never_known_so_the_bytes_come(client: RpcClient) -> None:
    tensor = client.tensor(F32, (16,))
    asked = wire.packed_tensor(tensor) + struct.pack("<QQ", 0, 1)
    assert client.ask(Command.SET_TENSOR_HASH, asked) == b"\0"


def test_memory_that_is_not_there_is_answered_with_zeros(client: RpcClient) -> None:
    for size in (1 << 50, 1 << 62, 2**64 - 1):
        assert client.ask(Command.ALLOC_BUFFER, struct.pack("<IQ", 0, size)) == bytes(16)
    assert client.allocate(64)


def test_memory_that_is_not_there_leaves_nothing_in_the_session(gateway: ThreadDaemon) -> None:
    with rpc_client(gateway.ggml_rpc_port) as client:
        mine = client.tensor(F32, (4,))
        session = gateway.host.sessions[-1]
        before = session.statistics()
        for _ in range(10):
            client.ask(Command.ALLOC_BUFFER, struct.pack("<IQ", 0, 1 << 50))
        client.get(mine)
        assert session.statistics() == before


def test_a_buffer_gives_its_memory_back_when_it_is_freed_or_its_client_leaves(port: int) -> None:
    def free_bytes(client: RpcClient) -> int:
        return struct.unpack("<QQ", client.ask(Command.GET_DEVICE_MEMORY, struct.pack("<I", 0)))[0]

    with rpc_client(port) as watcher:
        before = free_bytes(watcher)
        buffer = watcher.allocate(32 << 20)
        assert free_bytes(watcher) <= before - (32 << 20)
        watcher.free(buffer)
        assert free_bytes(watcher) == before
        with rpc_client(port) as other:
            other.allocate(32 << 20)
        for _ in range(20_000):
            if free_bytes(watcher) == before:
                return
    raise AssertionError("the memory of a client that left did not come back")


def test_two_clients_are_served_at_once(port: int) -> None:
    with rpc_client(port) as one, rpc_client(port) as other:
        first, second = one.array(np.zeros(4, np.float32)), other.array(np.ones(4, np.float32))
        assert (one.get(first) == 0).all() and (other.get(second) == 1).all()
