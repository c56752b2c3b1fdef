"""Connections of HTTP: the head of a request comes in bounded size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from heliograph_proto.addresses import Address
from heliograph_server.http import connections
from heliograph_server.http.server import HttpServer

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"
SECONDS = 30.0


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of an application."""
    server = HttpServer(None, "web", Address("http", "127.0.0.1", 0), app)
    await server.start()
    host, _, port = server.url.partition("://")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.stop()


async def quick(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def everything(reader: asyncio.StreamReader) -> bytes:
    """The bytes that come until the connection ends, also by a reset."""
    found = bytearray()
    async with asyncio.timeout(SECONDS):
        try:
            while part := await reader.read(2**16):
                found += part
        except ConnectionResetError:
            pass
    return bytes(found)


@pytest.mark.parametrize("before", [b"", HEAD + b"\r\n"])
@pytest.mark.parametrize("part", [b"", HEAD])
def test_a_connection_without_a_whole_head_ends(
    monkeypatch: pytest.MonkeyPatch, before: bytes, part: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)

    async def run() -> None:
        async with served(quick) as (reader, writer):
            if before:
                writer.write(before)
                async with asyncio.timeout(SECONDS):
                    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.write(part)
            assert await everything(reader) == b""

    asyncio.run(run())


def test_a_long_reply_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.02)
    looks, has_looked = 0, asyncio.Event()
    look = connections.Connection._look

    def counted(connection: connections.Connection) -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            has_looked.set()
        look(connection)

    monkeypatch.setattr(connections.Connection, "_look", counted)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        async with asyncio.timeout(SECONDS):
            await has_looked.wait()
        await quick(scope, receive, send)

    async def run() -> None:
        async with served(slow) as (reader, writer):
            writer.write(HEAD + b"connection: close\r\n\r\n")
            assert (await everything(reader)).endswith(b"ok")

    asyncio.run(run())


def test_a_head_is_of_bounded_size() -> None:
    async def run() -> None:
        async with served(quick) as (reader, writer):
            writer.write(HEAD + b"a: " + b"x" * (connections.MOST_HEAD + 1))
            assert (await everything(reader)).startswith(b"HTTP/1.1 400")

    asyncio.run(run())


def test_an_upgrade_to_a_websocket_is_an_ordinary_request() -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"

    async def run() -> None:
        async with served(quick) as (reader, writer):
            writer.write(HEAD + upgrade)
            async with asyncio.timeout(SECONDS):
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    asyncio.run(run())
