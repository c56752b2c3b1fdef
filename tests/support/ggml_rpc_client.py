"""A client of ggml's RPC protocol in Python, which can also send what no client would."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from daemon_threads import ThreadDaemon

from heliograph_server.compile.turns import LARGE_THREADS, SMALL_BYTES, SMALL_THREADS
from heliograph_server.gateways.ggml_rpc import ops, wire
from heliograph_server.gateways.ggml_rpc.buffers import TYPES, span_of
from heliograph_server.gateways.ggml_rpc.graphs import COMPUTE_FLAG
from heliograph_server.gateways.ggml_rpc.wire import Command

SECONDS = 30.0
F32, F16, I32, I64 = 0, 1, 26, 27
OPS = {name: number for number, name in enumerate(ops.NAMES)}
_NUMPY = {F32: "f4", F16: "f2", I32: "i4", I64: "i8"}


class HungUpError(Exception):
    """The server closed the connection."""


def real(value: float) -> int:
    """A parameter of an op that is a float."""
    found: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return found


@dataclass
class RpcClient:
    """A connection. Tensors get places one behind the other in one buffer."""

    port: int
    version: wire.Version = wire.VERSIONS["8.0"]
    says_hello: bool = True
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _used: int = 0
    buffer: int = 0
    base: int = 0
    tensors: list[wire.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.port), SECONDS)
        try:
            self.hello = self.ask(Command.HELLO, bytes(wire.CAPS_BYTES)) if self.says_hello else b""
        except HungUpError:
            self.close()
            raise

    def close(self) -> None:
        self.socket.close()

    # Messages

    def send(self, command: int, payload: bytes = b"") -> None:
        try:
            self.socket.sendall(wire.request(command, payload))
        except OSError:
            raise HungUpError from None

    def ask(self, command: int, payload: bytes = b"") -> bytes:
        """Send a command and return its answer."""
        self.send(command, payload)
        (size,) = struct.unpack("<Q", self._receive(8))
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        made = bytearray()
        while len(made) < size:
            try:
                piece = self.socket.recv(size - len(made))
            except ConnectionError:
                piece = b""
            if not piece:
                raise HungUpError
            made += piece
        return bytes(made)

    def is_hung_up_on(self) -> bool:
        """True once the server has closed the connection; waits for an answer otherwise."""
        try:
            self.ask(Command.DEVICE_COUNT)
        except HungUpError:
            return True
        return False

    # Buffers and tensors

    def allocate(self, size: int, device: int = 0) -> int:
        """Make the buffer that tensors go to, and return its handle; 0 if there is no memory."""
        self.buffer, _ = struct.unpack(
            "<QQ", self.ask(Command.ALLOC_BUFFER, struct.pack("<IQ", device, size))
        )
        if self.buffer:
            (self.base,) = struct.unpack(
                "<Q", self.ask(Command.BUFFER_GET_BASE, struct.pack("<Q", self.buffer))
            )
        self._used = 0
        return self.buffer

    def free(self, buffer: int) -> None:
        self.send(Command.FREE_BUFFER, struct.pack("<Q", buffer))

    def tensor(
        self,
        type: int,
        ne: Sequence[int],
        *sources: wire.Tensor,
        op: str = "none",
        params: Sequence[int] = (),
        nb: Sequence[int] = (),
        at: int | None = None,
        **fields: Any,
    ) -> wire.Tensor:
        """Describe a tensor: a leaf, or a node. `at`: its first byte in the buffer."""
        dtype, sizes = TYPES[type], (*ne, 1, 1, 1, 1)[:4]
        strides = [dtype.block_bytes, sizes[0] // dtype.block_size * dtype.block_bytes]
        for size in sizes[1:3]:
            strides.append(strides[-1] * size)
        strides = [*nb, *strides[len(nb) :]]
        if at is None:
            at = self._used
            self._used += -(-span_of(dtype, sizes, tuple(strides)) // 64) * 64
        given = (*params, *(0,) * 16)[:16]
        ids = (*(one.id for one in sources), *(0,) * 10)[:10]
        made = wire.Tensor(
            next(self._ids), type, self.buffer, sizes, (*strides,), OPS[op], given,
            0 if op == "none" else COMPUTE_FLAG, ids, 0, 0, self.base + at, op, 0,
        )  # fmt: skip
        made = made._replace(**fields)
        self.tensors.append(made)
        return made

    def array(self, values: np.ndarray[Any, Any]) -> wire.Tensor:
        """A leaf with the values, type and shape of an array."""
        type = next(number for number, code in _NUMPY.items() if values.dtype == np.dtype(code))
        made = self.tensor(type, values.shape[::-1])
        self.set(made, values.tobytes())
        return made

    def set(self, tensor: wire.Tensor, data: bytes, offset: int = 0) -> None:
        head = wire.packed_tensor(tensor) + b"\0" + struct.pack("<Q", offset)
        self.send(Command.SET_TENSOR, head + data)

    def get_bytes(self, tensor: wire.Tensor, offset: int, size: int) -> bytes:
        return self.ask(Command.GET_TENSOR, wire.packed_tensor(tensor) + struct.pack("<QQ", offset, size))

    def get(self, tensor: wire.Tensor) -> np.ndarray[Any, Any]:
        """The values of a contiguous tensor, of four dimensions."""
        dtype = np.dtype(_NUMPY[tensor.type])
        size = int(np.prod(tensor.ne)) * dtype.itemsize
        return np.frombuffer(self.get_bytes(tensor, 0, size), dtype).reshape(tensor.ne[::-1])

    # Graphs

    def compute(self, *nodes: wire.Tensor, uid: int = 0, device: int = 0) -> None:
        """Compute nodes in order, with all tensors that were described so far."""
        self.send(Command.GRAPH_COMPUTE, self.graph(*nodes, uid=uid, device=device))

    def graph(self, *nodes: wire.Tensor, uid: int = 0, device: int = 0) -> bytes:
        numbers = [one.id for one in nodes]
        return wire.graph_payload(device, uid if self.version.has_uids else None, numbers, self.tensors)

    def recompute(self, uid: int, device: int = 0) -> None:
        payload = struct.pack("<IQ", device, uid) if self.version.has_uids else struct.pack("<I", device)
        self.send(Command.GRAPH_RECOMPUTE, payload)


@contextmanager
def rpc_client(port: int, **options: Any) -> Iterator[RpcClient]:
    """A client with a buffer of 1 MiB."""
    made = RpcClient(port, **options)
    try:
        if made.says_hello:
            made.allocate(1 << 20)
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class _Flow:
    """An owner of turns."""

    weight: float = 1.0

    def had(self, seconds: float) -> None:
        pass


def warm_up(daemon: ThreadDaemon) -> None:
    """Start the threads that come with the first session, the first compiles, and the first work of
    the daemon's loop for a thread: tests that share a daemon leave none."""
    daemon.call(asyncio.to_thread(int))
    with rpc_client(daemon.ggml_rpc_port):
        pass
    all_started, flow = threading.Barrier(SMALL_THREADS + LARGE_THREADS), _Flow()
    sizes = [0] * SMALL_THREADS + [SMALL_BYTES + 1] * LARGE_THREADS
    for turn in [daemon.turns.submit(flow, size, all_started.wait) for size in sizes]:
        turn.future.result(SECONDS)


def changed(tensor: wire.Tensor, client: RpcClient, **fields: Any) -> wire.Tensor:
    """A tensor of a client in its list with other fields."""
    made = tensor._replace(**fields)
    client.tensors[client.tensors.index(tensor)] = made
    return made
