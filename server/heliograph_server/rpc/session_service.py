"""SessionService: opens and closes sessions, and reports on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from urllib.parse import unquote

from grpc import aio

from heliograph_proto import DIRECT, SHARED_MEMORY, codec
from heliograph_proto.errors import SessionClosedError
from heliograph_proto.sessions import DirectOffer, Offers, SharedMemoryOffer, StayingSession, WantedBytes
from heliograph_proto.trace_context import handing_on, trace_in
from heliograph_proto.v1 import session_pb2
from heliograph_server.resources.principals import current_principal
from heliograph_server.rpc.ending import end_session
from heliograph_server.rpc.leases.repeated_calls import RepeatedCalls
from heliograph_server.rpc.requests import Context, Requests
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.session import Session
from heliograph_server.state.taking_up import take_up
from heliograph_server.telemetry.log_followers import LogFollower

logger = logging.getLogger(__name__)

_MOVING = "hand its session to another daemon"
#: The log lines of one message.
LINES_A_MESSAGE = 64


class SessionService:
    """Opens and closes sessions, on threads, since both block."""

    def __init__(
        self,
        slot: HostSlot,
        askers: Executor,
        closers: Executor,
        leavers: Executor,
        preparers: Executor,
        offer: Callable[[str], SharedMemoryOffer | None],
        offer_direct: Callable[[Session, str], DirectOffer | None],
        hidden: Collection[str] = (),
    ) -> None:
        """`hidden`: features that are off here. Sessions go to other daemons on the threads of
        `leavers`, and copies ahead on those of `preparers`."""
        self._leavers, self._preparers = leavers, preparers
        self._hidden = hidden
        self._slot = slot
        #: Returns the offer of shared memory for a client, by its gRPC peer.
        self._offer = offer
        #: The same of direct connections, for a session.
        self._offer_direct = offer_direct
        self._askers = askers
        self._closers = closers
        self._repeated = RepeatedCalls()

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, session_pb2.DESCRIPTOR.services_by_name["SessionService"], self)

    async def Open(self, request: session_pb2.OpenRequest, context: Context) -> session_pb2.OpenResponse:
        versions = (request.version_min, request.version_max)
        host = self._slot.host
        opening = self._askers.submit(
            host.open_session,
            request.client,
            versions,
            tuple(one for one in request.features if one not in self._hidden),
            request.tenant_secret,
            current_principal(),
            request.lease_ms,
            durable=request.durable,
            snapshot_ms=request.snapshot_ms,
        )
        info = await asyncio.wrap_future(opening)
        # Before any call that names the session, so that the log has its lines in order.
        session = self._slot.session(info.session)
        logger.info("%s began, from %s", session, unquote(context.peer()), extra=session.log_fields)
        offers = self._offers(session, context.peer())
        if SHARED_MEMORY in info.features:
            info = replace(info, shared_memory=offers.shared_memory)
        if DIRECT in info.features:
            info = replace(info, direct=offers.direct)
        return codec.encode(info, session_pb2.OpenResponse)

    async def Close(self, request: session_pb2.CloseRequest, context: Context) -> session_pb2.CloseResponse:
        try:
            # Without a slot of the session's calls, so that it can end at their limit.
            session = self._slot.host.session(request.session, current_principal())
        except SessionClosedError:
            return session_pb2.CloseResponse()
        await end_session(session, self._closers)
        return session_pb2.CloseResponse()

    def _offers(self, session: Session, peer: str) -> Offers:
        return Offers(self._offer(peer), self._offer_direct(session, peer))

    async def GetOffers(
        self, request: session_pb2.GetOffersRequest, context: Context
    ) -> session_pb2.GetOffersResponse:
        session = self._slot.session(request.session)
        return codec.encode(self._offers(session, context.peer()), session_pb2.GetOffersResponse)

    async def Snapshot(
        self, request: session_pb2.SnapshotRequest, context: Context
    ) -> session_pb2.SnapshotResponse:
        session = self._slot.session(request.session)
        seconds = (request.wait_ms / 1e3,) if request.wait_ms else ()
        taking = self._closers.submit(self._slot.host.snapshot, session, *seconds)
        return codec.encode(await asyncio.wrap_future(taking), session_pb2.SnapshotResponse)

    def _leaving(self, request: session_pb2.PrepareMoveRequest | session_pb2.MoveRequest) -> Session:
        """Return a session that is to go to a daemon which it may name."""
        session = self._slot.session(request.session)
        if request.address != self._slot.host.moves.target:
            session.check_peer("", _MOVING)
            session.check_peer(request.address, _MOVING)
        return session

    async def PrepareMove(
        self, request: session_pb2.PrepareMoveRequest, context: Context
    ) -> session_pb2.PrepareMoveResponse:
        sending = self._preparers.submit(
            self._slot.host.moves.prepare, self._leaving(request), request.address
        )
        sent_bytes = await asyncio.shield(asyncio.wrap_future(sending))
        return session_pb2.PrepareMoveResponse(sent_bytes=sent_bytes)

    async def Move(self, request: session_pb2.MoveRequest, context: Context) -> session_pb2.MoveResponse:
        host, session = self._slot.host, self._leaving(request)
        seconds = (request.wait_ms / 1e3,) if request.wait_ms else ()
        # Goes on even if the client's connection breaks, which learns the outcome by an attach.
        moving = self._leavers.submit(
            host.moves.move_asked, session, request.session, request.address, *seconds
        )
        return codec.encode(await asyncio.shield(asyncio.wrap_future(moving)), session_pb2.MoveResponse)

    async def TellHandover(
        self, request: session_pb2.TellHandoverRequest, context: Context
    ) -> session_pb2.TellHandoverResponse:
        session = self._slot.session(request.session)
        self._slot.host.told_by_head(session, codec.decode_all(request.staying, StayingSession))
        return session_pb2.TellHandoverResponse()

    async def TakeUp(
        self, request: session_pb2.TakeUpRequest, context: Context
    ) -> session_pb2.TakeUpResponse:
        session = self._slot.session(request.session)
        key = "TakeUp", request.wanted[0].buffer if request.wanted else 0
        taking = partial(self._take_up, session, request)
        return await self._repeated.once(session, key, (request, None), taking)

    async def _take_up(
        self, session: Session, request: session_pb2.TakeUpRequest
    ) -> session_pb2.TakeUpResponse:
        earlier = self._slot.host.session(request.earlier, session.principal)
        wanted = codec.decode_all(request.wanted, WantedBytes)
        taking = self._closers.submit(take_up, session, earlier, wanted)
        found = await asyncio.wrap_future(taking)
        logger.info("%s took up %d buffers of %s", session, len(found), earlier, extra=session.log_fields)
        return session_pb2.TakeUpResponse(taken=codec.encode_all(found, session_pb2.TakenBytes))

    async def GetStatistics(
        self, request: session_pb2.GetStatisticsRequest, context: Context
    ) -> session_pb2.GetStatisticsResponse:
        host = self._slot.host
        traffic = self._slot.session(request.session).traffic
        return codec.encode(replace(traffic, peers=host.exchange.traffic), session_pb2.GetStatisticsResponse)

    async def FollowLog(self, request: session_pb2.FollowLogRequest, context: Context) -> None:
        session = self._slot.session(request.session)
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object = None) -> None:
            with suppress(RuntimeError):  # the loop is closed, and with it the call
                loop.call_soon_threadsafe(woken.set)

        follower = LogFollower(session.log_owner, request.level or "info", wake)
        session.when_closing[follower] = wake
        try:
            await context.write(session_pb2.FollowLogResponse())
            while session.closed is None:
                await woken.wait()
                woken.clear()
                await _write_lines(follower, context)
        finally:
            session.when_closing.pop(follower, None)
            follower.close()


async def _write_lines(follower: LogFollower, context: Context) -> None:
    lines, dropped = follower.take()
    for number in range(0, len(lines), LINES_A_MESSAGE):
        part = lines[number : number + LINES_A_MESSAGE]
        await context.write(
            session_pb2.FollowLogResponse(
                lines=codec.encode_all(part, session_pb2.LogLine), dropped=0 if number else dropped
            )
        )


@contextmanager
def traced(name: str, host: Host, session: Session, context: Context) -> Iterator[None]:
    """Create a span of this name while a call is answered, if its caller sends a sampled one.

    Calls to other daemons meanwhile belong to the span.
    """
    parent = trace_in(context.invocation_metadata() or ())
    if not parent:
        yield
    elif host.tracing is None:
        with handing_on(parent):
            yield
    else:
        with host.tracing.call(name, parent, session.number) as own, handing_on(own):
            yield
