"""grpcio with nothing of ours on it: streams of raw bytes, and an echo of one message each way.

`server aio|sync` says its port. `client PORT` is the blocking one and answers lines "upload|download BYTES
RUNS CHUNK" and "echo BYTES RUNS"; `aio PORT` answers "echo BYTES RUNS". Serializers are the identity; what
comes is copied into a warm array, on either side.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import uvloop
from peer_lines import Bytes, Timed, Warm, answer, end_with_parent, say

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
SERVICE = "bench.Raw"
SIZE, SIZE_AND_CHUNK = struct.Struct("<Q"), struct.Struct("<QQ")
#: Before the runs of an echo that count.
WARMUP = 50
SECONDS = 60.0

MEMORY = Warm()


def pieces(array: Bytes, chunk: int) -> Iterator[bytes]:
    view = memoryview(array)
    for start in range(0, array.nbytes, chunk):
        yield bytes(view[start : start + chunk])


def sized(array: Bytes, chunk: int) -> Iterator[bytes]:
    """An upload: first how many bytes will come."""
    yield SIZE.pack(array.nbytes)
    yield from pieces(array, chunk)


def handlers(upload: Any, download: Any, echo: Any) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Upload": grpc.stream_unary_rpc_method_handler(upload),
            "Download": grpc.unary_stream_rpc_method_handler(download),
            "Echo": grpc.stream_stream_rpc_method_handler(echo),
        },
    )


# The server on asyncio


async def aio_upload(messages: AsyncIterator[bytes], context: Any) -> bytes:
    (nbytes,) = SIZE.unpack(await anext(messages))
    view, at = memoryview(MEMORY.of(nbytes)), 0
    async for piece in messages:
        view[at : at + len(piece)] = piece
        at += len(piece)
    return b""


async def aio_download(request: bytes, context: Any) -> AsyncIterator[bytes]:
    nbytes, chunk = SIZE_AND_CHUNK.unpack(request)
    for piece in pieces(MEMORY.of(nbytes), chunk):
        yield piece


async def aio_echo(messages: AsyncIterator[bytes], context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def serve_aio() -> None:
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(aio_upload, aio_download, aio_echo),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(port)
    await server.wait_for_termination()


# The server on threads


def upload(messages: Iterator[bytes], context: Any) -> bytes:
    (nbytes,) = SIZE.unpack(next(messages))
    view, at = memoryview(MEMORY.of(nbytes)), 0
    for piece in messages:
        view[at : at + len(piece)] = piece
        at += len(piece)
    return b""


def download(request: bytes, context: Any) -> Iterator[bytes]:
    nbytes, chunk = SIZE_AND_CHUNK.unpack(request)
    return pieces(MEMORY.of(nbytes), chunk)


def echo(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
    return messages


def serve_sync() -> None:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, options=OPTIONS)
        server.add_generic_rpc_handlers((handlers(upload, download, echo),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        say(port)
        server.wait_for_termination()


# The clients


class Client:
    """Blocking."""

    def __init__(self, port: int) -> None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS)
        self._upload = channel.stream_unary(f"/{SERVICE}/Upload")
        self._download = channel.unary_stream(f"/{SERVICE}/Download")
        self._echo = channel.stream_stream(f"/{SERVICE}/Echo")

    def prepare(self, nbytes: int) -> None:
        pass

    def upload(self, array: Bytes, chunk: int) -> None:
        self._upload(sized(array, chunk), timeout=SECONDS)

    def download(self, array: Bytes, chunk: int) -> None:
        view, at = memoryview(array), 0
        for piece in self._download(SIZE_AND_CHUNK.pack(array.nbytes, chunk), timeout=SECONDS):
            view[at : at + len(piece)] = piece
            at += len(piece)
        assert at == array.nbytes

    def echo(self, nbytes: int, runs: int) -> list[float]:
        messages: SimpleQueue[bytes | None] = SimpleQueue()
        answers, message, seconds = self._echo(iter(messages.get, None), timeout=SECONDS), bytes(nbytes), []
        for _ in range(runs + WARMUP):
            start = time.perf_counter()
            messages.put(message)
            next(answers)
            seconds.append(time.perf_counter() - start)
        messages.put(None)
        assert list(answers) == []
        return seconds[WARMUP:]


async def aio_echo_seconds(method: Any, nbytes: int, runs: int) -> list[float]:
    call, message, seconds = method(timeout=SECONDS), bytes(nbytes), []
    for _ in range(runs + WARMUP):
        start = time.perf_counter()
        await call.write(message)
        await call.read()
        seconds.append(time.perf_counter() - start)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return seconds[WARMUP:]


def answer_blocking(port: int) -> None:
    client = Client(port)
    timed = Timed(client)
    answer(lambda name, *numbers: client.echo(*numbers) if name == "echo" else timed(name, *numbers))


def answer_aio(port: int) -> None:
    """On asyncio's own loop, as a user's program would be."""
    with asyncio.Runner() as runner:

        async def method() -> Any:
            return grpc.aio.insecure_channel(f"127.0.0.1:{port}", OPTIONS).stream_stream(f"/{SERVICE}/Echo")

        echoing = runner.run(method())
        answer(lambda name, *numbers: runner.run(aio_echo_seconds(echoing, *numbers)))


if __name__ == "__main__":
    role, option = sys.argv[1:]
    if role == "server":
        end_with_parent()
        uvloop.run(serve_aio()) if option == "aio" else serve_sync()
    elif role == "aio":
        answer_aio(int(option))
    else:
        answer_blocking(int(option))
