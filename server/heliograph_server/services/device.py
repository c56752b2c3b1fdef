"""DeviceService: what there is to compute on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from grpc import aio

from heliograph_proto import messages
from heliograph_proto.v1 import device_pb2, device_pb2_grpc
from heliograph_server.core.runtime import Host
from heliograph_server.services.extent import check_placement, check_queries
from heliograph_server.services.refusals import HostSlot, refusals

_Q = TypeVar("_Q", device_pb2.QueryOpsRequest, device_pb2.QueryPlacementRequest)
_A = TypeVar("_A", device_pb2.QueryOpsResponse, device_pb2.QueryPlacementResponse)


class DeviceService(device_pb2_grpc.DeviceServiceServicer):
    """Lists devices and answers what they can do, on threads; needs no session."""

    def __init__(
        self,
        slot: HostSlot,
        askers: Executor,
        listeners: Executor,
        facts: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._slot = slot
        self._askers = askers
        self._listeners = listeners
        #: What the server tells of its process.
        self._facts = facts

    @refusals
    async def ListDevices(
        self,
        request: device_pb2.ListDevicesRequest,
        context: aio.ServicerContext[device_pb2.ListDevicesRequest, device_pb2.ListDevicesResponse],
    ) -> device_pb2.ListDevicesResponse:
        found = await asyncio.wrap_future(self._askers.submit(self._slot.host.device_list))
        return messages.encode_device_list(replace(found, facts=self._facts()))

    @refusals
    async def GetMemory(
        self,
        request: device_pb2.GetMemoryRequest,
        context: aio.ServicerContext[device_pb2.GetMemoryRequest, device_pb2.GetMemoryResponse],
    ) -> device_pb2.GetMemoryResponse:
        memory = await asyncio.wrap_future(self._askers.submit(self._slot.host.memory, request.device))
        return device_pb2.GetMemoryResponse(memory=messages.encode_memory(memory))

    @refusals
    async def QueryOps(
        self,
        request: device_pb2.QueryOpsRequest,
        context: aio.ServicerContext[device_pb2.QueryOpsRequest, device_pb2.QueryOpsResponse],
    ) -> device_pb2.QueryOpsResponse:
        return await self._answer(_query_ops, request)

    @refusals
    async def QueryPlacement(
        self,
        request: device_pb2.QueryPlacementRequest,
        context: aio.ServicerContext[device_pb2.QueryPlacementRequest, device_pb2.QueryPlacementResponse],
    ) -> device_pb2.QueryPlacementResponse:
        return await self._answer(_query_placement, request)

    @refusals
    async def ListWays(
        self,
        request: device_pb2.ListWaysRequest,
        context: aio.ServicerContext[device_pb2.ListWaysRequest, device_pb2.ListWaysResponse],
    ) -> device_pb2.ListWaysResponse:
        found = await asyncio.wrap_future(self._askers.submit(self._slot.host.ways))
        return messages.encode_ways(found)

    async def _answer(self, answer: Callable[[Host, _Q], _A], question: _Q) -> _A:
        """Long questions have a thread of their own, and only so many bytes of them wait."""
        host = self._slot.host
        size_bytes = question.ByteSize()
        host.questions.reserve(size_bytes)
        asking = self._listeners.submit(answer, host, question)
        asking.add_done_callback(lambda _done: host.questions.give(size_bytes))
        return await asyncio.wrap_future(asking)


def _query_ops(host: Host, request: device_pb2.QueryOpsRequest) -> device_pb2.QueryOpsResponse:
    check_queries(request, host.limits)
    queries = [messages.decode_query(one) for one in request.queries]
    return messages.encode_answers(host.query_ops(request.device, queries))


def _query_placement(
    host: Host, request: device_pb2.QueryPlacementRequest
) -> device_pb2.QueryPlacementResponse:
    check_placement(request, host.limits)
    tensors = [messages.decode_checked_type(one) for one in request.tensors]
    return messages.encode_placement(host.query_placement(request.device, request.buffer_type, tensors))
