"""PlanService: compiling, in threads, since it is the one thing that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from grpc import aio

from heliograph_backends.contract import CompileOptions
from heliograph_proto import messages
from heliograph_proto.description import PlanEstimate, PlanInfo
from heliograph_proto.errors import InvalidArgumentError, InvalidGraphError
from heliograph_proto.graph import Graph
from heliograph_proto.v1 import plan_pb2, plan_pb2_grpc
from heliograph_server.core.runtime import CompileRequest, Session
from heliograph_server.services.extent import check_bindings, check_compile, check_graph
from heliograph_server.services.refusals import HostSlot, refusals

_R = TypeVar("_R", plan_pb2.CompileRequest, plan_pb2.EstimateRequest)
_T = TypeVar("_T")


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
        check_bindings(request, session.limits)
        # Here and not on a thread, of which there are few: it may take as long as the client likes.
        await asyncio.wrap_future(session.when_written([one.tensor for one in request.bindings]))
        compiling = self._submit(session, _compile, request)
        try:
            info = await asyncio.wrap_future(compiling)
        except asyncio.CancelledError:
            compiling.add_done_callback(lambda done: _undo(session, request.plan, done))
            raise
        return messages.encode_plan(info)

    @refusals
    async def Estimate(
        self,
        request: plan_pb2.EstimateRequest,
        context: aio.ServicerContext[plan_pb2.EstimateRequest, plan_pb2.EstimateResponse],
    ) -> plan_pb2.EstimateResponse:
        session = self._slot.host.session(request.session)
        found = await asyncio.wrap_future(self._submit(session, _estimate, request))
        return messages.encode_estimate(found)

    @refusals
    async def Explain(
        self,
        request: plan_pb2.ExplainRequest,
        context: aio.ServicerContext[plan_pb2.ExplainRequest, plan_pb2.ExplainResponse],
    ) -> plan_pb2.ExplainResponse:
        session = self._slot.host.session(request.session)
        return messages.encode_report(session.explain(request.plan))

    def _submit(self, session: Session, work: Callable[[Session, _R], _T], request: _R) -> Future[_T]:
        """Work on a graph, whose bytes count until it is done."""
        size_bytes = request.ByteSize()
        session.requests.reserve(size_bytes)
        future = self._compilers.submit(work, session, request)
        future.add_done_callback(lambda _done: session.requests.give(size_bytes))
        return future


def _compile(session: Session, request: plan_pb2.CompileRequest) -> PlanInfo:
    # Before anything is made of it: a graph that is too large costs no more than its message.
    check_compile(request, session.limits)
    graph = messages.decode_graph(request.graph)
    return session.compile(
        CompileRequest(
            plan=request.plan,
            graph=graph,
            devices=tuple(request.devices),
            options=CompileOptions(request.fusion != plan_pb2.FUSION_OFF, request.threads),
            bindings=_bindings(request, graph),
            updates=request.updates,
            pins=_pins(request),
            memory=dict(request.memory_bytes),
        )
    )


def _estimate(session: Session, request: plan_pb2.EstimateRequest) -> PlanEstimate:
    options = CompileOptions(request.fusion != plan_pb2.FUSION_OFF)
    check_graph(request.graph, session.limits)
    return session.estimate(messages.decode_graph(request.graph), tuple(request.devices), options)


def _bindings(request: plan_pb2.CompileRequest, graph: Graph) -> dict[int, int]:
    """Handles of tensors by leaf. Raises InvalidGraphError for a leaf that is bound twice."""
    bindings = {one.leaf: one.tensor for one in request.bindings}
    if len(bindings) < len(request.bindings):
        raise InvalidGraphError("a leaf is bound to a tensor twice", advice="bind each of them once")
    return bindings


def _pins(request: plan_pb2.CompileRequest) -> dict[int, str]:
    """Devices by node. Raises InvalidArgumentError for a node that is pinned to two."""
    pins: dict[int, str] = {}
    for pin in request.pins:
        for node in pin.nodes:
            if pins.setdefault(node, pin.device) != pin.device:
                raise InvalidArgumentError(f"node {node} is pinned to {pins[node]} and to {pin.device}")
            if node >= len(request.graph.nodes):
                raise InvalidArgumentError(f"node {node} is pinned, of {len(request.graph.nodes)}")
    return pins


def _undo(session: Session, plan: int, done: Future[PlanInfo]) -> None:
    """The client left: nobody knows the plan that it asked for."""
    if not done.cancelled() and done.exception() is None:
        session.discard_plan(plan)
