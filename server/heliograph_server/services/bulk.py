"""BulkService: tensor bytes, in pieces, on calls of their own.

gRPC's flow control does the rest: an upload is read no faster than it is stored, a download is
written no faster than the client reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future

from grpc import aio

from heliograph_proto.errors import CancelledError, LimitExceededError, ProtocolError
from heliograph_proto.v1 import bulk_pb2, bulk_pb2_grpc
from heliograph_server.core import runtime
from heliograph_server.core.runtime import Session
from heliograph_server.services.refusals import HostSlot, refusals


class BulkService(bulk_pb2_grpc.BulkServiceServicer):
    """Uploads, downloads, contents. Hashing is done on the threads of `hashers`."""

    def __init__(self, slot: HostSlot, hashers: Executor) -> None:
        self._slot = slot
        self._hashers = hashers

    @refusals
    async def Upload(
        self,
        requests: AsyncIterator[bulk_pb2.UploadRequest],
        context: aio.ServicerContext[bulk_pb2.UploadRequest, bulk_pb2.UploadResponse],
    ) -> bulk_pb2.UploadResponse:
        first = await anext(requests, None)
        if first is None or not first.HasField("target"):
            raise ProtocolError("the first message of an upload must have its target")
        session = self._slot.host.session(first.target.session)
        upload = await self._begin(session, first)
        try:
            await self._receive(session, upload, first, requests, isinstance(_target(first.target), bytes))
            return bulk_pb2.UploadResponse(received_bytes=upload.finish())
        finally:
            # After `finish` this does nothing.
            upload.abort(CancelledError("the upload broke off before its end"))

    async def _begin(self, session: Session, first: bulk_pb2.UploadRequest) -> runtime.Upload:
        """Memory for a content may be another host's, so it is taken on a thread."""
        if isinstance(_target(first.target), int):
            return _begin(session, first)
        beginning = self._hashers.submit(_begin, session, first)
        try:
            return await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(_abandon)
            raise

    async def _receive(
        self,
        session: Session,
        upload: runtime.Upload,
        first: bulk_pb2.UploadRequest,
        requests: AsyncIterator[bulk_pb2.UploadRequest],
        hashed: bool,
    ) -> None:
        """Writes all pieces. A piece that is hashed takes a while: the next one is read meanwhile."""
        writing: asyncio.Future[None] | None = None
        request: bulk_pb2.UploadRequest | None = first
        while request is not None:
            _check_size(session, request)
            if writing is not None:
                await writing
            writing = self._write(upload, request) if hashed else None
            if not hashed:
                upload.write(request.offset_bytes, request.data)
            request = await anext(requests, None)
        if writing is not None:
            await writing

    def _write(self, upload: runtime.Upload, request: bulk_pb2.UploadRequest) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._hashers, upload.write, request.offset_bytes, request.data)
        # If the call breaks off before it is awaited, nobody else looks at its error.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return writing

    @refusals
    async def Download(  # type: ignore[override]  # the stubs know generators alone
        self,
        request: bulk_pb2.DownloadRequest,
        context: aio.ServicerContext[bulk_pb2.DownloadRequest, bulk_pb2.DownloadResponse],
    ) -> None:
        session = self._slot.host.session(request.session)
        download = session.open_download(request.transfer)
        try:
            data = await asyncio.wrap_future(download.future)
            for offset in range(0, max(1, data.nbytes), session.limits.chunk_bytes):
                piece = bytes(data[offset : offset + session.limits.chunk_bytes])
                response = bulk_pb2.DownloadResponse(offset_bytes=offset, size_bytes=data.nbytes, data=piece)
                await context.write(response)
        finally:
            download.close()

    @refusals
    async def FindMissingContents(
        self,
        request: bulk_pb2.FindMissingContentsRequest,
        context: aio.ServicerContext[
            bulk_pb2.FindMissingContentsRequest, bulk_pb2.FindMissingContentsResponse
        ],
    ) -> bulk_pb2.FindMissingContentsResponse:
        session = self._slot.host.session(request.session)
        if len(request.digests) > (limit := session.limits.graph_nodes):
            raise LimitExceededError(
                f"{len(request.digests):,} digests at once; this server takes {limit:,}",
                advice="ask in parts",
            )
        loop = asyncio.get_running_loop()
        missing = await loop.run_in_executor(self._hashers, session.missing_contents, request.digests)
        received = session.received_contents(missing)
        return bulk_pb2.FindMissingContentsResponse(
            missing_digests=missing, received_bytes=received if any(received) else ()
        )


def _target(target: bulk_pb2.UploadTarget) -> int | bytes:
    match target.WhichOneof("target"):
        case "transfer":
            return target.transfer
        case "digest":
            return target.digest
    raise ProtocolError("an upload needs a transfer or a digest")


def _abandon(beginning: Future[runtime.Upload]) -> None:
    """The client left while its upload began."""
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().abort(CancelledError("the upload broke off before its end"))


def _begin(session: Session, first: bulk_pb2.UploadRequest) -> runtime.Upload:
    """A content may go on where an earlier upload broke off; a transfer begins at its beginning."""
    target = _target(first.target)
    offset = first.offset_bytes if isinstance(target, bytes) else 0
    return session.begin_upload(target, first.target.size_bytes, offset)


def _check_size(session: Session, request: bulk_pb2.UploadRequest) -> None:
    if len(request.data) > session.limits.chunk_bytes:
        raise LimitExceededError(
            f"a piece of {len(request.data):,} bytes; this server takes {session.limits.chunk_bytes:,}"
        )
