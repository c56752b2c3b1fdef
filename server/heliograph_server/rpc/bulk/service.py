"""BulkService: tensor bytes, in pieces, on calls of their own.

gRPC passes messages with bytes undecoded to our own codec (`heliograph_proto.codec.bulk`). Its flow
control limits an upload to the speed of storing it, and a download to the speed of the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
from heliograph_server.session.bulk import DownloadReader
from heliograph_server.session.session import Session
from heliograph_server.session.staging import PlacedBytes, StagedMessages
from heliograph_server.weights import uploads

logger = logging.getLogger(__name__)


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
        except BaseException as error:
            await abort(workers, upload, error)
            raise

    async def _begin(
        self, session: Session, target: bulk_pb2.UploadTarget, offset_bytes: int
    ) -> uploads.IncomingUpload:
        """Begin an upload, on a thread if it is of a content, whose memory may be on another host.

        It may resume at the offset where an earlier upload broke off; that of a transfer only in a
        session with a lease.
        """
        found = _target(target)
        if isinstance(found, int):
            return session.begin_upload(found, target.size_bytes, offset_bytes, target.attempt)
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
        except BaseException as error:
            await abort(workers, upload, error)
            raise

    @gives_bytes
    async def Download(self, request: bulk_pb2.DownloadRequest, context: Context) -> None:
        session = self._slot.session(request.session)
        download = session.open_download(
            request.transfer, offset_bytes=request.offset_bytes, resume=request.resume
        )
        try:
            found = await asyncio.wrap_future(download.future)
            pack = self._packed(session, request)
            for message in _messages(download, found, session.limits.chunk_bytes):
                await context.write(message if pack is None else await pack(message))
            if isinstance(found, StagedMessages) and found.is_dropped and not download.is_kept:
                raise session.closed or CancelledError("the download was dropped")
        except aio.BaseError as error:
            if not download.is_kept:
                raise
            # Another call goes on. An error here would keep the call, and gRPC's thread with it.
            logger.debug("the reader of a download is gone: %s", error)
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
        count = len(request.digests) + len(request.sent_digests) + len(request.transfers)
        if count > (limit := session.limits.graph_nodes):
            raise LimitExceededError(
                f"{count:,} digests at once; this server takes {limit:,}",
                advice="send them in parts",
            )
        loop = asyncio.get_running_loop()
        await asyncio.wrap_future(session.when_here(request.sent_digests))
        missing = await loop.run_in_executor(self._hashers, session.missing_contents, request.digests)
        received = session.received_contents(missing)
        # On a thread, since a piece that is being written holds its upload's lock.
        of_transfers = await loop.run_in_executor(
            self._hashers, session.received_transfers, _attempts(request)
        )
        return bulk_pb2.FindMissingContentsResponse(
            missing_digests=missing,
            received_bytes=received if any(received) else (),
            transfer_bytes=of_transfers,
        )


def _messages(
    download: DownloadReader, found: StagedMessages | PlacedBytes, chunk_bytes: int
) -> Iterator[bytes]:
    """Yield the messages of a download, from its offset on."""
    if isinstance(found, PlacedBytes):
        # An earlier reader, which broke off, took bytes in place.
        for offset in range(download.offset_bytes, found.nbytes, chunk_bytes):
            part = bytearray()
            found.send_from(offset, lambda data, part=part: part.extend(data), chunk_bytes)  # type: ignore[misc]
            yield encode_download(offset, found.nbytes, memoryview(part))
    elif download.is_kept:
        yield from found.since(download.offset_bytes)
    else:
        while found.encoded:
            yield found.encoded.popleft()


def _attempts(request: bulk_pb2.FindMissingContentsRequest) -> dict[int, int]:
    """The next attempt of each transfer in question. Raises ProtocolError."""
    if len(request.transfers) != len(request.attempts):
        raise ProtocolError(f"{len(request.transfers):,} transfers and {len(request.attempts):,} attempts")
    return dict(zip(request.transfers, request.attempts, strict=True))


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
