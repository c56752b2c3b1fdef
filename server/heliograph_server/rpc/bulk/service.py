"""BulkService: tensor bytes, in pieces, on calls of their own.

gRPC passes messages with bytes undecoded to our own codec (`heliograph_proto.codec.bulk`). Its flow
control limits an upload to the speed of storing it, and a download to the speed of the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor

from grpc import aio

from heliograph_proto.codec.bulk import decode_download, encode_download
from heliograph_proto.codec.packing import Encoding, Packer, encodings_from
from heliograph_proto.errors import CancelledError, LimitExceededError, ProtocolError
from heliograph_proto.v1 import bulk_pb2
from heliograph_server.rpc.bulk.tickets import TicketCalls
from heliograph_server.rpc.receiving import abort, begun, decoded, first_of, next_piece, receive
from heliograph_server.rpc.requests import Context, Requests, gives_bytes, takes_bytes
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.session import Session
from heliograph_server.session.staging import StagedMessages
from heliograph_server.weights import uploads


class BulkService:
    """Uploads, downloads, and contents.

    Hashing uses the threads of `hashers`. Uploads that are passed on to other daemons, and may wait
    for these, use those of `relays`.
    """

    def __init__(self, slot: HostSlot, hashers: Executor, relays: Executor) -> None:
        self._slot = slot
        self._hashers = hashers
        self._relays = relays
        self._tickets = TicketCalls(slot, hashers)

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, bulk_pb2.DESCRIPTOR.services_by_name["BulkService"], self, self._tickets)

    @takes_bytes
    async def Upload(
        self,
        requests: AsyncIterator[bytes],
        context: Context,
    ) -> bulk_pb2.UploadResponse:
        first = decoded(await first_of(anext(requests, None)))
        if first is None or first.target is None:
            raise ProtocolError("the first message of an upload must have its target")
        target = bulk_pb2.UploadTarget.FromString(first.target)
        session = self._slot.session(target.session)
        upload = await self._begin(session, target, first.offset_bytes)
        workers = self._relays if upload.is_relayed else self._hashers
        try:
            await receive(session.limits, upload, first, requests, workers, session.encodings)
            if not upload.is_relayed:
                return bulk_pb2.UploadResponse(received_bytes=upload.finish())
            received = await asyncio.get_running_loop().run_in_executor(workers, upload.finish)
            return bulk_pb2.UploadResponse(received_bytes=received)
        except BaseException:
            await abort(workers, upload)
            raise

    async def _begin(
        self, session: Session, target: bulk_pb2.UploadTarget, offset_bytes: int
    ) -> uploads.IncomingUpload:
        """Begin an upload, on a thread if it is of a content, whose memory may be on another host.

        A content may resume at the offset where an earlier upload broke off; a transfer cannot.
        """
        found = _target(target)
        if isinstance(found, int):
            return session.begin_upload(found, target.size_bytes)
        workers = self._relays if session.is_relayed(found) else self._hashers
        return await begun(workers.submit(session.begin_upload, found, target.size_bytes, offset_bytes))

    @takes_bytes
    async def UploadShared(
        self,
        requests: AsyncIterator[bytes],
        context: Context,
    ) -> None:
        first = _place_of(await first_of(anext(requests, None)))
        if first is None or not isinstance(_target(first.target), bytes):
            raise ProtocolError("the first message of an upload from shared memory must name a content")
        session = self._slot.session(first.target.session)
        upload = await self._begin(session, first.target, first.offset_bytes)
        workers = self._relays if upload.is_relayed else self._hashers
        try:
            request: bulk_pb2.UploadSharedRequest | None = first
            while request is not None:
                received = await asyncio.get_running_loop().run_in_executor(
                    workers, _take_shared, session, upload, request
                )
                await context.write(bulk_pb2.UploadSharedResponse(received_bytes=received))
                request = _place_of(await next_piece(requests, session.limits))
            # The client learns before the end of the call whether the digest is right.
            await asyncio.get_running_loop().run_in_executor(workers, upload.finish)
        except BaseException:
            await abort(workers, upload)
            raise

    @gives_bytes
    async def Download(self, request: bulk_pb2.DownloadRequest, context: Context) -> None:
        session = self._slot.session(request.session)
        download = session.open_download(request.transfer)
        try:
            messages = await asyncio.wrap_future(download.future)
            assert isinstance(messages, StagedMessages), "this reader takes no bytes in place"
            pack = self._packed(session, request)
            while messages.encoded:
                message = messages.encoded.popleft()
                await context.write(message if pack is None else await pack(message))
            if messages.is_dropped:
                raise session.closed or CancelledError("the download was dropped")
        finally:
            download.close()

    def _packed(
        self, session: Session, request: bulk_pb2.DownloadRequest
    ) -> Callable[[bytes], Awaitable[bytes]] | None:
        """A function that packs messages on a thread; None if the client wants them as they are."""
        if not request.encodings:
            return None
        packer = Packer(encodings_from(request.encodings, session.encodings), time.thread_time)

        def pack(message: bytes) -> bytes:
            piece = decode_download(message)
            encoding, packed = packer.pack(piece.data, float(request.bytes_per_second))
            if encoding is Encoding.PLAIN:
                return message
            return encode_download(piece.offset_bytes, piece.size_bytes, packed, encoding, piece.data.nbytes)

        loop = asyncio.get_running_loop()
        return lambda message: loop.run_in_executor(self._hashers, pack, message)

    async def FindMissingContents(
        self, request: bulk_pb2.FindMissingContentsRequest, context: Context
    ) -> bulk_pb2.FindMissingContentsResponse:
        session = self._slot.session(request.session)
        if (count := len(request.digests) + len(request.sent_digests)) > (
            limit := session.limits.graph_nodes
        ):
            raise LimitExceededError(
                f"{count:,} digests at once; this server takes {limit:,}",
                advice="send them in parts",
            )
        loop = asyncio.get_running_loop()
        await asyncio.wrap_future(session.when_here(request.sent_digests))
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


def _place_of(message: bytes | None) -> bulk_pb2.UploadSharedRequest | None:
    """Decode a message of `UploadShared`; None at the end. Raises DecodeError."""
    return None if message is None else bulk_pb2.UploadSharedRequest.FromString(message)


def _take_shared(
    session: Session, upload: uploads.IncomingUpload, request: bulk_pb2.UploadSharedRequest
) -> int:
    """Write a copy of a piece in shared memory, so that the hashed bytes are those kept."""
    upload.write(request.offset_bytes, session.shared_bytes(request.shared_offset_bytes, request.size_bytes))
    return upload.received_bytes
