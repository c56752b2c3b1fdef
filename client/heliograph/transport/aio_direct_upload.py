"""Direct uploads of an asyncio session to other daemons."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from heliograph.core.effects import StartUpload
from heliograph.transport import handshake
from heliograph.transport.channels import NO_CREDENTIALS, credentials_elsewhere, open_aio_channel
from heliograph.transport.direct_upload import (
    ASKS,
    CONNECT_SECONDS,
    DIRECT_OPTIONS,
    HEALTH,
    UPLOAD_ADMITTED,
    address_of,
    checked,
    first_message,
    no_connection,
    refusal,
)
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec.bulk import encode_upload
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError
from heliograph_proto.plans import ContentOffer
from heliograph_proto.v1 import bulk_pb2


class AioDirect:
    """Connections to other daemons, by address, each made once, and uploads by tickets."""

    def __init__(self, own: Address, credentials: Credentials = NO_CREDENTIALS) -> None:
        """`own`: the session's daemon, and the credentials for it."""
        self._own, self._credentials = own, credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        #: The channels on which a daemon answered.
        self._reached: set[grpc.aio.Channel] = set()
        #: Those of them that broke since.
        self._doubted: set[grpc.aio.Channel] = set()

    async def _connected(self, offer: ContentOffer) -> grpc.aio.Channel:
        other = address_of(offer)
        if (target := str(other)) not in self._channels:
            elsewhere = credentials_elsewhere(self._credentials, self._own, other)
            self._channels[target] = open_aio_channel(other, DIRECT_OPTIONS, elsewhere)
        channel = self._channels[target]
        if channel in self._reached:
            return channel
        for asks_left in reversed(range(ASKS if channel in self._doubted else 1)):
            if (failed := await _no_answer(channel, offer)) is None:
                break
            if not asks_left or isinstance(failed, CancelledError):
                raise failed
        self._reached.add(channel)
        self._doubted.discard(channel)
        return channel

    async def send(self, upload: StartUpload, offer: ContentOffer) -> None:
        """Send a content's bytes.

        Raises UnreachableError before any byte was sent, and the errors of an upload.
        """
        channel = await self._connected(offer)
        method: Any = channel.stream_stream(UPLOAD_ADMITTED, None, bulk_pb2.UploadAdmittedResponse.FromString)
        call = method()
        sending = _Sending(upload, offer, call)
        try:
            await sending.run()
        except grpc.aio.AioRpcError as error:
            self._reached.discard(channel)
            self._doubted.add(channel)
            raise refusal(error, offer, has_begun=sending.has_begun) from None
        finally:
            if not call.done():
                # grpc.aio leaves a thread behind if the loop ends before the call has.
                call.cancel()
                await asyncio.wait([asyncio.ensure_future(call.code())], timeout=handshake.CLOSE_SECONDS)

    async def close(self) -> None:
        """Close all channels, which ends every call."""
        for channel in self._channels.values():
            await channel.close()


async def _no_answer(channel: grpc.aio.Channel, offer: ContentOffer) -> HeliographError | None:
    """Ask the daemon for an answer. Returns the error if there is none."""
    method: Any = channel.unary_unary(HEALTH, None, None)
    try:
        await method(b"", timeout=CONNECT_SECONDS)
    except grpc.aio.AioRpcError as error:
        return no_connection(error, offer)
    return None


class _Sending:
    """One upload call."""

    def __init__(self, upload: StartUpload, offer: ContentOffer, call: Any) -> None:
        self._upload, self._offer, self._call = upload, offer, call
        self.has_begun = False

    async def run(self) -> None:
        data = self._upload.data
        await self._write(first_message(self._offer, data.nbytes))
        start, chunk_bytes = checked(await self._answer(), self._offer, data.nbytes)
        self.has_begun = True
        self._tell(start - self._upload.offset_bytes)
        for offset in range(start, data.nbytes, chunk_bytes):
            piece = data[offset : offset + chunk_bytes]
            if not await self._write(encode_upload(None, offset, piece)):
                break
            self._tell(piece.nbytes)
        try:
            await self._call.done_writing()
        except asyncio.InvalidStateError:
            pass  # its status says why it is over
        if (await self._answer()).received_bytes != data.nbytes:
            raise ProtocolError(f"{self._offer.address} took a different number of bytes than was sent")

    async def _write(self, message: bytes) -> bool:
        """Send a message. Returns False if the daemon takes no more."""
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:
            return False
        return True

    async def _answer(self) -> bulk_pb2.UploadAdmittedResponse:
        """Return the next answer. Raises the status of a call that has ended without one."""
        answer = await self._call.read()
        if isinstance(answer, bulk_pb2.UploadAdmittedResponse):
            return answer
        raise ProtocolError(f"{self._offer.address} ended an upload without an answer")

    def _tell(self, taken_bytes: int) -> None:
        if taken_bytes and self._upload.progress is not None:
            self._upload.progress(taken_bytes)
