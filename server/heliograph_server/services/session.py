"""SessionService: the handshake, and the end of sessions."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from grpc import aio

from heliograph_proto import messages
from heliograph_proto.errors import SessionClosedError
from heliograph_proto.v1 import session_pb2, session_pb2_grpc
from heliograph_server.services.refusals import HostSlot, refusals


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """Opens and closes sessions. Both block: devices are asked for their memory, and work is waited for."""

    def __init__(self, slot: HostSlot, askers: Executor, closers: Executor) -> None:
        self._slot = slot
        self._askers = askers
        self._closers = closers

    @refusals
    async def Open(
        self,
        request: session_pb2.OpenRequest,
        context: aio.ServicerContext[session_pb2.OpenRequest, session_pb2.OpenResponse],
    ) -> session_pb2.OpenResponse:
        versions = (request.version_min, request.version_max)
        host = self._slot.host
        opening = self._askers.submit(
            host.open_session, request.client, versions, tuple(request.features), request.tenant_secret
        )
        return messages.encode_session(await asyncio.wrap_future(opening))

    @refusals
    async def Close(
        self,
        request: session_pb2.CloseRequest,
        context: aio.ServicerContext[session_pb2.CloseRequest, session_pb2.CloseResponse],
    ) -> session_pb2.CloseResponse:
        try:
            session = self._slot.host.session(request.session)
        except SessionClosedError:
            return session_pb2.CloseResponse()
        await asyncio.get_running_loop().run_in_executor(self._closers, session.close)
        return session_pb2.CloseResponse()
