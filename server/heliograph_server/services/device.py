"""DeviceService: what there is to compute on."""

from __future__ import annotations

from grpc import aio

from heliograph_proto import messages
from heliograph_proto.v1 import device_pb2, device_pb2_grpc
from heliograph_server.services.refusals import HostSlot, refusals


class DeviceService(device_pb2_grpc.DeviceServiceServicer):
    """Lists devices and their memory; needs no session."""

    def __init__(self, slot: HostSlot) -> None:
        self._slot = slot

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
