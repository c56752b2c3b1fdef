"""ModelService: the files of tensors that the operator allows."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from grpc import aio

from heliograph_proto import messages
from heliograph_proto.v1 import model_pb2, model_pb2_grpc
from heliograph_server.services.refusals import HostSlot, refusals


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Lists and describes models, on threads: a file is read as a whole the first time."""

    def __init__(self, slot: HostSlot, readers: Executor) -> None:
        self._slot = slot
        self._readers = readers

    @refusals
    async def ListModels(
        self,
        request: model_pb2.ListModelsRequest,
        context: aio.ServicerContext[model_pb2.ListModelsRequest, model_pb2.ListModelsResponse],
    ) -> model_pb2.ListModelsResponse:
        session = self._slot.session(request.session)
        names = await asyncio.wrap_future(self._readers.submit(session.models))
        return model_pb2.ListModelsResponse(names=names)

    @refusals
    async def DescribeModel(
        self,
        request: model_pb2.DescribeModelRequest,
        context: aio.ServicerContext[model_pb2.DescribeModelRequest, model_pb2.DescribeModelResponse],
    ) -> model_pb2.DescribeModelResponse:
        session = self._slot.session(request.session)
        found = await asyncio.wrap_future(self._readers.submit(session.describe_model, request.name))
        return messages.encode_model(found)
