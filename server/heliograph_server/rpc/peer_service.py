"""PeerService: values between daemons.

Threads that produce values wake the loop once for all values of one turn. The loop writes them
without a task, and collects further values while a write is under way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from grpc import aio

from heliograph_proto.addresses import Shown, nothing_shown
from heliograph_proto.codec import encode, encode_error
from heliograph_proto.codec.bulk import decode_download
from heliograph_proto.eager import begin
from heliograph_proto.errors import (
    HeliographError,
    LimitExceededError,
    MemberLostError,
    ProtocolError,
)
from heliograph_proto.sessions import DirectOffer
from heliograph_proto.v1 import direct_pb2, peer_pb2
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.exchange.incoming import IncomingValue
from heliograph_server.exchange.outgoing import SMALL_BYTES, GivenAnswers, OutgoingValue, unneeded
from heliograph_server.links import links
from heliograph_server.links.aio import taken
from heliograph_server.links.joined import Call, JoinedStream
from heliograph_server.links.links import wrong_size
from heliograph_server.links.probe import check_probe, probe
from heliograph_server.links.requests import RECEIPT_BYTES
from heliograph_server.resources.failures import typed
from heliograph_server.rpc.direct.port import DirectPort
from heliograph_server.rpc.leases.take_service import TakeService
from heliograph_server.rpc.receiving import first_of
from heliograph_server.rpc.requests import Context, Requests, gives_bytes, takes_bytes
from heliograph_server.runtime.host import shut_down
from heliograph_server.runtime.host_slot import HostSlot

logger = logging.getLogger(__name__)

Found = TypeVar("Found", OutgoingValue, IncomingValue)

#: The most bytes that an Echo sends back.
ECHO_BYTES = 2**20
#: About the size of the largest message of answers.
MESSAGE_BYTES = 2**20
#: The most links measured at once, for all clients.
MOST_PROBES = 16
_MEASURING = "have the link to another daemon measured"
#: While a stream has more unwritten answers than this, it is not read.
UNREAD_ANSWERS = 10_000
#: How long a stream that ends waits for the write under way.
LAST_WRITE_SECONDS = 5.0


class PeerService:
    """Gives values to other daemons, and receives theirs.

    `movers` are threads for writes to slow devices. `shown` returns what is shown to a daemon.
    """

    def __init__(
        self,
        slot: HostSlot,
        movers: Executor,
        takers: Executor,
        shown: Shown = nothing_shown,
        direct: DirectPort | None = None,
    ) -> None:
        """Sessions are restored on the threads of `takers`. Streams may go on at the port `direct`."""
        self._slot = slot
        self._takes = TakeService(slot, takers)
        self._shown = shown
        self._direct = direct
        self._movers = movers
        #: Bytes of received values, of all streams, whose tensors are not known yet.
        self._brought = LoopBudget(0)
        self._probes = LoopBudget(MOST_PROBES)
        #: The streams of small values, and the tasks that read them.
        self._open: dict[Conversation, asyncio.Task[Any] | None] = {}
        self._is_over = False

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, peer_pb2.DESCRIPTOR.services_by_name["PeerService"], self, self._takes)

    def _exchange(self, incarnation: bytes) -> LiveExchange:
        """The exchange. Raises MemberLostError if the caller means another incarnation."""
        host = self._slot.host
        if incarnation != host.incarnation:
            raise MemberLostError(
                "the call is for another incarnation of this daemon, or for another daemon",
                advice="its plans and values are gone: compile again",
            )
        return host.exchange

    @takes_bytes
    @gives_bytes
    async def Exchange(self, _requests: object, context: Context) -> None:
        stream = JoinedStream(context, links.MOST_MESSAGE_BYTES)
        try:
            data: Any = await first_of(stream.read())
            if data is aio.EOF:
                return
            request = _decoded(data)
            exchange = self._exchange(request.incarnation)
            with self._offered(stream, context) as offer:
                if offer is not None:
                    first = peer_pb2.ExchangeResponse(direct=encode(offer, direct_pb2.DirectOffer))
                    await stream.write(first.SerializeToString())
                await self._converse(exchange, stream, request)
        finally:
            stream.close()

    @contextmanager
    def _offered(self, stream: JoinedStream, context: Context) -> Iterator[DirectOffer | None]:
        """Offer a connection beside the call, if there can be one."""
        direct = self._direct
        offer = direct.offer_stream(stream.take, context.peer()) if direct is not None else None
        try:
            yield offer
        finally:
            if direct is not None and offer is not None:
                direct.withdraw(offer.ticket)

    async def _converse(
        self, exchange: LiveExchange, stream: JoinedStream, request: peer_pb2.ExchangeRequest
    ) -> None:
        self._brought.limit = exchange.budget.limit_bytes
        conversation = Conversation(exchange, stream, self._movers, self._brought, request.attempt)
        self._open[conversation] = asyncio.current_task()
        try:
            await conversation.take(request)
            while (more := await _next(stream)) is not None:
                await conversation.take(_decoded(more))
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            # A handler that ends as cancelled would leave its call open.
            raise shut_down() from None
        finally:
            del self._open[conversation]
            conversation.close()
            await conversation.written()

    async def hang_up(self) -> None:
        """End the streams of small values once they have said what they have to say.

        The daemons at their other ends keep them for as long as this one lives.
        """
        self._is_over = True

        async def end(conversation: Conversation, task: asyncio.Task[Any] | None) -> None:
            await conversation.said()
            if task is not None:
                task.cancel()

        await asyncio.gather(*(end(*one) for one in self._open.items()))

    @gives_bytes
    async def Pull(self, request: peer_pb2.PullRequest, context: Context) -> None:
        exchange = self._exchange(request.incarnation)
        asked: LoopAnswer[OutgoingValue] = LoopAnswer()
        name = request.edge, request.run
        exchange.ask(*name, request.capability, asked.answer, request.attempt)
        try:
            value = await asked.found()
            value.acknowledge(request.offset_bytes)
            async for message in taken(value, asked.loop, request.offset_bytes):
                await _write(context, message)
            exchange.counter.sent(value.size_bytes - request.offset_bytes)
        finally:
            # The value stays for another call, until its reader has said that it is there.
            exchange.withdraw(*name, asked.answer, again=True)

    @takes_bytes
    async def Push(self, _requests: object, context: Context) -> None:
        first: Any = await first_of(context.read())
        if first is aio.EOF:
            raise ProtocolError("the first message of a value that is brought must name it")
        request = peer_pb2.PushRequest.FromString(first)
        exchange = self._exchange(request.target.incarnation)
        brought: LoopAnswer[IncomingValue] = LoopAnswer()
        name = request.target.edge, request.target.run
        exchange.bring(*name, request.target.capability, brought.answer, request.target.attempt)
        try:
            landing = await brought.found()
            if request.target.again:
                await _write(context, _receipt(landing.received_bytes))
            await self._receive(landing, request.size_bytes, context)
            await _write(context, _receipt(landing.size_bytes))
        finally:
            # The place stays for another call.
            exchange.leave(*name, brought.answer, again=True)

    async def _receive(self, landing: IncomingValue, size_bytes: int, context: Context) -> None:
        """Write the pieces that come. Raises ProtocolError if they end too early; the daemon that
        brings them may then come back."""
        if size_bytes != landing.size_bytes:
            landing.fail(wrong_size(size_bytes, landing.size_bytes))
        told_bytes = landing.received_bytes
        while landing.error is None and landing.received_bytes < size_bytes:
            if (data := await _next(context)) is None:
                at = landing.received_bytes
                raise ProtocolError(f"the value ended at byte {at:,} of {size_bytes:,}")
            if landing.is_quick:
                _land(landing, data)
            else:
                await asyncio.get_running_loop().run_in_executor(self._movers, _land, landing, data)
            if landing.received_bytes - told_bytes >= RECEIPT_BYTES:
                told_bytes = landing.received_bytes
                await _write(context, _receipt(told_bytes))
        if landing.error is not None:
            raise landing.error.anew()

    async def Echo(self, request: peer_pb2.EchoRequest, context: Context) -> peer_pb2.EchoResponse:
        if len(request.payload) > ECHO_BYTES:
            raise LimitExceededError(
                f"a payload of {len(request.payload):,} bytes; {ECHO_BYTES:,} are sent back at once",
                advice="send several",
            )
        return peer_pb2.EchoResponse(payload=request.payload, incarnation=self._slot.host.incarnation)

    async def Probe(self, request: peer_pb2.ProbeRequest, context: Context) -> peer_pb2.ProbeResponse:
        session = self._slot.session(request.session)
        session.check_peer("", _MEASURING)
        check_probe(request.address, request.bandwidth_bytes, request.timeout_ms)
        session.check_peer(request.address, _MEASURING)
        if not self._probes.take(1):
            raise LimitExceededError(
                f"{MOST_PROBES} links are being measured, which is the most", advice="try again later"
            )
        try:
            found = await probe(
                request.address,
                request.bandwidth_bytes,
                request.timeout_ms / 1e3,
                self._shown(request.address),
            )
        finally:
            self._probes.give(1)
        return encode(found, peer_pb2.ProbeResponse)


def _land(landing: IncomingValue, data: bytes) -> None:
    """Write a piece, unless it is there. Fails the value if that fails, and ends it with its last
    piece."""
    try:
        piece = decode_download(data)
        landing.write(piece.offset_bytes, piece.data)
        if landing.received_bytes >= landing.size_bytes:
            landing.finish()
    except Exception as error:
        landing.fail(typed(error, "receiving a value"))


def _receipt(received_bytes: int) -> peer_pb2.PushResponse:
    return peer_pb2.PushResponse(received_bytes=received_bytes)


async def _write(context: Context, message: Any) -> None:
    try:
        await context.write(message)
    except aio.BaseError:
        # The connection broke. gRPC cancels the handler once it has found that, and would log an
        # error if the handler ended before.
        await asyncio.sleep(LAST_WRITE_SECONDS)
        raise


def _decoded(data: bytes) -> peer_pb2.ExchangeRequest:
    """Decode a request. Raises LimitExceededError before a message that is too large is decoded."""
    if len(data) > links.MOST_MESSAGE_BYTES:
        raise LimitExceededError(
            f"a message of {len(data):,} bytes; {links.MOST_MESSAGE_BYTES:,} are the most",
            advice="send several",
        )
    return peer_pb2.ExchangeRequest.FromString(data)


async def _next(call: Call) -> bytes | None:
    data: Any = await call.read()
    return None if data is aio.EOF else data


class LoopAnswer(Generic[Found]):
    """One answer from any thread to a handler on the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self.loop.create_future()
        self._found: Found | HeliographError | None = None

    def answer(self, found: Any) -> None:
        """Set the answer. From any thread."""
        self._found = found
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closed, and with it the handler

    def _wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def found(self) -> Found:
        """Wait for the answer. Raises it if it is an error."""
        await self._future
        assert self._found is not None
        if isinstance(self._found, HeliographError):
            raise self._found.at(self._found.origin)
        return self._found


