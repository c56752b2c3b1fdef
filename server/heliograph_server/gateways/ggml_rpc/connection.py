"""One connection: messages in, answers out, in the order in which they come. A thread of its
own."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable

from heliograph_proto import commands as c
from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.buffers import ALIGNMENT, Buffer, RefusedError, alloc_size
from heliograph_server.gateways.ggml_rpc.device import MOST_TENSORS, RpcDevice
from heliograph_server.gateways.ggml_rpc.wire import Command

logger = logging.getLogger(__name__)

#: How long a client may take for its HELLO, for more bytes of a message, and for reading an answer.
HELLO_SECONDS = 10.0
SILENT_SECONDS = 60.0
#: The most bytes of a message other than the data of a tensor.
MOST_PAYLOAD = 64 + MOST_TENSORS * (wire.TENSOR_BYTES + 8)
#: The largest buffer, as clients are told it.
MOST_BUFFER = 1 << 60
_READ_BYTES = 64 * 1024


class ConnectionEndedError(Exception):
    """The client hung up; between two messages that is its good right."""


class Stream:
    """Reads messages of a socket. A client sends each in three parts."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = bytearray(_READ_BYTES)
        self._first = self._last = 0
        self._seconds: float | None = None

    @property
    def is_empty(self) -> bool:
        """True if all bytes that were read are taken."""
        return self._first == self._last

    def wait(self, seconds: float | None) -> None:
        """Wait for the first byte of a message. Raises ConnectionEndedError, TimeoutError."""
        if self._first == self._last:
            self._allow(seconds)
            self._more()

    def _allow(self, seconds: float | None) -> None:
        """Bound further reads and writes. Each call of the socket's is one of the system's."""
        if seconds != self._seconds:
            self._socket.settimeout(seconds)
            self._seconds = seconds

    def _more(self) -> None:
        count = self._socket.recv_into(self._read)
        if not count:
            raise ConnectionEndedError
        self._first, self._last = 0, count

    def take(self, size: int) -> memoryview:
        """Return bytes. Raises ConnectionEndedError, TimeoutError."""
        if self._last - self._first >= size:
            found = bytes(self._read[self._first : self._first + size])
            self._first += size
            return memoryview(found)
        made = bytearray(size)
        self.into(memoryview(made))
        return memoryview(made)

    def into(self, out: memoryview) -> None:
        """Fill memory with bytes. Raises ConnectionEndedError, TimeoutError."""
        done = min(self._last - self._first, out.nbytes)
        out[:done] = memoryview(self._read)[self._first : self._first + done]
        self._first += done
        while done < out.nbytes:
            self._allow(SILENT_SECONDS)
            if out.nbytes - done >= _READ_BYTES // 2:
                count = self._socket.recv_into(out[done:])
                if not count:
                    raise ConnectionEndedError
                done += count
                continue
            self._more()
            count = min(self._last, out.nbytes - done)
            out[done : done + count] = memoryview(self._read)[:count]
            self._first = count
            done += count

    def send(self, *pieces: c.Bytes) -> None:
        """Send bytes, in one packet if they are few. Raises TimeoutError, OSError."""
        self._allow(SILENT_SECONDS)
        sent = self._socket.sendmsg(pieces)
        for piece in pieces:
            if sent < len(piece):
                self._socket.sendall(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))


