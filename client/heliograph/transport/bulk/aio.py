"""Bulk data of an asyncio session: over its own channel, or through shared memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from heliograph.core.effects import ReceiveDownload, StartUpload
from heliograph.core.future import Deadline, Transfer
from heliograph.transport import handshake
from heliograph.transport.bulk import messages
from heliograph.transport.bulk.tickets import Channels, DirectUpload
from heliograph.transport.channels import open_aio_channel
from heliograph.transport.direct.transfers import NO_LIMIT, Arrived, Connection, DirectTransfers
from heliograph.transport.reconnecting import Tries, is_cut, kept, question, rest_of
from heliograph.transport.shared_memory import SharedUpload, cut_short, take_slots
from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_proto.sessions import Traffic
from heliograph_proto.v1 import bulk_pb2

if TYPE_CHECKING:
    from heliograph.transport.aio_grpc import AioGrpcShell

T = TypeVar("T")

#: The most uploads to other daemons at once, each on a thread.
MOST_DIRECT = 32


class AioBulk:
    """The uploads and downloads of a session."""

    def __init__(self, shell: AioGrpcShell) -> None:
        self._shell = shell
        self._core, self._info, self._address = shell.core, shell.info, shell.address
        self._channel = open_aio_channel(self._address, shell.channel_options, shell.credentials)
        self._link = shell.speed
        self._direct = DirectTransfers(self._address, self._info, shell.tcp_silence_seconds, self._link)
        self._others = Channels(self._address, shell.credentials)
        self._senders = ThreadPoolExecutor(MOST_DIRECT, "heliograph-direct")

    def start_upload(self, upload: StartUpload) -> Transfer:
        """Start to send bytes, in a task of the session."""
        task = self._shell.spawn(self._upload(upload, lambda: transfer))
        transfer = Transfer(task.cancel)
        return transfer

    async def _upload(self, upload: StartUpload, get_transfer: Callable[[], Transfer]) -> None:
        transfer = get_transfer()
        error: HeliographError | None = CancelledError("the upload was cancelled")
        try:
            if upload.offer is not None:
                direct = DirectUpload(upload, upload.offer)
                await moved(partial(direct.run, self._others), direct.cancel, self._senders)
            elif self._core.has_lease:
                await self._keep_sending(kept(upload), transfer)
            else:
                await self._send(upload, transfer)
            error = None
        except Exception as broken:
            error = handshake.upload_error(broken, self._address)
        finally:
            self._shell.upload_ended(upload, transfer, error)

    async def _send(self, upload: StartUpload, transfer: Transfer) -> None:
        """Send bytes by the best way there is."""
        space = self._core.shared
        slots = take_slots(space) if isinstance(upload.target, bytes) else []
        if space is not None and slots:
            await self._send_shared(SharedUpload(space, slots, self._info.session, upload))
        elif (connection := await self._connection(upload)) is not None:
            await self._send_directly(connection, upload, transfer)
        else:
            await self._send_chunks(upload, transfer)

    async def _keep_sending(self, upload: StartUpload, transfer: Transfer) -> None:
        """Send bytes, and what the server lacks of them after each break."""
        rest: StartUpload | None = upload
        tries = Tries()
        while rest is not None:
            link, session = self._shell.link, self._info.session
            try:
                return await self._send(rest, transfer)
            except asyncio.CancelledError:
                # A channel that closes cancels its calls; their task was not cancelled.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                pause = tries.again(link)
                if pause is None:
                    raise
            except Exception as broken:
                # A daemon that the session has left, or not reached yet, does not know its secret.
                is_elsewhere = self._info.session != session
                pause = tries.again(link) if is_cut(broken) or is_elsewhere else None
                if pause is None:
                    raise
            await asyncio.sleep(pause)
            await self._shell.await_up(NO_LIMIT)
            if upload.pending is not None and upload.pending.done:
                return
            rest = rest_of(rest, await self._shell.call(question(rest), NO_LIMIT))

    async def _connection(self, upload: StartUpload | None) -> Connection | None:
        """Return a connection beside gRPC's for a transfer, if there is one."""
        # A content may be for another server, which may be slow.
        is_elsewhere = upload is not None and isinstance(upload.target, bytes) and self._core.places_contents
        if self._direct.is_over or is_elsewhere:
            return None
        found: list[Connection] = []

        def take() -> None:
            if (connection := self._direct.take()) is not None:
                found.append(connection)

        try:
            await moved(take)
        except BaseException:
            for one in found:
                self._direct.give(one)
            raise
        return found[0] if found else None

    async def _send_directly(self, connection: Connection, upload: StartUpload, transfer: Transfer) -> None:
        def taken() -> None:
            if self._core.has_lease:
                return  # they may have to be sent again
            self._shell.on_loop(self._shell.advance, lambda: self._core.settle(transfer.taken))

        send = partial(self._direct.upload, connection, upload, taken)
        await moved(send, connection.cancel, self._senders)

    async def _send_chunks(self, upload: StartUpload, transfer: Transfer) -> None:
        method: Any = self._channel.stream_unary(handshake.UPLOAD, None, bulk_pb2.UploadResponse.FromString)
        target = messages.upload_target(self._info.session, upload.target, upload.data.nbytes, upload.attempt)
        chunk_bytes = self._info.limits.chunk_bytes
        call = method()
        try:
            left, start_bytes = upload.data.nbytes - upload.offset_bytes, upload.offset_bytes
            pack, meter = self._link.packing(left)
            write = partial(self._shell.write_first, call)
            pieces = messages.upload_messages(target, upload.data, chunk_bytes, start_bytes, pack)
            while True:
                # Packing takes too long for the loop.
                is_packed = pack is not messages.as_it_is
                message = await moved(partial(next, pieces, None)) if is_packed else next(pieces, None)
                if message is None:
                    break
                start = time.monotonic()
                await write(message)
                write = call.write
                meter.took(len(message), time.monotonic() - start)
                if upload.progress is not None:
                    upload.progress(min(chunk_bytes, left))
                left -= chunk_bytes
            if isinstance(upload.target, int):
                # A message holds a copy.
                self._core.count(Traffic(copied_in_bytes=upload.data.nbytes))
            if not self._core.has_lease:
                # Otherwise they may have to be sent again.
                self._shell.advance(lambda: self._core.settle(transfer.taken))
            await call.done_writing()
        except asyncio.InvalidStateError:
            pass  # the server has answered early; the answer says why
        except HeliographError:
            call.cancel()
            raise
        finally:
            if not call.done() and (task := asyncio.current_task()) and task.cancelling():
                call.cancel()
        await call

    async def _send_shared(self, shared: SharedUpload) -> None:
        """Send a content through shared memory."""
        method: Any = self._channel.stream_stream(handshake.UPLOAD_SHARED, None, None)
        call = method()
        try:
            try:
                await self._send_pieces(shared, call)
            except asyncio.InvalidStateError:
                pass  # the server has ended the call early; its status says why
            # Raises the status of a call that failed.
            while (answer := await call.read()) is not grpc.aio.EOF:
                shared.answered(answer)
            if not shared.is_over:
                raise cut_short()
        finally:
            for slot in shared.slots():
                self._core.give_slot(slot)
            if not call.done():
                # grpc.aio leaves a thread behind if the loop ends before the call has.
                call.cancel()
                await asyncio.wait([asyncio.ensure_future(call.code())], timeout=handshake.CLOSE_SECONDS)

    async def _send_pieces(self, shared: SharedUpload, call: Any) -> None:
        write = partial(self._shell.write_first, call)
        while not shared.is_over:
            if (request := await moved(shared.take)) is not None:
                await write(request)
                write = call.write
            elif (answer := await call.read()) is not grpc.aio.EOF:
                shared.answered(answer)
            else:
                return
        await call.done_writing()

    async def download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        """Receive bytes, and go on after each break. Raises the error of the command, and
        DeadlineExceededError."""
        arrived, tries = Arrived(), Tries()
        while True:
            link, session = self._shell.link, self._info.session
            try:
                return await self._receive(download, deadline, arrived)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                is_ours = task is None or task.cancelling() > 0 or not self._core.has_lease
                pause = None if is_ours else tries.again(link)
                if pause is None:
                    raise
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, HeliographError) as error:
                self._core.check()
                may_go_on = is_cut(error) or self._info.session != session
                pause = tries.again(link) if self._core.has_lease and may_go_on else None
                if pause is None:
                    if isinstance(error, grpc.aio.AioRpcError):
                        raise handshake.typed_error(error, self._address, "send a tensor's bytes") from None
                    raise
            await asyncio.sleep(pause)
            await self._shell.await_up(deadline)
            arrived.tries += 1

    async def _receive(self, download: ReceiveDownload, deadline: Deadline, arrived: Arrived) -> None:
        if (connection := await self._connection(None)) is not None:
            receive = partial(
                self._direct.download, connection, download.transfer, download.out, deadline, arrived
            )
            return await moved(receive, connection.cancel, self._senders)
        method: Any = self._channel.unary_stream(handshake.DOWNLOAD, None, None)
        request = self._link.download_request(self._info.session, download.transfer, download.out.nbytes)
        request.offset_bytes, request.resume = arrived.count, arrived.tries > 0
        call = method(request.SerializeToString(), timeout=deadline.remaining())
        receiver = messages.Receiver(download.out, request.encodings, arrived.count)
        meter = self._link.receiving(is_packed=bool(request.encodings))
        try:
            async for message in call:
                if request.encodings:
                    # Unpacking takes too long for the loop.
                    await moved(partial(receiver.piece, message))
                else:
                    receiver.piece(message)
                arrived.count = receiver.received_bytes
                meter.came(receiver.came_bytes)
            receiver.finish()
            self._core.count(Traffic(copied_out_bytes=receiver.copied_bytes))
        finally:
            call.cancel()

    def _follow(self) -> None:
        """Go on with the daemon that has the session now."""
        shell = self._shell
        self._info, self._address, self._link = shell.info, shell.address, shell.speed
        self._direct.close()
        self._direct = DirectTransfers(self._address, self._info, shell.tcp_silence_seconds, self._link)
        self._others.close()
        self._others = Channels(self._address, shell.credentials)

    async def renew(self) -> None:
        """End all calls, since the session's connection broke, and go on over other connections."""
        shell, before = self._shell, self._channel
        self._channel = open_aio_channel(shell.address, shell.channel_options, shell.credentials)
        if (self._info.session, self._info.direct) != (shell.info.session, shell.info.direct):
            self._follow()
        self._direct.renew()
        await before.close()

    def abandon(self) -> None:
        """Close the connections of a session in the child of a fork."""
        self._direct.abandon()

    async def close(self) -> None:
        """End all calls."""
        self._direct.close()
        await self._channel.close()
        self._others.close()
        self._senders.shutdown(wait=False)


async def moved(
    function: Callable[[], T], stop: Callable[[], None] = lambda: None, threads: Executor | None = None
) -> T:
    """Run a function that moves bytes in a thread.

    A cancelled task calls `stop` and waits for its end, which is near, since the memory is used
    again.
    """
    moving = asyncio.get_running_loop().run_in_executor(threads, function)
    cancelled: asyncio.CancelledError | None = None
    while not moving.done():
        try:
            await asyncio.wait([moving])
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    if cancelled is not None:
        moving.exception()  # that of a function that was stopped
        raise cancelled
    return moving.result()
