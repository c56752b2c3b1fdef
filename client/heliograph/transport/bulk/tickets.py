"""Direct uploads of contents, by tickets, to the daemon that will hold them.

client ──(PlaceContents)──▸ head ──(Admit)──▸ member    the head passes the ticket to the client
client ─────────────(UploadAdmitted)────────▸ member    the bytes
                            head ◂──(is over)── member
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from heliograph.core.effects import StartUpload, UnreachableError
from heliograph.core.future import logger
from heliograph.graph.files.mapped_files import readable
from heliograph.transport import handshake
from heliograph.transport.channels import NO_CREDENTIALS, credentials_elsewhere, open_channel
from heliograph_proto.addresses import Address, Credentials, parse_address
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.bulk import encode_upload
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    PermissionDeniedError,
    ProtocolError,
    UnavailableError,
)
from heliograph_proto.plans import ContentOffer
from heliograph_proto.v1 import bulk_pb2

ADMIT = "/heliograph.v1.BulkService/Admit"
UPLOAD_ADMITTED = "/heliograph.v1.BulkService/UploadAdmitted"
#: A method that every daemon answers.
HEALTH = "/grpc.health.v1.Health/Check"
#: The time to connect to a daemon other than the session's.
CONNECT_SECONDS = 2.0
#: The number of times to ask a daemon that answered before whether it is there: gRPC may send the
#: first requests on the connection that has just broken.
ASKS = 3
#: The time that a daemon may take to give tickets.
ADMIT_SECONDS = 10.0
#: The time that a head waits for a member that takes no bytes; a member that lost a connection
#: notices in half of it.
PATIENCE_SECONDS = 30.0
#: The number of messages made before gRPC requests them.
_AHEAD = 2


#: Options of connections to daemons other than the session's: their answers are small.
DIRECT_OPTIONS = tuple(
    (name, 2**20 if name == "grpc.max_receive_message_length" else value)
    for name, value in handshake.CHANNEL_OPTIONS
)


def first_message(offer: ContentOffer, size_bytes: int) -> bytes:
    """Return the first message of an upload: the ticket, and no bytes."""
    target = bulk_pb2.UploadTarget(ticket=offer.ticket, size_bytes=size_bytes)
    return encode_upload(target.SerializeToString(), 0, memoryview(b""))


def checked(answer: bulk_pb2.UploadAdmittedResponse, offer: ContentOffer, size_bytes: int) -> tuple[int, int]:
    """Return where to begin, and the size of the pieces.

    Raises UnreachableError for a daemon other than the offer's, and ProtocolError.
    """
    if answer.incarnation != offer.incarnation:
        raise UnreachableError(f"another daemon answers at {offer.address}, or it was restarted")
    if answer.received_bytes > size_bytes or not answer.chunk_bytes:
        raise ProtocolError(f"{offer.address} has {answer.received_bytes} bytes of {size_bytes}")
    return answer.received_bytes, answer.chunk_bytes


def refusal(error: Any, offer: ContentOffer, *, has_begun: bool) -> HeliographError:
    """Return the error of an upload that failed.

    An error before it began, other than a refusal of the ticket, means that another daemon answers,
    or that this one cannot take uploads.
    """
    found = handshake.upload_error(error, address_of(offer))
    if has_begun or isinstance(found, PermissionDeniedError | UnreachableError | CancelledError):
        return found
    return UnreachableError(f"{offer.address} cannot be reached from here: {found.message}")


def address_of(offer: ContentOffer) -> Address:
    """Return the address of an offer's daemon.

    Raises UnreachableError for another kind of address.
    """
    try:
        found = parse_address(offer.address)
    except HeliographError as error:
        raise UnreachableError(f"{offer.address!r:.100} is not an address: {error.message}") from None
    if found.scheme == "local":
        raise UnreachableError(f"{offer.address!r:.100} is an address within another process")
    return found


class _Messages:
    """A short queue of messages for gRPC's thread. Closed when the call ends for any reason."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._is_complete = False
        self._is_over = False

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_complete or self._is_over)
                if self._is_over or not self._queue:
                    return
                message = self._queue.popleft()
                self._changed.notify_all()
            yield message

    @property
    def has_room(self) -> bool:
        """True if the next message need not wait."""
        return len(self._queue) < _AHEAD

    def put(self, message: bytes) -> bool:
        """Add a message, waiting for room. Returns False if the call takes no more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < _AHEAD or self._is_over)
            self._queue.append(message)
            self._changed.notify_all()
            return not self._is_over

    def complete(self) -> None:
        """End the messages."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, since the call takes no more messages."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class TicketUpload:
    """A content's upload to the daemon that gave the ticket.

    Blocking, for one thread; any thread may cancel.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        offer: ContentOffer,
        size_bytes: int,
        patience_seconds: float | None = None,
    ) -> None:
        """`patience_seconds`: the longest silence of the daemon during a wait; None: no limit."""
        self._patience_seconds = patience_seconds
        self._is_late = self._is_cancelled = False
        #: The bytes that the daemon has, and the size of a piece; once it has begun.
        self.received_bytes = self.chunk_bytes = 0
        self._offer, self._size_bytes = offer, size_bytes
        self._has_begun = False
        self._messages = _Messages()
        self._messages.put(first_message(offer, size_bytes))
        method: Any = channel.stream_stream(UPLOAD_ADMITTED, None, bulk_pb2.UploadAdmittedResponse.FromString)
        self._call: Any = method(iter(self._messages))
        if not self._call.add_callback(self._messages.close):
            self._messages.close()

    def begin(self) -> None:
        """Wait for the daemon to identify itself and name the first byte.

        Raises UnreachableError, PermissionDeniedError and CancelledError.
        """
        answer = self._answer()
        self.received_bytes, self.chunk_bytes = checked(answer, self._offer, self._size_bytes)
        self._has_begun = True

    def _answer(self) -> bulk_pb2.UploadAdmittedResponse:
        try:
            with self._watched():
                answer: bulk_pb2.UploadAdmittedResponse | None = next(self._call, None)
        except grpc.RpcError as error:
            failed = self._late() or refusal(error, self._offer, has_begun=self._has_begun)
            if isinstance(failed, CancelledError) and not self._is_cancelled:
                # By the daemon, whose connection to the head broke, or by gRPC for a broken one.
                failed = UnavailableError(f"{self._offer.address} broke an upload off: {failed.message}")
        else:
            if answer is not None:
                return answer
            failed = ProtocolError(f"{self._offer.address} ended an upload without an answer")
        raise failed

    @contextmanager
    def _watched(self) -> Generator[None]:
        """Cancel the upload if the wait in this context takes too long."""
        if self._patience_seconds is None:
            yield
            return
        timer = threading.Timer(self._patience_seconds, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self._is_late = True
        self.cancel()

    def _late(self) -> UnavailableError | None:
        if not self._is_late:
            return None
        return UnavailableError(
            f"{self._offer.address} took no bytes of a content for {self._patience_seconds:g} s",
            advice="query the missing contents, and try again",
        )

    def write(self, data: memoryview) -> None:
        """Send the next bytes, waiting while much is unsent.

        Raises the error of an upload that failed.
        """
        for offset in range(0, data.nbytes, self.chunk_bytes):
            piece = data[offset : offset + self.chunk_bytes]
            if not self._put(encode_upload(None, self.received_bytes, piece)):
                self._answer()
                raise ProtocolError(f"{self._offer.address} ended an upload before its end")
            self.received_bytes += piece.nbytes

    def _put(self, message: bytes) -> bool:
        if self._messages.has_room:
            return self._messages.put(message)
        with self._watched():
            return self._messages.put(message)

    def finish(self) -> None:
        """Wait until all bytes have arrived. Raises ContentMismatchError, or the upload's error."""
        self._messages.complete()
        if (found := self._answer().received_bytes) != self._size_bytes:
            raise ProtocolError(f"{self._offer.address} took {found} bytes of {self._size_bytes}")
        # This reads its status.
        next(self._call, None)

    def cancel(self) -> None:
        """Cancel the upload. Idempotent."""
        self._is_cancelled = True
        self._messages.close()
        self._call.cancel()