class LoopBudget:
    """A limited amount, taken and returned on one loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0

    def take(self, amount: int) -> bool:
        """Take an amount if that much is left. True if it was taken."""
        fits = self._taken + amount <= self.limit
        self._taken += amount if fits else 0
        return fits

    def give(self, amount: int) -> None:
        """Return an amount."""
        self._taken -= amount


class Conversation:
    """The small values of one stream. Created on its loop; answers come from any thread.

    `brought` is the budget of received values whose tensors are not known yet. `attempt` is larger
    than that of an earlier stream of the same daemon, whose requests this one takes over.
    """

    def __init__(
        self,
        exchange: LiveExchange,
        stream: JoinedStream,
        movers: Executor,
        brought: LoopBudget,
        attempt: int,
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._movers = movers
        self._brought = brought
        self._attempt = attempt
        self._given = GivenAnswers()
        #: Held while answers are noted there and sent, so that both have one order.
        self._giving = threading.RLock()
        #: The bytes of that budget taken by this stream, by number.
        self._held: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        #: Calls that withdraw unanswered requests, by number.
        self._open: dict[int, Callable[..., object]] = {}
        self._answers: deque[tuple[int, OutgoingValue | HeliographError | None]] = deque()
        self._is_rung = False
        self._is_writing = False
        self._is_closed = False
        #: Set when answers were written, or a write failed.
        self._went_on = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Conversation {len(self._open)} open, {len(self._answers)} answers>"

    async def take(self, request: peer_pb2.ExchangeRequest) -> None:
        """Process a request. Waits while too many answers are unread.

        Raises ProtocolError for a number that is in use.
        """
        with self._giving:
            had = self._given.received(request.received_answers)
        for value in had:
            value.acknowledge(value.size_bytes)
        for receipt in request.receipts:
            self._receive(receipt)
            if len(self._answers) > UNREAD_ANSWERS:
                await self._room()
        for ask in request.asks:
            self._ask(ask)
            if len(self._answers) > UNREAD_ANSWERS:
                await self._room()
        for bring in request.brings:
            self._bring(bring)
            if len(self._answers) > UNREAD_ANSWERS:
                await self._room()
        for number in request.withdrawals:
            if (withdraw := self._open.pop(number, None)) is not None:
                self._let_go(number)
                withdraw()

    def _receive(self, receipt: peer_pb2.Receipt) -> None:
        name = receipt.edge, receipt.run, receipt.capability
        self._exchange.received(*name, receipt.received_bytes, unneeded=receipt.unneeded)
        if receipt.number:
            self._answer(receipt.number, None)

    async def _room(self) -> None:
        """Wait until the other side has read answers. Its end cancels the handler."""
        while len(self._answers) > UNREAD_ANSWERS:
            self._went_on.clear()
            await self._went_on.wait()

    def _ask(self, ask: peer_pb2.Ask) -> None:
        asker = partial(self._answer, ask.number)
        self._note(ask.number, partial(self._exchange.withdraw, ask.edge, ask.run, asker))
        self._exchange.ask(ask.edge, ask.run, ask.capability, asker, self._attempt)

    def _bring(self, bring: peer_pb2.Bring) -> None:
        size_bytes = len(bring.data)
        if size_bytes > SMALL_BYTES:
            self._answer(bring.number, _too_large(size_bytes))
            return
        if not self._brought.take(size_bytes):
            self._answer(bring.number, _too_much())
            return
        self._held[bring.number] = self._held.get(bring.number, 0) + size_bytes
        bringer = partial(self._place, bring.number, bring.data)
        self._note(bring.number, partial(self._exchange.leave, bring.edge, bring.run, bringer))
        self._exchange.bring(bring.edge, bring.run, bring.capability, bringer, self._attempt)

    def _note(self, number: int, withdraw: Callable[..., object]) -> None:
        if number in self._open:
            raise ProtocolError(f"the number {number} is in use on this stream")
        self._open[number] = withdraw

    def _let_go(self, number: int) -> None:
        """Return the bytes held under this number."""
        self._brought.give(self._held.pop(number, 0))

    # From any thread

    def _place(self, number: int, data: bytes, found: IncomingValue | HeliographError) -> None:
        """Write a received value to its tensor, which is known now."""
        if isinstance(found, HeliographError):
            self._answer(number, found)
        elif found.is_quick or threading.get_ident() != self._thread:
            self._answer(number, found.land(data))
        else:
            self._movers.submit(lambda: self._answer(number, found.land(data)))

    def _answer(self, number: int, found: OutgoingValue | HeliographError | None) -> None:
        if isinstance(found, OutgoingValue) and threading.get_ident() != self._thread:
            found = self._sent_now(number, found)
            if found is None:
                return
        self._answers.append((number, found))
        if threading.get_ident() == self._thread:
            self._flush()
            return
        if self._is_rung:
            return
        self._is_rung = True
        try:
            self._loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            pass  # the loop is closed, and with it the stream

    def _sent_now(self, number: int, value: OutgoingValue) -> OutgoingValue | None:
        """Send a value from the thread that made it, which saves waking the loop. Return what is
        left to send."""
        if self._is_closed or self._answers or (data := value.whole) is None:
            return value
        answer = peer_pb2.Answer(number=number, data=data)
        message = peer_pb2.ExchangeResponse(answers=[answer]).SerializeToString()
        with self._giving:
            # Before the other side can say that it has it.
            self._given.add(value)
            if not self._stream.send_now(message):
                self._given.take_back()
                return value
        self._open.pop(number, None)
        self._exchange.counter.sent(len(data))
        return None

    # On the loop

    def _turn(self) -> None:
        self._is_rung = False
        self._flush()

    def _flush(self) -> None:
        """Write the answers, unless a write is under way."""
        if self._is_closed:
            self._answers.clear()
        elif self._answers and not self._is_writing:
            self._is_writing = True
            with self._giving:
                begin(self._stream.write(self._encode_next()), self._written)

    def _written(self, error: BaseException | None) -> None:
        self._is_writing = False
        self._went_on.set()
        if error is None:
            self._flush()
        else:
            # The next read fails too.
            logger.debug("an answer was not written: %s", error)

    def _encode_next(self) -> bytes:
        response = peer_pb2.ExchangeResponse()
        size = 0
        while self._answers and size < MESSAGE_BYTES:
            number, found = self._answers.popleft()
            self._open.pop(number, None)
            self._let_go(number)
            self._given.add(found if isinstance(found, OutgoingValue) else None)
            if isinstance(found, OutgoingValue):
                size += self._add_value(response, number, found)
            elif found is None:
                response.answers.add(number=number, data=b"")
            else:
                size += _add_error(response, number, found)
        return response.SerializeToString()

    def _add_value(self, response: peer_pb2.ExchangeResponse, number: int, value: OutgoingValue) -> int:
        data = value.whole
        if data is None:
            is_gone = value.is_dropped or value.is_taken
            error = unneeded() if is_gone else _too_large(value.size_bytes)
            value.drop()
            return _add_error(response, number, error)
        response.answers.add(number=number, data=data)
        self._exchange.counter.sent(len(data))
        return len(data)

    def close(self) -> None:
        """End the stream. Its requests may come again, and get the same answers."""
        self._is_closed = True
        waiting, self._open = self._open, {}
        # A copy: a thread that answers meanwhile may still take its number out.
        for withdraw in list(waiting.values()):
            withdraw(again=True)
        for number in tuple(self._held):
            self._let_go(number)
        self._answers.clear()

    async def said(self) -> None:
        """Wait until the system has all answers so far, for a bounded time."""
        # Answers of other threads come with the loop's next turn.
        await asyncio.sleep(0)
        self._flush()
        await self.written()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LAST_WRITE_SECONDS):
                await self._stream.sent()

    async def written(self) -> None:
        """Wait until the write under way has ended, for a bounded time.

        Otherwise gRPC would report it to a call that is over, or to a loop that is closed.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_SECONDS):
                while self._is_writing:
                    self._went_on.clear()
                    await self._went_on.wait()


def _add_error(response: peer_pb2.ExchangeResponse, number: int, error: HeliographError) -> int:
    """Add the answer, and return its size in bytes."""
    return response.answers.add(number=number, error=encode_error(error)).ByteSize()


def _too_large(size_bytes: int) -> ProtocolError:
    return ProtocolError(
        f"a value of {size_bytes:,} bytes was sent as a small one; these have up to {SMALL_BYTES:,}",
        advice="run the same version on both daemons, and compile for the same shapes",
    )


def _too_much() -> LimitExceededError:
    return LimitExceededError(
        "too many values were sent before the runs that need them", advice="send fewer at a time"
    )
