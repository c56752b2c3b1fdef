"""PlanService: compiles graphs, on threads, since it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from google.protobuf.message import Message
from grpc import aio

from heliograph_proto import codec
from heliograph_proto.errors import DeadlineExceededError, SessionClosedError
from heliograph_proto.plans import CompileRequest, ContentOffer, PlanEstimate, PlanInfo, PlanList
from heliograph_proto.v1 import plan_pb2
from heliograph_server.compile.turns import CompileTurns
from heliograph_server.resources.principals import Principal, current_principal
from heliograph_server.rpc.leases.repeated_calls import RepeatedCalls
from heliograph_server.rpc.message_limits import (
    check_bindings,
    check_digests,
    check_options,
    check_reserve,
)
from heliograph_server.rpc.requests import Context, Requests
from heliograph_server.rpc.session_service import traced
from heliograph_server.runtime.host import SERVER, Host
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.parts.plan_status import plan_status, plan_statuses
from heliograph_server.session.session import Session

T = TypeVar("T")

#: The most plans in a list.
MOST_PLANS = 1_000


class PlanService:
    """Compiles graphs in `turns`, each within `seconds`, and explains plans on the threads of
    `listeners`."""

    def __init__(
        self, slot: HostSlot, turns: CompileTurns, listeners: Executor, seconds: Callable[[], float]
    ) -> None:
        self._slot = slot
        self._turns = turns
        self._seconds = seconds
        self._listeners = listeners
        self._locks: WeakKeyDictionary[Session, asyncio.Lock] = WeakKeyDictionary()
        self._repeated = RepeatedCalls()

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, plan_pb2.DESCRIPTOR.services_by_name["PlanService"], self)

    async def Compile(
        self,
        request: plan_pb2.CompileRequest,
        graph: bytes | None,
        context: Context,
    ) -> plan_pb2.CompileResponse:
        session = self._slot.session(request.session)
        check_bindings(request, session.limits)
        return await self._repeated.once(
            session,
            ("Compile", request.plan),
            (request, graph),
            lambda: self._compile(session, request, graph, context),
        )

    async def _compile(
        self, session: Session, request: plan_pb2.CompileRequest, graph: bytes | None, context: Context
    ) -> plan_pb2.CompileResponse:
        async with self._in_time():
            # Awaited here, since threads are few and the client decides how long either takes.
            await asyncio.wrap_future(session.when_written([one.tensor for one in request.bindings]))
            async with self._one_at_a_time(session):
                with traced("heliograph.compile", self._slot.host, session, context):
                    # In the context of its span, which members that compile partitions receive.
                    compile_traced = partial(compile_request, session, request, graph)
                    undo = partial(_undo, session, request.plan)
                    info = await self._in_turn(session, request, graph, compile_traced, undo)
                    return codec.encode(info, plan_pb2.CompileResponse)

    async def PlaceContents(
        self,
        request: plan_pb2.PlaceContentsRequest,
        graph: bytes | None,
        context: Context,
    ) -> plan_pb2.PlaceContentsResponse:
        session = self._slot.session(request.compile.session)
        check_bindings(request.compile, session.limits)
        check_digests(request.missing_digests, session.limits)
        async with self._in_time(), self._one_at_a_time(session):
            offers = await self._in_turn(session, request, graph, partial(_place, session, request, graph))
            return plan_pb2.PlaceContentsResponse(offers=codec.encode_all(offers, plan_pb2.ContentOffer))

    async def _in_turn(
        self,
        session: Session,
        request: Message,
        graph: bytes | None,
        call: Callable[[], T],
        undo: Callable[[Future[T]], None] | None = None,
    ) -> T:
        """Compute in the turn of the session's tenant. If the client leaves or its timeout ends, so
        does the computation, and `undo` is called with its outcome."""
        turn = self._turns.submit(session.flow, request.ByteSize() + len(graph or b""), call)
        try:
            return await asyncio.wrap_future(turn.future)
        except asyncio.CancelledError:
            turn.cancel()
            if undo is not None:
                turn.future.add_done_callback(undo)
            raise

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Bound the time of a request, with everything that it waits for.

        Raises DeadlineExceededError.
        """
        seconds = self._seconds()
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise DeadlineExceededError(
                f"the graph was not compiled within {seconds:g} s, the limit of this server",
                advice="split the graph, try again when the server has less to do, or have the operator "
                "raise compile_seconds",
            ) from None

    def _one_at_a_time(self, session: Session) -> asyncio.Lock:
        """The lock of a session's compiles, which are serial. None waits on a thread."""
        return self._locks.setdefault(session, asyncio.Lock())

    async def Estimate(
        self,
        request: plan_pb2.EstimateRequest,
        graph: bytes | None,
        context: Context,
    ) -> plan_pb2.EstimateResponse:
        session = self._slot.session(request.session)
        async with self._in_time(), self._one_at_a_time(session):
            found = await self._in_turn(session, request, graph, partial(_estimate, session, request, graph))
        return codec.encode(found, plan_pb2.EstimateResponse)

    async def Reserve(
        self,
        request: plan_pb2.ReserveRequest,
        graph: bytes | None,
        context: Context,
    ) -> plan_pb2.ReserveResponse:
        session = self._slot.session(request.session)
        return await self._repeated.once(
            session,
            ("Reserve", request.reservation),
            (request, graph),
            lambda: self._reserve(session, request, graph),
        )

    async def _reserve(
        self, session: Session, request: plan_pb2.ReserveRequest, graph: bytes | None
    ) -> plan_pb2.ReserveResponse:
        async with self._in_time(), self._one_at_a_time(session):
            undo = partial(_forget, session, request.reservation)
            reserving = partial(_reserve, session, request, graph)
            sizes = await self._in_turn(session, request, graph, reserving, undo)
        shares = [plan_pb2.ReservedShare(name=name, size_bytes=size) for name, size in sizes.items()]
        return plan_pb2.ReserveResponse(devices=shares)

    async def Explain(self, request: plan_pb2.ExplainRequest, context: Context) -> plan_pb2.ExplainResponse:
        session = self._slot.session(request.session)
        return await asyncio.wrap_future(self._listeners.submit(_explain, session, request))

    async def ListPlans(
        self, request: plan_pb2.ListPlansRequest, context: Context
    ) -> plan_pb2.ListPlansResponse:
        asked = self._slot.host, current_principal(), request.session_number, request.plan
        found = await asyncio.wrap_future(self._listeners.submit(_list_plans, *asked))
        return codec.encode(found, plan_pb2.ListPlansResponse)


