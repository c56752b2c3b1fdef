"""Clients of ggml's RPC protocol that send what no client would: at most their own connection
ends."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from daemon_threads import thread_daemon
from ggml_rpc_client import F32, I32, OPS, HungUpError, RpcClient, changed, real, rpc_client

from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.exposure import check_together
from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.server import MOST_CONNECTIONS
from heliograph_server.gateways.ggml_rpc.wire import Command
from heliograph_server.runtime.host import shut_down

#: Mutated conversations; `make fuzz` of the rest of the protocol has its own.
ROUNDS = int(os.environ.get("GGML_RPC_FUZZ", "150"))


@pytest.fixture(autouse=True)
def others_are_served(port: int) -> Iterator[None]:
    """Another client is served before and after."""
    with rpc_client(port) as witness:
        x = witness.array(np.arange(8, dtype=np.float32))
        yield
        assert np.array_equal(witness.get(x).ravel(), np.arange(8))
    with rpc_client(port) as another:
        total = another.tensor(
            F32, (8,), *(another.array(np.ones(8, np.float32)) for _ in range(2)), op="add"
        )
        another.compute(total)
        assert (another.get(total) == 2).all()


def _add(client: RpcClient) -> wire.Tensor:
    x, y = (client.array(np.ones(16, np.float32)) for _ in range(2))
    return client.tensor(F32, (16,), x, y, op="add")


def _graph(**fields: object) -> Callable[[RpcClient], None]:
    """A graph whose node has other fields."""

    def send(client: RpcClient) -> None:
        client.compute(changed(_add(client), client, **fields))

    return send


def _missing_node(client: RpcClient) -> None:
    _add(client)
    client.send(Command.GRAPH_COMPUTE, wire.graph_payload(0, 0, (99_999,), client.tensors))


def _null_node(client: RpcClient) -> None:
    _add(client)
    client.send(Command.GRAPH_COMPUTE, wire.graph_payload(0, 0, (0,), client.tensors))


def _shapes_that_differ(client: RpcClient) -> None:
    x, y = client.array(np.ones(16, np.float32)), client.array(np.ones(7, np.float32))
    client.compute(client.tensor(F32, (16,), x, y, op="add"))


def _without_sources(client: RpcClient) -> None:
    client.compute(client.tensor(F32, (16,), op="add"))


def _source_without_buffer(client: RpcClient) -> None:
    x = changed(client.array(np.ones(16, np.float32)), client, buffer=0)
    client.compute(client.tensor(F32, (16,), x, x, op="add"))


def _function_pointer(client: RpcClient) -> None:
    x = client.array(np.ones(16, np.float32))
    client.compute(client.tensor(F32, (16,), x, op="map_custom1", params=(1, 2, 3, 4)))


def _beyond_tensor(command: Command) -> Callable[[RpcClient], None]:
    def send(client: RpcClient) -> None:
        tensor = client.tensor(F32, (16,))
        where = wire.packed_tensor(tensor)
        if command is Command.SET_TENSOR:
            client.set(tensor, bytes(65))
        else:
            client.send(command, where + struct.pack("<QQ", 2**64 - 8, 16))

    return send


def _set_outside(client: RpcClient) -> None:
    client.set(client.tensor(F32, (16,), data=client.base + (1 << 20) - 8), bytes(64))


def _half_message(client: RpcClient) -> None:
    client.socket.sendall(wire.request(Command.SET_TENSOR, bytes(5000))[:600])
    client.socket.shutdown(socket.SHUT_WR)


def _graph_of_many(client: RpcClient) -> None:
    client.send(Command.GRAPH_COMPUTE, struct.pack("<IQI", 0, 0, 2**32 - 1) + bytes(64))


def _promised(size: int) -> Callable[[RpcClient], None]:
    return lambda client: client.socket.sendall(bytes((Command.GRAPH_COMPUTE,)) + struct.pack("<Q", size))


def _recompute_after_free(client: RpcClient) -> None:
    client.compute(_add(client), uid=5)
    client.free(client.buffer)
    client.recompute(5)


def _source_of_itself(client: RpcClient) -> None:
    node = _add(client)
    ids = (node.id, *node.src[1:])
    client.compute(changed(node, client, src=ids, ne=(17, 1, 1, 1)))


def _pieces_without_end(client: RpcClient) -> None:
    where = wire.packed_tensor(client.tensor(F32, (16,)))
    client.send(Command.GET_TENSOR_2D, where + struct.pack("<4Q", 0, 0, 2**63, 0))


def _pieces_of_other_bytes(client: RpcClient) -> None:
    where = wire.packed_tensor(client.tensor(F32, (16,))) + struct.pack("<4Q", 0, 8, 2, 16)
    client.send(Command.SET_TENSOR_2D, where + bytes(24))


ENDING: dict[str, Callable[[RpcClient], None]] = {
    "null node": _null_node,
    "missing node": _missing_node,
    "op number out of range": _graph(op=101),
    "largest op number": _graph(op=2**32 - 1),
    "type out of range": _graph(type=99),
    "removed type": _graph(type=4),
    "blocks of one element": _graph(type=2, ne=(1, 1, 1, 1)),
    "a tensor that wraps around": _graph(ne=(2**32 - 1,) * 4),
    "strides beyond the buffer": _graph(nb=(4, 2**32 - 1, 4, 4), ne=(4, 4, 1, 1)),
    "strides within an element": _graph(nb=(2, 4, 4, 4)),
    "address below the buffer": _graph(data=0),
    "address beyond the buffer": _graph(data=2**64 - 1),
    "unknown buffer": _graph(buffer=12345),
    "source that is missing": _graph(src=(77_777, *(0,) * 9)),
    "shapes that differ": _shapes_that_differ,
    "no sources": _without_sources,
    "source without a buffer": _source_without_buffer,
    "function pointer": _function_pointer,
    "set beyond the tensor": _beyond_tensor(Command.SET_TENSOR),
    "get beyond the tensor": _beyond_tensor(Command.GET_TENSOR),
    "set outside of the buffer": _set_outside,
    "graph with too many nodes": _graph_of_many,
    "message of 40 GB": _promised(40 << 30),
    "largest message": _promised(2**64 - 1),
    "recompute after free": _recompute_after_free,
    "recompute of nothing": lambda client: client.recompute(123),
    "unknown device": lambda client: client.send(Command.GET_ALIGNMENT, struct.pack("<I", 9)),
    "unknown command": lambda client: client.send(200),
    "a second greeting": lambda client: client.send(Command.HELLO, bytes(24)),
    "node that reads itself": _source_of_itself,
    "pieces without an end": _pieces_without_end,
    "pieces of other bytes than they have": _pieces_of_other_bytes,
    "half a message": _half_message,
}


@pytest.mark.parametrize("probe", ENDING)
def test_a_message_that_cannot_be_taken_ends_its_connection(
    client: RpcClient, probe: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "heliograph_server.gateways"), suppress(HungUpError):
        ENDING[probe](client)
    assert client.is_hung_up_on()
    assert not any("defect" in record.message for record in caplog.records)


def test_the_log_says_why_a_client_is_hung_up_on(client: RpcClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "heliograph_server.gateways"):
        client.recompute(123)
        assert client.is_hung_up_on()
    assert "there is no graph 123 of device 0" in caplog.text


def test_a_client_that_does_not_greet_is_hung_up_on(port: int) -> None:
    with rpc_client(port, says_hello=False) as client:
        assert client.is_hung_up_on()


def test_silent_clients_disturb_no_other(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    with rpc_client(port) as client:
        assert client.allocate(64)
    for one in silent:
        one.close()


def test_a_client_that_leaves_before_its_answer_hurts_nobody(port: int) -> None:
    for _ in range(3):
        with rpc_client(port) as client:
            tensor = client.tensor(F32, (1 << 18,))
            client.send(Command.GET_TENSOR, wire.packed_tensor(tensor) + struct.pack("<QQ", 0, 1 << 20))


def test_a_long_chain_of_nodes_needs_no_deep_stack(port: int) -> None:
    with rpc_client(port) as client:
        last = client.array(np.ones(4, np.float32))
        nodes = []
        for _ in range(3000):
            last = client.tensor(F32, (4,), last, op="scale", params=(real(1.0), real(1.0)))
            nodes.append(last)
        client.compute(*nodes)
        with suppress(HungUpError):
            assert (client.get(last) == 3001).all()


def test_more_clients_than_the_most_are_hung_up_on() -> None:
    with thread_daemon(ggml_rpc="127.0.0.1:0") as daemon:
        at = ("127.0.0.1", daemon.ggml_rpc_port)
        held = [socket.create_connection(at) for _ in range(MOST_CONNECTIONS)]
        with pytest.raises(HungUpError), rpc_client(daemon.ggml_rpc_port):
            pass
        for one in held:
            one.close()


@pytest.mark.parametrize("seed", range(3))
def test_mutated_conversations_end_no_other(port: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    random = np.random.default_rng(seed)
    with caplog.at_level(logging.ERROR, "heliograph_server.gateways"):
        for number in range(ROUNDS // 3):
            with suppress(HungUpError), rpc_client(port) as client:
                client.socket.settimeout(0.05)
                _converse(client, random)
            assert "defect" not in caplog.text, f"seed {seed}, conversation {number}: {caplog.text[-3000:]}"


def _converse(client: RpcClient, random: np.random.Generator) -> None:
    """Send a few messages, of which some bytes are others."""
    node = _add(client)
    index = client.array(np.array([0, 1], np.int32))
    rows = client.tensor(F32, (8, 2), client.tensor(F32, (8, 4)), index, op="get_rows")
    assert index.type == I32 and OPS["add"] == node.op
    where = wire.packed_tensor(node)
    messages = [
        (Command.GRAPH_COMPUTE, client.graph(node, rows, uid=3)),
        (Command.GRAPH_RECOMPUTE, struct.pack("<IQ", 0, 3)),
        (Command.GET_TENSOR, where + struct.pack("<QQ", 0, 64)),
        (Command.SET_TENSOR, where + b"\0" + struct.pack("<Q", 0) + bytes(64)),
        (Command.COPY_TENSOR, where + wire.packed_tensor(rows)),
        (Command.GET_ALLOC_SIZE, bytes(4) + where * 11),
        (Command.MEMSET_TENSOR, where + struct.pack("<QQB", 0, 64, 1)),
        (Command.FREE_BUFFER, struct.pack("<Q", client.buffer)),
    ]
    for place in random.permutation(len(messages))[:4]:
        command, payload = messages[place]
        made = bytearray(payload)
        for _ in range(int(random.integers(0, 6))):
            at = int(random.integers(0, len(made)))
            made[at] = int(random.choice([0, 1, 2, 127, 128, 255, int(random.integers(0, 256))]))
        if random.random() < 0.1:
            made = made[: int(random.integers(0, len(made)))]
        client.send(command, bytes(made))
    with suppress(TimeoutError):
        client.is_hung_up_on()


def test_an_address_that_other_hosts_reach_is_refused_unless_insecure() -> None:
    with pytest.raises(ConfigurationError, match="ggml_rpc at 0.0.0.0:50052 can be reached from other hosts"):
        check_together(ServerConfig(ggml_rpc="0.0.0.0:50052"))
    check_together(ServerConfig(ggml_rpc="0.0.0.0:50052", insecure=True))
    with pytest.raises(ConfigurationError, match="ggml_rpc"):
        check_together(ServerConfig(ggml_rpc="50052"))


def test_the_end_of_its_session_ends_a_connection() -> None:
    with thread_daemon(ggml_rpc="127.0.0.1:0") as daemon, rpc_client(daemon.ggml_rpc_port) as client:
        assert client.allocate(64)
        daemon.host.close_sessions(shut_down())
        assert client.is_hung_up_on()
