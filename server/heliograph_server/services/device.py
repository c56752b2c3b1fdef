"""DeviceService: what there is to compute on."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from grpc import aio

from heliograph_proto import messages
from heliograph_proto.v1 import device_pb2, device_pb2_grpc
from heliograph_server.core.runtime import Host
from heliograph_server.services.extent import check_placement, check_queries
from heliograph_server.services.refusals import HostSlot, refusals


class DeviceService(device_pb2_grpc.DeviceServiceServicer):
    """Lists devices and answers what they can do, on the threads of `askers`; needs no session."""

    def __init__(self, slot: HostSlot, askers: Executor) -> None:
        self._slot = slot
        self._askers = askers

    @refusals
    async def ListDevices(
        self,
        request: device_pb2.ListDevicesRequest,
        context: aio.ServicerContext[device_pb2.ListDevicesRequest, device_pb2.ListDevicesResponse],
    ) -> device_pb2.ListDevicesResponse:
        return messages.encode_device_list(self._slot.host.device_list())

    @refusals
    async def GetMemory(
        self,
        request: device_pb2.GetMemoryRequest,
        context: aio.ServicerContext[device_pb2.GetMemoryRequest, device_pb2.GetMemoryResponse],
    ) -> device_pb2.GetMemoryResponse:
        memory = self._slot.host.memory(request.device)
        return device_pb2.GetMemoryResponse(memory=messages.encode_memory(memory))

    @refusals
    async def QueryOps(
        self,
        request: device_pb2.QueryOpsRequest,
        context: aio.ServicerContext[device_pb2.QueryOpsRequest, device_pb2.QueryOpsResponse],
    ) -> device_pb2.QueryOpsResponse:
        return await asyncio.wrap_future(self._askers.submit(_query_ops, self._slot.host, request))

    @refusals
    async def QueryPlacement(
        self,
        request: device_pb2.QueryPlacementRequest,
        context: aio.ServicerContext[device_pb2.QueryPlacementRequest, device_pb2.QueryPlacementResponse],
    ) -> device_pb2.QueryPlacementResponse:
        return await asyncio.wrap_future(self._askers.submit(_query_placement, self._slot.host, request))


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
