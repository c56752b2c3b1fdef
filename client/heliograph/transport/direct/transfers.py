"""Bytes of tensors and contents on connections of their own: see `direct.proto`.

The bytes go from the caller's memory to the system, and from the system into the caller's memory,
without another copy. All methods block; any thread.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from heliograph.core.effects import StartUpload
from heliograph.core.future import Deadline, logger
from heliograph.graph.files.mapped_files import readable, truncated
from heliograph.transport.bulk.link import Link
from heliograph.transport.direct.keeping import sent
from heliograph.transport.direct.opening import open_direct
from heliograph_proto.addresses import Address
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.frames import LENGTH_BYTES, framed
from heliograph_proto.codec.packing import HEADER, PIECE_BYTES, Encoding, Packer, check_piece, unpack
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError, UnavailableError
from heliograph_proto.sessions import SessionInfo
from heliograph_proto.v1 import direct_pb2

#: The connections of a session.
MOST_CONNECTIONS = 4
#: The bytes of one system call: others may cancel between two.
CALL_BYTES = 2 * 2**20
#: The bytes of a system call that reads. The system wakes a reader when all of them are there, not
#: at each packet, so the sender runs meanwhile.
READ_BYTES = 2**20
#: More bytes of a piece follow at once.
_MORE = getattr(socket, "MSG_MORE", 0)
#: How often an upload that waits for its turn sees whether it was cancelled.
TURN_SECONDS = 0.05
#: The largest answer.
ANSWER_BYTES = 65_536
NO_LIMIT = Deadline(None)


class BrokenOffError(CancelledError):
    """This side ended the connection of a transfer, which may go on by another one."""


class Connection:
    """One connection, used by one thread at a time. Any thread may cancel."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.is_broken = False
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        #: The bytes for which the system wakes a reader.
        self._least_bytes = 1

    def __repr__(self) -> str:
        return f"<Connection {'broken' if self.is_broken else 'open'}>"

    @property
    def is_idle(self) -> bool:
        """False if it has ended, or bytes have come that no transfer awaits."""
        return not (self.is_broken or self._poll.poll(0))

    def cancel(self) -> None:
        """Break it off. Idempotent."""
        self.is_broken = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close it. Idempotent."""
        self.is_broken = True
        self._socket.close()

    def send(self, data: memoryview, moved: Callable[[int], None] | None = None, flags: int = 0) -> bool:
        """Send bytes, calling `moved` with the number of each part.

        Returns False if the server has ended the transfer early; its answer says why. Raises
        InvalidArgumentError for bytes in a file that was truncated.
        """
        try:
            while data:
                self.check()
                if self._poll.poll(0):
                    return False
                count = self._socket.send(data[:CALL_BYTES], flags)
                data = data[count:]
                if moved is not None:
                    moved(count)
        except HeliographError:
            raise
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise truncated() from None
            return False
        return True

    def receive(
        self, out: memoryview, deadline: Deadline, moved: Callable[[int], None] | None = None
    ) -> None:
        """Fill memory, calling `moved` with the number of each part. Raises UnavailableError,
        DeadlineExceededError."""
        while out:
            self.check()
            piece = out[:READ_BYTES]
            self._wake_for(piece.nbytes)
            seconds = deadline.remaining()
            if not self._poll.poll(None if seconds is None else seconds * 1e3):
                deadline.check()
            try:
                count = self._socket.recv_into(piece, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise UnavailableError(f"a connection for bytes broke: {error.strerror}") from None
            if not count:
                raise UnavailableError("the server ended a connection for bytes")
            out = out[count:]
            if moved is not None:
                moved(count)
        # `is_idle` asks for any.
        self._wake_for(1)

    def _wake_for(self, size_bytes: int) -> None:
        """Have the system wake a reader when so many bytes are there, or the connection ends."""
        if size_bytes != self._least_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._least_bytes = size_bytes

    def sent(self) -> tuple[int, float] | None:
        """As `keeping.sent`."""
        return sent(self._socket)

    def send_piece(self, data: memoryview, encoding: Encoding, plain_bytes: int) -> bool:
        """Send a piece of a packed transfer. Returns as `send`."""
        header = HEADER.pack(encoding, plain_bytes, data.nbytes)
        return self.send(memoryview(header), flags=_MORE) and self.send(data)

    def receive_packed(
        self,
        out: memoryview,
        deadline: Deadline,
        encodings: Collection[Encoding],
        moved: Callable[[int], None] | None = None,
    ) -> int:
        """Fill memory with the pieces of a packed transfer, calling `moved` with the plain bytes of
        each. Returns the bytes that came.

        Raises as `receive`, and ProtocolError.
        """
        header, came = bytearray(HEADER.size), 0
        while out:
            self.receive(memoryview(header), deadline)
            encoding, plain_bytes, packed_bytes = HEADER.unpack(header)
            came += HEADER.size + packed_bytes
            if encoding == Encoding.PLAIN:
                if not 0 < plain_bytes == packed_bytes <= out.nbytes:
                    raise ProtocolError(f"a piece of {packed_bytes:,} bytes, where {out.nbytes:,} are left")
                self.receive(out[:plain_bytes], deadline)
            else:
                check_piece(encoding, plain_bytes, packed_bytes, min(PIECE_BYTES, out.nbytes), encodings)
                packed = memoryview(bytearray(packed_bytes))
                self.receive(packed, deadline)
                out[:plain_bytes] = unpack(encoding, packed, plain_bytes)
            out = out[plain_bytes:]
            if moved is not None:
                moved(plain_bytes)
        return came

    def answer(self, deadline: Deadline) -> int:
        """Receive an answer, and return its bytes. Raises the error in it, ProtocolError."""
        length = bytearray(LENGTH_BYTES)
        self.receive(memoryview(length), deadline)
        if (size := int.from_bytes(length, "little")) > ANSWER_BYTES:
            raise ProtocolError(f"an answer of {size:,} bytes to a transfer")
        data = bytearray(size)
        self.receive(memoryview(data), deadline)
        try:
            found = direct_pb2.DirectTransferResponse.FromString(bytes(data))
        except DecodeError:
            raise ProtocolError("an answer to a transfer cannot be read") from None
        if found.HasField("error"):
            raise decode_error(found.error)
        return found.size_bytes

    def check(self) -> None:
        """Raise BrokenOffError if it was cancelled."""
        if self.is_broken:
            raise BrokenOffError("the transfer was cancelled")


class Arrived:
    """Counts the bytes of a download that have arrived, and the attempts before the present one."""

    def __init__(self) -> None:
        self.count = self.tries = 0

    def __repr__(self) -> str:
        return f"<Arrived {self.count:,} bytes>"

    def add(self, count: int) -> None:
        """Count bytes."""
        self.count += count


class DirectTransfers:
    """The connections of a session for bytes, opened when they are needed."""

    def __init__(
        self, address: Address, info: SessionInfo, silence_seconds: float | None, link: Link
    ) -> None:
        """`silence_seconds`: see `open_direct`; None opens none."""
        self._address, self._info, self._silence_seconds = address, info, silence_seconds
        self._link = link
        self._lock = threading.Lock()
        #: Those of transfers under way, and the others.
        self._used: set[Connection] = set()
        self._idle: list[Connection] = []
        self._opening = 0
        #: Held while bytes are sent, of tensors and of contents: those of a later tensor would be kept
        #: in the server's memory until its turn. Contents are large, so no tensor waits for one.
        self._tensors, self._contents = threading.Lock(), threading.Lock()
        self._is_off = self._is_over = silence_seconds is None or info.direct is None

    def __repr__(self) -> str:
        return f"<DirectTransfers {len(self._used)} used, {len(self._idle)} idle>"

    @property
    def is_over(self) -> bool:
        """True if no connection can be had any more."""
        return self._is_over

    def take(self) -> Connection | None:
        """Return a connection for one transfer; None if there is none, and gRPC must carry it."""
        with self._lock:
            if self._is_over:
                return None
            while self._idle:
                if (found := self._idle.pop()).is_idle:
                    self._used.add(found)
                    return found
                # It broke between two transfers, of which none needs to fail.
                found.close()
            if len(self._used) + self._opening >= MOST_CONNECTIONS:
                return None
            self._opening += 1
        return self._opened()

    def _opened(self) -> Connection | None:
        made: Connection | None = None
        why = ""
        request = direct_pb2.DirectRequest(transfers=direct_pb2.TransferConnection())
        assert self._silence_seconds is not None, "otherwise it is over"
        try:
            made = Connection(open_direct(self._address, self._info, request, self._silence_seconds))
        except HeliographError as error:
            why = error.message
        with self._lock:
            self._opening -= 1
            if made is not None and not self._is_over:
                self._used.add(made)
                return made
            self._is_over = True
        if made is not None:
            made.close()
        else:
            logger.debug("tensors go by gRPC: %s", why)
        return None

    @contextmanager
    def _using(self, connection: Connection) -> Generator[None]:
        """Use it for one transfer. It is kept if that ends well."""
        try:
            yield
        except BaseException:
            connection.cancel()
            raise
        finally:
            self.give(connection)

    def give(self, connection: Connection) -> None:
        """Return a connection: it is kept unless it was cancelled."""
        with self._lock:
            self._used.discard(connection)
            if is_kept := not (connection.is_broken or self._is_over):
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    @contextmanager
    def _turn(self, connection: Connection, upload: StartUpload) -> Generator[None]:
        """Wait until no other upload of its kind sends. Raises CancelledError."""
        lock = self._tensors if isinstance(upload.target, int) else self._contents
        while not lock.acquire(timeout=TURN_SECONDS):
            connection.check()
        try:
            yield
        finally:
            lock.release()

    def upload(self, connection: Connection, upload: StartUpload, taken: Callable[[], None]) -> None:
        """Send bytes. `taken` is called when the caller may overwrite them.

        Raises the server's error, UnavailableError, CancelledError.
        """
        size_bytes = upload.data.nbytes
        request = direct_pb2.DirectTransfer(
            size_bytes=size_bytes, offset_bytes=upload.offset_bytes, attempt=upload.attempt
        )
        if isinstance(upload.target, int):
            request.upload = upload.target
        else:
            request.content = upload.target
        data = upload.data[upload.offset_bytes :]
        packer = self._link.packer(data.nbytes)
        request.is_packed = packer is not None
        with self._using(connection):
            with self._turn(connection, upload):
                is_whole = connection.send(memoryview(framed(request.SerializeToString())))
                if is_whole and packer is None:
                    is_whole = connection.send(data, upload.progress)
                elif is_whole and packer is not None:
                    is_whole = self._send_packed(connection, data, upload.progress, packer)
            if is_whole:
                taken()
            received = connection.answer(NO_LIMIT)
            if not is_whole or received != size_bytes:
                raise ProtocolError(f"the server took {received:,} bytes of {size_bytes:,}")

    def _send_packed(
        self,
        connection: Connection,
        data: memoryview,
        moved: Callable[[int], None] | None,
        packer: Packer,
    ) -> bool:
        """Send pieces as they go fastest over the link, which is measured meanwhile."""
        before = connection.sent()
        for offset in range(0, data.nbytes, PIECE_BYTES):
            piece = readable(data[offset : offset + PIECE_BYTES])
            encoding, packed = packer.pack(piece, self._link.up)
            if not connection.send_piece(memoryview(packed), encoding, piece.nbytes):
                return False
            if moved is not None:
                moved(piece.nbytes)
            now = connection.sent()
            if before and now:
                self._link.sent(now[0] - before[0], now[1] - before[1])
            before = now
        return True

    def download(
        self,
        connection: Connection,
        transfer: int,
        out: memoryview,
        deadline: Deadline,
        arrived: Arrived | None = None,
    ) -> None:
        """Receive the bytes of a transfer, after those that have `arrived`, which counts on.

        Raises the command's error, UnavailableError, DeadlineExceededError, CancelledError.
        """
        arrived = arrived or Arrived()
        request = direct_pb2.DirectTransfer(
            size_bytes=out.nbytes,
            download=transfer,
            offset_bytes=arrived.count,
            resume=arrived.tries > 0,
        )
        rest = out[arrived.count :]
        if (rate := self._link.download_rate(out.nbytes)) is not None:
            request.encodings.extend(self._link.numbers)
            request.bytes_per_second = rate
        with self._using(connection):
            connection.send(memoryview(framed(request.SerializeToString())))
            if (size := connection.answer(deadline)) != out.nbytes:
                raise ProtocolError(f"a download of {out.nbytes:,} bytes has {size:,}")
            start, came = time.monotonic(), rest.nbytes
            if rate is None:
                connection.receive(rest, deadline, arrived.add)
            else:
                came = connection.receive_packed(rest, deadline, self._link.encodings, arrived.add)
            self._link.received(came, time.monotonic() - start, is_packed=rate is not None)

    def renew(self) -> None:
        """End all transfers, since the session's connection broke. Later ones open connections."""
        self.close()
        self._is_over = self._is_off

    def abandon(self) -> None:
        """Close the connections in the child of a fork, without an effect on the parent's."""
        # A thread of the parent may hold the lock, and is not here.
        self._lock = threading.Lock()
        self._is_over = True
        for one in (*self._idle, *self._used):
            one.close()

    def close(self) -> None:
        """End all transfers, and close the connections without one."""
        with self._lock:
            self._is_over = True
            used, idle = list(self._used), self._idle
            self._idle = []
        for one in idle:
            one.close()
        for one in used:
            # Its thread closes it.
            one.cancel()
