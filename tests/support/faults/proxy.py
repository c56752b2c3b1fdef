"""A proxy that counts the messages of each connection, and does harm at one of them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum

#: What HTTP/2 clients send first.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Frames that carry messages or begin calls, and records with data.
HTTP2_FRAMES, TLS_RECORDS = (0, 1), (23,)
DELAY_SECONDS = 0.3


class Kind(Enum):
    """The harm that is done."""

    CUT = "cut"
    RESET = "reset"
    STALL = "stall"
    STALL_BOTH = "stall both ways"
    DELAY = "delay"
    CORRUPT = "corrupt"
    #: Later connections reach the daemon before this one.
    REORDER = "reorder"


@dataclass(frozen=True)
class Place:
    """The n-th message of a connection in one direction. Connections are numbered as they come."""

    connection: int
    to_daemon: bool
    message: int


@dataclass(frozen=True)
class Fault:
    kind: Kind
    place: Place
    #: True if a part of the message has passed by then.
    midway: bool = False


class Frames:
    """Finds where messages begin in one direction of a connection."""

    def __init__(self, is_tls: bool, to_daemon: bool) -> None:
        self._is_tls = is_tls
        self._skip = 0 if is_tls or not to_daemon else len(PREFACE)
        self._header = b""

    def cut(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Yield the data in parts, and whether a part begins with a message."""
        size = 5 if self._is_tls else 9
        while data:
            if self._skip:
                part, data = data[: self._skip], data[self._skip :]
                self._skip -= len(part)
                yield part, False
                continue
            need = size - len(self._header)
            self._header, part, data = self._header + data[:need], data[:need], data[need:]
            if len(self._header) < size:
                yield part, False
                return
            header, self._header = self._header, b""
            if self._is_tls:
                is_message, self._skip = header[0] in TLS_RECORDS, int.from_bytes(header[3:5])
            else:
                is_message, self._skip = header[3] in HTTP2_FRAMES, int.from_bytes(header[:3])
            yield part, is_message


class Chunks:
    """Takes what comes at once on a direct connection for a message: bytes of tensors have no frames."""

    def cut(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Yield the data."""
        yield data, True


class Proxy:
    """Passes connections on to a daemon. One fault at a time is armed, and counts for new connections."""

    def __init__(
        self, target: str, is_tls: bool = False, numbered: bool = True, is_direct: bool = False
    ) -> None:
        """`numbered`: connections are; otherwise all are one, since those of a pool come in any order.
        `is_direct`: they are direct connections."""
        self._is_direct = is_direct
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._is_tls = is_tls
        self._numbered = numbered
        self._fault: Fault | None = None
        #: True if the armed fault has happened.
        self.happened = False
        #: The messages passed by connection and direction since `arm`.
        self.messages: dict[tuple[int, bool], int] = {}
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def arm(self, fault: Fault | None) -> None:
        """Do this harm from now on; None: none. Connections are numbered from 0 again."""

        async def arm() -> None:
            self._fault, self.happened, self._connections, self.messages = fault, False, 0, {}

        asyncio.run_coroutine_threadsafe(arm(), self._loop).result(10)

    def drop(self) -> None:
        """Break every connection that is there."""

        async def drop() -> None:
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(drop(), self._loop).result(10)

    def close(self) -> None:
        self.drop()

        async def close() -> None:
            self._server.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number, self._connections = self._connections, self._connections + self._numbered
        fault = self._fault
        try:
            if fault is not None and fault.kind is Kind.REORDER and fault.place.connection == number:
                self.happened = True
                await asyncio.sleep(DELAY_SECONDS)
            there = await asyncio.open_connection(*self._target)
            ends = writer, there[1]
            ways = [
                asyncio.create_task(self._pass(reader, there[1], Place(number, True, 0), ends)),
                asyncio.create_task(self._pass(there[0], writer, Place(number, False, 0), ends)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # At once: this task may be cancelled again while it waits.
                there[1].transport.abort()
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pass(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        way: Place,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        frames = Chunks() if self._is_direct else Frames(self._is_tls, way.to_daemon)
        key = way.connection, way.to_daemon
        with suppress(OSError):
            while data := await source.read(65536):
                for part, is_message in frames.cut(data):
                    if is_message:
                        self.messages[key] = self.messages.get(key, 0) + 1
                        at = Place(way.connection, way.to_daemon, self.messages[key])
                        if self._fault is not None and self._fault.place == at and not self.happened:
                            self.happened = True
                            part = await self._harm(self._fault, part, target, ends)
                    target.write(part)
                await target.drain()

    async def _harm(
        self,
        fault: Fault,
        part: bytes,
        target: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> bytes:
        """Do the harm, and return what is passed on after it."""
        if fault.midway and fault.kind is not Kind.CORRUPT:
            target.write(part[:4])
            await target.drain()
            part = part[4:]
        match fault.kind:
            case Kind.CUT:
                for end in ends:
                    end.close()
                raise OSError("cut")
            case Kind.RESET:
                for end in ends:
                    linger = struct.pack("ii", 1, 0)
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    end.transport.abort()
                raise OSError("reset")
            case Kind.STALL:
                await asyncio.Event().wait()
            case Kind.STALL_BOTH:
                for end in ends:
                    end.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.Event().wait()
            case Kind.DELAY:
                await asyncio.sleep(DELAY_SECONDS)
            case Kind.CORRUPT:
                torn = bytearray(part)
                torn[-1 if fault.midway else 0] ^= 0x10
                return bytes(torn)
        return part


@contextmanager
def proxy(
    target: str, is_tls: bool = False, numbered: bool = True, is_direct: bool = False
) -> Iterator[Proxy]:
    """A proxy before the daemon at `target` (host:port), for as long as the context lasts."""
    made = Proxy(target, is_tls, numbered, is_direct)
    try:
        yield made
    finally:
        made.close()