def _list_plans(host: Host, caller: Principal, number: int, plan: int) -> PlanList:
    seen = [one for one in host.sessions if caller.may_see(one.principal.tenant)]
    if number:
        seen = [one for one in seen if one.number == number]
        if not seen:
            raise SessionClosedError(f"there is no session {number}", advice="it may have ended")
    told = SERVER, host.incarnation, host.uptime_seconds
    if number and plan:
        return PlanList(*told, (plan_status(seen[0], plan),))
    found = [one for session in reversed(seen) for one in plan_statuses(session)]
    return PlanList(*told, tuple(found[:MOST_PLANS]), max(0, len(found) - MOST_PLANS))


def _explain(session: Session, request: plan_pb2.ExplainRequest) -> plan_pb2.ExplainResponse:
    measure = request.measure if request.HasField("measure") else None
    return codec.encode(session.explain(request.plan, measure), plan_pb2.ExplainResponse)


def compile_request(session: Session, request: plan_pb2.CompileRequest, graph: bytes | None) -> PlanInfo:
    """Perform a Compile of an encoded graph, on a thread. Raises the errors of
    PlanService.Compile."""
    return session.compile(_decoded(session, request, graph))


def _decoded(session: Session, request: plan_pb2.CompileRequest, graph: bytes | None) -> CompileRequest:
    check_options(request.options, session.limits)
    return codec.decode_compile_request(request, codec.received_graph(graph or b"", session.limits))


def _place(
    session: Session, request: plan_pb2.PlaceContentsRequest, graph: bytes | None
) -> Sequence[ContentOffer]:
    return session.place_contents(_decoded(session, request.compile, graph), request.missing_digests)


def _reserve(session: Session, request: plan_pb2.ReserveRequest, graph: bytes | None) -> dict[str, int]:
    check_reserve(request, session.limits)
    received = None if graph is None else codec.received_graph(graph, session.limits)
    return session.reserve(codec.decode_reserve_request(request, received))


def _estimate(session: Session, request: plan_pb2.EstimateRequest, graph: bytes | None) -> PlanEstimate:
    check_options(request.options, session.limits)
    received = codec.received_graph(graph or b"", session.limits)
    return session.estimate(codec.decode_estimate_request(request, received))


def _undo(session: Session, plan: int, done: Future[PlanInfo]) -> None:
    """Discard a plan whose client left, so that no client knows its handle."""
    if not done.cancelled() and done.exception() is None:
        session.discard_plan(plan)


def _forget(session: Session, reservation: int, done: Future[dict[str, int]]) -> None:
    """Discard a reservation whose client left, so that no client knows its handle."""
    if not done.cancelled() and done.exception() is None:
        session.discard_reservation(reservation)