class Connection:
    """Answers the messages of a client until it leaves, or sends what cannot be answered."""

    def __init__(
        self,
        stream: Stream,
        version: wire.Version,
        open_device: Callable[[], RpcDevice],
        memory_of: Callable[[str], tuple[int, int]],
    ) -> None:
        """`open_device` opens the session, after HELLO; `memory_of` gives the free and all bytes of
        a device."""
        self._stream = stream
        self._version = version
        self._open_device = open_device
        self._memory_of = memory_of
        self._device: RpcDevice | None = None
        self._answers: dict[Command, Callable[[memoryview], bytes | None]] = {
            Command.ALLOC_BUFFER: self._allocate,
            Command.GET_ALIGNMENT: self._alignment,
            Command.GET_MAX_SIZE: self._max_size,
            Command.BUFFER_GET_BASE: lambda given: wire.numbers(self.device.base(wire.u64(given))),
            Command.FREE_BUFFER: lambda given: self.device.free(wire.u64(given)),
            Command.BUFFER_CLEAR: lambda given: self.device.clear(*wire.clearing(given)),
            Command.SET_TENSOR_HASH: self._hash,
            Command.COPY_TENSOR: self._copy,
            Command.GRAPH_COMPUTE: lambda given: self.device.compute(given),
            Command.GET_DEVICE_MEMORY: self._device_memory,
            Command.INIT_TENSOR: self._init,
            Command.GET_ALLOC_SIZE: self._alloc_size,
            Command.DEVICE_COUNT: self._device_count,
            Command.GRAPH_RECOMPUTE: self._recompute,
            Command.MEMSET_TENSOR: lambda given: self.device.memset(wire.memset(given)),
            Command.COMM_INIT: self._comm_init,
        }

    @property
    def device(self) -> RpcDevice:
        assert self._device is not None
        return self._device

    def serve(self) -> None:
        """Answer until the client hangs up. Raises ConnectionEndedError, WireError, RefusedError,
        HeliographError, OSError."""
        self._hello()
        while True:
            if self._stream.is_empty:
                self.device.flush()
            self._stream.wait(None)
            self._answer()

    def _hello(self) -> None:
        self._stream.wait(HELLO_SECONDS)
        command, size = self._head()
        if command != Command.HELLO or size != wire.CAPS_BYTES:
            raise wire.WireError(f"the first command is {command} with {size} bytes; it must be HELLO")
        self._stream.take(size)
        self._device = self._open_device()
        self._stream.send(wire.hello(self._version))

    def _head(self) -> tuple[int, int]:
        head = self._stream.take(wire.HEADER_BYTES)
        return head[0], int.from_bytes(head[1:], "little")

    def _answer(self) -> None:
        number, size = self._head()
        if number > self._version.last or number == Command.HELLO:
            raise wire.WireError(f"command {number} is unknown, or is not expected now")
        command = Command(number)
        if command is Command.SET_TENSOR:
            self._set(size)
            return
        if command is Command.SET_TENSOR_2D:
            self._set_pieces(size)
            return
        if size > MOST_PAYLOAD:
            raise wire.WireError(f"{command.name} with {size:,} bytes; at most {MOST_PAYLOAD:,}")
        payload = self._stream.take(size)
        if command is Command.GET_TENSOR:
            found = wire.get_tensor(payload)
            self._give(self.device.get(found), found.size)
        elif command is Command.GET_TENSOR_2D:
            pieces = wire.pieces(payload)
            self._give(self.device.get_pieces(pieces), pieces.size * pieces.number)
        elif (answer := self._answers[command](payload)) is not None:
            self._stream.send(answer)

    def _give(self, pieces: Iterable[c.Bytes], size: int) -> None:
        """Send bytes; small ones in one packet with their size."""
        head = size.to_bytes(8, "little")
        for piece in pieces:
            self._stream.send(head, piece)
            head = b""
        if head:
            self._stream.send(head)

    def _set(self, size: int) -> None:
        if size < wire.SET_BYTES:
            raise wire.WireError(f"a SET_TENSOR of {size} bytes")
        head, left = self._stream.take(wire.SET_BYTES), size - wire.SET_BYTES
        self._take_into(*self.device.place_of(head, left), left)

    def _set_pieces(self, size: int) -> None:
        if size < wire.PIECES_BYTES:
            raise wire.WireError(f"a SET_TENSOR_2D of {size} bytes")
        found = wire.pieces(self._stream.take(wire.PIECES_BYTES))
        if size - wire.PIECES_BYTES != found.size * found.number:
            raise RefusedError(f"a SET_TENSOR_2D of {size:,} bytes for {found.number:,} of {found.size:,}")
        for buffer, offset, piece_size in self.device.places(found):
            self._take_into(buffer, offset, piece_size)

    def _take_into(self, buffer: Buffer, offset: int, size: int) -> None:
        """Write the next bytes of the message."""
        while size:
            piece = bytearray(min(size, self.device.piece_bytes))
            self._stream.into(memoryview(piece))
            self.device.set(buffer, offset, piece)
            offset += len(piece)
            size -= len(piece)

    # Commands with short answers

    def _allocate(self, payload: memoryview) -> bytes:
        return wire.numbers(*self.device.allocate(*wire.allocation(payload)))

    def _alignment(self, payload: memoryview) -> bytes:
        self.device.check_device(wire.u32(payload))
        return wire.numbers(ALIGNMENT)

    def _max_size(self, payload: memoryview) -> bytes:
        self.device.check_device(wire.u32(payload))
        return wire.numbers(MOST_BUFFER)

    def _hash(self, payload: memoryview) -> bytes:
        self.device.check_tensor(wire.hashed(payload))
        # Its bytes must come: a hash of 64 bits does not name them safely.
        return wire.answer(b"\0")

    def _copy(self, payload: memoryview) -> bytes:
        return wire.answer(bytes((self.device.copy(*wire.copying(payload)),)))

    def _device_memory(self, payload: memoryview) -> bytes:
        return wire.numbers(*self._memory_of(self.device.check_device(wire.u32(payload))))

    def _init(self, payload: memoryview) -> None:
        self.device.check_tensor(wire.tensor(wire.exactly(payload, wire.TENSOR_BYTES)))

    def _alloc_size(self, payload: memoryview) -> bytes:
        device, tensor = wire.alloc_size(payload)
        self.device.check_device(device)
        return wire.numbers(alloc_size(tensor))

    def _device_count(self, payload: memoryview) -> bytes:
        wire.exactly(payload, 0)
        return wire.answer(len(self.device.names).to_bytes(4, "little"))

    def _comm_init(self, payload: memoryview) -> bytes:
        # Servers do not sum tensors among each other here: the client sums them itself.
        wire.exactly(payload, wire.COMM_BYTES)
        return wire.answer(b"\0")

    def _recompute(self, payload: memoryview) -> None:
        self.device.recompute(*wire.recomputation(payload, self._version))


#: The errors that end a connection, and are logged with their reason.
REFUSALS = (wire.WireError, RefusedError)
