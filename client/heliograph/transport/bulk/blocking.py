"""Bulk data of a blocking session: over its own channel, or through shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc

from heliograph.core.effects import ReceiveDownload, StartUpload
from heliograph.core.future import Deadline, Transfer
from heliograph.core.interrupts import InThread, is_interruptible, undisturbed
from heliograph.transport import handshake
from heliograph.transport.bulk import messages
from heliograph.transport.bulk.link import Link
from heliograph.transport.bulk.tickets import (
    PATIENCE_SECONDS,
    Announcement,
    Channels,
    DirectUpload,
    Tell,
    TicketUpload,
)
from heliograph.transport.channels import open_channel
from heliograph.transport.direct.transfers import Connection, DirectTransfers
from heliograph.transport.shared_memory import SharedUpload, cut_short, take_slots
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import ContentOffer
from heliograph_proto.sessions import Traffic
from heliograph_proto.v1 import bulk_pb2

if TYPE_CHECKING:
    from heliograph.transport.blocking import GrpcShell


class _Calls:
    """The calls and connections of a download. Each is cancelled, also one that is made later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[Any] = []
        self._is_cancelled = False

    def add(self, call: Any) -> None:
        """Add one."""
        with self._lock:
            self._made.append(call)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            call.cancel()

    def cancel(self) -> None:
        """Cancel all. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            made = [*self._made]
        for call in made:
            call.cancel()


class BlockingBulk:
    """The uploads and downloads of a session."""

    def __init__(self, shell: GrpcShell) -> None:
        self._shell = shell
        self._core, self._info, self._address = shell.core, shell.info, shell.address
        self._channel: Any = open_channel(self._address, shell.channel_options, shell.credentials)
        self._link = Link(self._address, self._info, shell.compression)
        self._direct = DirectTransfers(self._address, self._info, shell.tcp_silence_seconds, self._link)
        #: The channels to other daemons that take contents.
        self._channels = Channels(self._address, shell.credentials)
        #: Threads that carry contents, each until its call has ended.
        self._carriers: set[threading.Thread] = set()

    def start_upload(self, upload: StartUpload) -> Transfer:
        """Start to send bytes. No lock may be held."""
        if upload.offer is not None:
            direct = DirectUpload(upload, upload.offer)
            transfer = Transfer(direct.cancel)
            send = partial(direct.run, self._channels)
            self._start_carrier("heliograph-direct", upload, transfer, send)
            return transfer
        if isinstance(upload.target, bytes) and (shared := self._shared_upload(upload)):
            return self._start_shared(upload, shared)
        # A content may be for another server, which may be slow.
        is_elsewhere = isinstance(upload.target, bytes) and self._core.places_contents
        if not is_elsewhere and (connection := self._direct.take()) is not None:
            return self._start_direct(upload, connection)
        return self._start_call(upload)

    def _start_direct(self, upload: StartUpload, connection: Connection) -> Transfer:
        """Send bytes on a connection of their own."""
        transfer = Transfer(connection.cancel)

        def taken() -> None:
            self._shell.advance(lambda: self._core.settle(transfer.taken))

        send = partial(self._direct.upload, connection, upload, taken)
        self._start_carrier("heliograph-upload", upload, transfer, send)
        return transfer

    def _start_call(self, upload: StartUpload) -> Transfer:
        method: Any = self._channel.stream_unary(handshake.UPLOAD, None, bulk_pb2.UploadResponse.FromString)
        call: Any = None
        transfer = Transfer(lambda: call.cancel())
        call = method.future(self._chunks(upload, transfer))
        call.add_done_callback(lambda _: self._upload_ended(upload, transfer, call))
        return transfer

    def _chunks(self, upload: StartUpload, transfer: Transfer) -> Iterator[bytes]:
        target = messages.upload_target(self._info.session, upload.target, upload.data.nbytes)
        left = max(upload.data.nbytes - upload.offset_bytes, 1)
        chunk_bytes, start_bytes = self._info.limits.chunk_bytes, upload.offset_bytes
        pack, meter = self._link.packing(left)
        for message in messages.upload_messages(target, upload.data, chunk_bytes, start_bytes, pack):
            taken = min(chunk_bytes, left)
            left -= taken
            if isinstance(upload.target, int):
                # A message holds a copy.
                copied = Traffic(copied_in_bytes=min(taken, upload.data.nbytes))
                self._shell.advance(partial(self._core.count, copied))
            if not left:
                self._shell.advance(lambda: self._core.settle(transfer.taken))
            if upload.progress is not None:
                upload.progress(min(taken, upload.data.nbytes))
            start = time.monotonic()
            yield message
            meter.took(len(message), time.monotonic() - start)

    def _upload_ended(self, upload: StartUpload, transfer: Transfer, call: Any) -> None:
        status = call.exception() if not call.cancelled() else call
        error = (
            None if status is None else handshake.typed_error(status, self._address, handshake.TAKE_AN_UPLOAD)
        )
        self._settle(upload, transfer, error)

    def _settle(self, upload: StartUpload, transfer: Transfer, error: HeliographError | None) -> None:
        self._shell.advance(lambda: self._core.upload_ended(upload.pending, transfer, error))

    # Contents through shared memory

    def _shared_upload(self, upload: StartUpload) -> SharedUpload | None:
        def begin() -> SharedUpload | None:
            space = self._core.shared
            slots = take_slots(space)
            return SharedUpload(space, slots, self._info.session, upload) if space and slots else None

        return self._shell.advance(begin)

    def _start_shared(self, upload: StartUpload, shared: SharedUpload) -> Transfer:
        method: Any = self._channel.stream_stream(handshake.UPLOAD_SHARED, None, None)
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        call: Any = None
        transfer = Transfer(lambda: call.cancel())
        try:
            call = method(iter(requests.get, None))
            send = partial(self._send_shared, shared, call, requests)
            self._start_carrier("heliograph-upload", upload, transfer, send)
        except BaseException:
            requests.put(None)
            self._shell.advance(partial(self._give_slots, shared))
            raise
        return transfer

    def _send_shared(self, shared: SharedUpload, call: Any, requests: SimpleQueue[bytes | None]) -> None:
        try:
            while not shared.is_over:
                if (request := shared.take()) is not None:
                    requests.put(request)
                elif (answer := next(call, None)) is not None:
                    shared.answered(answer)
                else:
                    raise cut_short()
            requests.put(None)
            # Raises the status of a call that failed.
            for answer in call:
                shared.answered(answer)
        finally:
            requests.put(None)
            call.cancel()
            self._shell.advance(partial(self._give_slots, shared))

    def _give_slots(self, shared: SharedUpload) -> None:
        for slot in shared.slots():
            self._core.give_slot(slot)

    def _start_carrier(
        self, name: str, upload: StartUpload, transfer: Transfer, send: Callable[[], None]
    ) -> None:
        """Run an upload in its own thread, and settle it when it ends."""

        def carry() -> None:
            error: HeliographError | None = cut_short()
            try:
                send()
                error = None
            except Exception as broken:
                error = handshake.upload_error(broken, self._address)
            finally:
                self._settle(upload, transfer, error)
                self._carriers.discard(threading.current_thread())

        carrier = threading.Thread(target=carry, name=name, daemon=True)
        self._carriers.add(carrier)
        carrier.start()

    # Contents to and from other daemons

    def announce(self, contents: Sequence[tuple[bytes, int, int]], tell: Tell) -> Announcement:
        """Announce contents by digest, handle of the tensor, and size.

        Raises the errors of BulkService.Admit.
        """
        admitted = [
            bulk_pb2.AdmittedContent(digest=digest, tensor=tensor, size_bytes=size_bytes)
            for digest, tensor, size_bytes in contents
        ]
        return Announcement(self._channel, self._address, self._info.session, admitted, tell)

    def bring(self, offer: ContentOffer, size_bytes: int) -> TicketUpload:
        """Return an upload by a ticket of this session's server, to begin."""
        return TicketUpload(self._channel, offer, size_bytes, PATIENCE_SECONDS)

    # Downloads

    def download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        """Receive bytes. Raises the error of the command, and DeadlineExceededError."""
        if not is_interruptible():
            self._receive(download, deadline, _Calls())
            return
        # gRPC's own code must not be interrupted, so another thread runs it.
        calls = _Calls()
        receiving = InThread(partial(self._receive, download, deadline, calls))
        try:
            receiving.result()
        except BaseException:
            undisturbed(calls.cancel)
            # It writes to the caller's array.
            receiving.join(handshake.CLOSE_SECONDS)
            raise

    def _receive(self, download: ReceiveDownload, deadline: Deadline, calls: _Calls) -> None:
        """Receive bytes. `calls` gets the call, for a cancel by another thread."""
        if (connection := self._direct.take()) is not None:
            calls.add(connection)
            self._receive_directly(connection, download, deadline)
            return
        method: Any = self._channel.unary_stream(handshake.DOWNLOAD, None, None)
        request = self._link.download_request(self._info.session, download.transfer, download.out.nbytes)
        call = method(request.SerializeToString(), timeout=deadline.remaining())
        calls.add(call)
        receiver, meter = (
            messages.Receiver(download.out, request.encodings),
            self._link.receiving(is_packed=bool(request.encodings)),
        )
        try:
            for message in call:
                receiver.piece(message)
                meter.came(receiver.came_bytes)
            receiver.finish()
            copied = Traffic(copied_out_bytes=receiver.copied_bytes)
            self._shell.advance(lambda: self._core.count(copied))
            return
        except grpc.RpcError as error:
            broken = handshake.typed_error(error, self._address, "send a tensor's bytes")
        finally:
            call.cancel()
        self._shell.advance(self._core.check)
        raise broken

    def _receive_directly(
        self, connection: Connection, download: ReceiveDownload, deadline: Deadline
    ) -> None:
        try:
            self._direct.download(connection, download.transfer, download.out, deadline)
            return
        except HeliographError as error:
            broken = error
        self._shell.advance(self._core.check)
        raise broken

    def abandon(self) -> None:
        """Close the connections of a session in the child of a fork."""
        self._direct.abandon()

    def close(self) -> None:
        """End all calls, in bounded time."""
        self._direct.close()
        self._channel.close()
        self._channel = None
        self._channels.close()
        for carrier in list(self._carriers):
            # This includes a thread that could not be started.
            if carrier.is_alive() and carrier is not threading.current_thread():
                carrier.join(handshake.CLOSE_SECONDS)