class Channels:
    """Connections to daemons other than the session's, by address, each made once. Thread-safe."""

    def __init__(self, own: Address, credentials: Credentials = NO_CREDENTIALS) -> None:
        """`own`: the session's daemon, and the credentials for it."""
        self._own, self._credentials = own, credentials
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        #: The channels on which a daemon answered.
        self._reached: set[grpc.Channel] = set()
        #: Those of them that broke since.
        self._doubted: set[grpc.Channel] = set()
        self._is_closed = False

    def connected(self, offer: ContentOffer) -> grpc.Channel:
        """Return a connection to the daemon of an offer. Raises UnreachableError."""
        channel = self._channel(address_of(offer))
        if channel in self._reached:
            return channel
        for asks_left in reversed(range(ASKS if channel in self._doubted else 1)):
            if (failed := _no_answer(channel, offer)) is None:
                break
            if not asks_left or isinstance(failed, CancelledError):
                raise failed
        self._reached.add(channel)
        self._doubted.discard(channel)
        return channel

    def _channel(self, other: Address) -> grpc.Channel:
        target = str(other)
        with self._lock:
            if self._is_closed:
                raise CancelledError("the session was closed")
            if target not in self._channels:
                elsewhere = credentials_elsewhere(self._credentials, self._own, other)
                self._channels[target] = open_channel(other, DIRECT_OPTIONS, elsewhere)
            return self._channels[target]

    def doubt(self, channel: grpc.Channel) -> None:
        """Record that a call broke: the daemon must answer again before the next use."""
        self._reached.discard(channel)
        self._doubted.add(channel)

    def close(self) -> None:
        """Close all channels, which ends every call."""
        with self._lock:
            self._is_closed = True
            channels, self._channels = list(self._channels.values()), {}
        self._reached.clear()
        self._doubted.clear()
        for channel in channels:
            channel.close()


