"""DeviceService and ModelService: devices, their abilities, and the server's model files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from grpc import aio

from heliograph_proto import codec
from heliograph_proto.v1 import device_pb2, model_pb2
from heliograph_server.resources.principals import current_principal
from heliograph_server.rpc.message_limits import check_placement, check_queries
from heliograph_server.rpc.requests import Context, Requests
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.host_slot import HostSlot

_Q = TypeVar("_Q", device_pb2.QueryOpsRequest, device_pb2.QueryPlacementRequest)
_A = TypeVar("_A", device_pb2.QueryOpsResponse, device_pb2.QueryPlacementResponse)


class DeviceService:
    """Lists devices and answers queries about them, on threads. It needs no session."""

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
        #: Returns facts about the server's process.
        self._facts = facts

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, device_pb2.DESCRIPTOR.services_by_name["DeviceService"], self)

    async def ListDevices(
        self, request: device_pb2.ListDevicesRequest, context: Context
    ) -> device_pb2.ListDevicesResponse:
        found = await asyncio.wrap_future(self._askers.submit(self._slot.host.device_list))
        return codec.encode(replace(found, facts=self._facts()), device_pb2.ListDevicesResponse)

    async def GetMemory(
        self, request: device_pb2.GetMemoryRequest, context: Context
    ) -> device_pb2.GetMemoryResponse:
        asking = self._askers.submit(self._slot.host.memory_for, request.device, current_principal())
        memory = await asyncio.wrap_future(asking)
        return device_pb2.GetMemoryResponse(memory=codec.encode(memory, device_pb2.Memory))

    async def QueryOps(
        self, request: device_pb2.QueryOpsRequest, context: Context
    ) -> device_pb2.QueryOpsResponse:
        return await self._answer(_query_ops, request)

    async def QueryPlacement(
        self, request: device_pb2.QueryPlacementRequest, context: Context
    ) -> device_pb2.QueryPlacementResponse:
        return await self._answer(_query_placement, request)

    async def ListLinks(
        self, request: device_pb2.ListLinksRequest, context: Context
    ) -> device_pb2.ListLinksResponse:
        found = await asyncio.wrap_future(self._askers.submit(self._slot.host.links))
        return device_pb2.ListLinksResponse(links=codec.encode_all(found, device_pb2.MemberLink))

    async def _answer(self, answer: Callable[[Host, _Q], _A], question: _Q) -> _A:
        """Answer a long query on a thread of its own."""
        return await asyncio.wrap_future(self._listeners.submit(answer, self._slot.host, question))


def _query_ops(host: Host, request: device_pb2.QueryOpsRequest) -> device_pb2.QueryOpsResponse:
    check_queries(request, host.limits)
    queries = [codec.decode_query(one) for one in request.queries]
    return device_pb2.QueryOpsResponse(
        answers=codec.encode_all(host.query_ops(request.device, queries), device_pb2.OpAnswer)
    )


def _query_placement(
    host: Host, request: device_pb2.QueryPlacementRequest
) -> device_pb2.QueryPlacementResponse:
    check_placement(request, host.limits)
    tensors = [codec.decode_checked_type(one) for one in request.tensors]
    return codec.encode(
        host.query_placement(request.device, request.buffer_type, tensors), device_pb2.QueryPlacementResponse
    )


class ModelService:
    """Lists and describes models, on threads, since a file is read as a whole the first time."""

    def __init__(self, slot: HostSlot, readers: Executor) -> None:
        self._slot = slot
        self._readers = readers

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, model_pb2.DESCRIPTOR.services_by_name["ModelService"], self)

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        session = self._slot.session(request.session)
        found = await asyncio.wrap_future(self._readers.submit(session.models))
        return model_pb2.ListModelsResponse(models=codec.encode_all(found, model_pb2.ModelFile))

    async def DescribeModel(
        self, request: model_pb2.DescribeModelRequest, context: Context
    ) -> model_pb2.DescribeModelResponse:
        session = self._slot.session(request.session)
        found = await asyncio.wrap_future(self._readers.submit(session.describe_model, request.name))
        return codec.encode(found, model_pb2.DescribeModelResponse)
