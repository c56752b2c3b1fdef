"""PlanService: compiling, in threads, since it is the one thing that takes long."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future

from grpc import aio

from heliograph_proto import messages
from heliograph_proto.description import PlanInfo
from heliograph_proto.v1 import plan_pb2, plan_pb2_grpc
from heliograph_server.core.runtime import Session
from heliograph_server.services.extent import check_graph
from heliograph_server.services.refusals import HostSlot, refusals


class PlanService(plan_pb2_grpc.PlanServiceServicer):
    """Compiles graphs on the threads of `compilers`."""

    def __init__(self, slot: HostSlot, compilers: Executor) -> None:
        self._slot = slot
        self._compilers = compilers

    @refusals
    async def Compile(
        self,
        request: plan_pb2.CompileRequest,
        context: aio.ServicerContext[plan_pb2.CompileRequest, plan_pb2.CompileResponse],
    ) -> plan_pb2.CompileResponse:
        session = self._slot.host.session(request.session)
        size_bytes = request.ByteSize()
        session.requests.reserve(size_bytes)
        compiling = self._compilers.submit(_compile, session, request)
        compiling.add_done_callback(lambda _done: session.requests.give(size_bytes))
        try:
            info = await asyncio.wrap_future(compiling)
        except asyncio.CancelledError:
            compiling.add_done_callback(lambda done: _undo(session, request.plan, done))
            raise
        return messages.encode_plan(info)


def _compile(session: Session, request: plan_pb2.CompileRequest) -> PlanInfo:
    # Before anything is made of it: a graph that is too large costs no more than its message.
    check_graph(request.graph, session.limits)
    graph = messages.decode_graph(request.graph)
    fusion = request.fusion != plan_pb2.FUSION_OFF
    return session.compile(request.plan, graph, tuple(request.devices), fusion)


def _undo(session: Session, plan: int, done: Future[PlanInfo]) -> None:
    """The client left: nobody knows the plan that it asked for."""
    if not done.cancelled() and done.exception() is None:
        session.discard_plan(plan)