def _no_answer(channel: grpc.Channel, offer: ContentOffer) -> HeliographError | None:
    """Ask the daemon for any answer. Returns the error if there is none."""
    method: Any = channel.unary_unary(HEALTH, None, None)
    try:
        method(b"", timeout=CONNECT_SECONDS)
    except grpc.RpcError as error:
        handshake.forget_traceback(error)
        match error.code():
            case grpc.StatusCode.UNAVAILABLE:
                return UnreachableError(f"{offer.address} cannot be reached from here: {error.details()}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return UnreachableError(f"{offer.address} did not answer within {CONNECT_SECONDS:g} s")
            case grpc.StatusCode.CANCELLED:
                return CancelledError("the upload was cancelled")
    except ValueError:
        return CancelledError("the session was closed")
    return None


#: Called with the number of a content, the bytes that arrived, whether it is over, and the error if
#: it failed.
Tell = Callable[[int, int, bool, "HeliographError | None"], None]


class Announcement:
    """Contents that a session announced, and the thread that receives reports on them."""

    def __init__(
        self,
        channel: grpc.Channel,
        address: Address,
        session: bytes,
        contents: Sequence[bulk_pb2.AdmittedContent],
        tell: Tell,
    ) -> None:
        """Announce contents. Raises the errors of BulkService.Admit, and DeadlineExceededError."""
        self._address, self._tell = address, tell
        self._left = set(range(len(contents)))
        self._has_tickets = threading.Event()
        self._is_cancelled = False
        self._error: HeliographError | None = None
        self.tickets: tuple[bytes, ...] = ()
        method: Any = channel.unary_stream(ADMIT, None, bulk_pb2.AdmitResponse.FromString)
        request = bulk_pb2.AdmitRequest(session=session, contents=contents)
        self._call: Any = method(request.SerializeToString())
        self._thread = threading.Thread(target=self._read, name="heliograph-admit", daemon=True)
        self._thread.start()
        if not self._has_tickets.wait(ADMIT_SECONDS):
            self.cancel()
            raise DeadlineExceededError(f"{address} gave no tickets within {ADMIT_SECONDS:g} s")
        if len(self.tickets) != len(contents):
            self.cancel()
            raise self._error or ProtocolError(f"{address} gave {len(self.tickets)} tickets")

    def _read(self) -> None:
        error: HeliographError = ProtocolError(f"{self._address} ended its reports on announced contents")
        try:
            for answer in self._call:
                self._apply(answer)
        except grpc.RpcError as broken:
            error = handshake.typed_error(broken, self._address, "report on announced contents")
        except Exception as defect:
            logger.exception("a daemon's report on announced contents could not be understood")
            error = ProtocolError(f"a report of {self._address} could not be understood: {defect}")
        self._error = error
        has_tickets = self._has_tickets.is_set()
        self._has_tickets.set()
        if has_tickets:
            for place in sorted(self._left):
                self._report(place, 0, True, error)

    def _apply(self, answer: bulk_pb2.AdmitResponse) -> None:
        if not self._has_tickets.is_set():
            self.tickets = tuple(answer.tickets)
            self._has_tickets.set()
            return
        if answer.is_over:
            self._left.discard(answer.content)
        error = decode_error(answer.error) if answer.HasField("error") else None
        self._report(answer.content, answer.received_bytes, answer.is_over, error)

    def _report(self, place: int, received_bytes: int, is_over: bool, error: HeliographError | None) -> None:
        if not self._is_cancelled:
            self._tell(place, received_bytes, is_over, error)

    def cancel(self) -> None:
        """End the announcement.

        Contents that are not over will not come, without reports. Idempotent.
        """
        self._is_cancelled = True
        self._call.cancel()


class DirectUpload:
    """The upload of one content by the ticket of an offer."""

    def __init__(self, upload: StartUpload, offer: ContentOffer) -> None:
        self._upload, self._offer = upload, offer
        self._lock = threading.Lock()
        self._sending: TicketUpload | None = None
        self._is_cancelled = False

    def run(self, channels: Channels) -> None:
        """Send the bytes.

        Raises UnreachableError before any byte was sent, and the errors of an upload.
        """
        channel = channels.connected(self._offer)
        data = self._upload.data
        with self._lock:
            if self._is_cancelled:
                raise CancelledError("the upload was cancelled")
            sending = self._sending = TicketUpload(channel, self._offer, data.nbytes)
        try:
            sending.begin()
            self._tell(sending.received_bytes - self._upload.offset_bytes)
            for offset in range(sending.received_bytes, data.nbytes, sending.chunk_bytes):
                piece = readable(data[offset : offset + sending.chunk_bytes])
                sending.write(piece)
                self._tell(piece.nbytes)
            sending.finish()
        except UnavailableError:
            channels.doubt(channel)
            raise
        finally:
            sending.cancel()

    def _tell(self, taken_bytes: int) -> None:
        if taken_bytes and self._upload.progress is not None:
            self._upload.progress(taken_bytes)

    def cancel(self) -> None:
        """Cancel the upload, from any thread. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            sending = self._sending
        if sending is not None:
            sending.cancel()
