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
    ADMIT_SECONDS,
    PATIENCE_SECONDS,
    Announcement,
    Channels,
    DirectUpload,
    Tell,
    TicketUpload,
)
from heliograph.transport.channels import open_channel
from heliograph.transport.direct.transfers import NO_LIMIT, Arrived, Connection, DirectTransfers
from heliograph.transport.reconnecting import Tries, is_cut, kept, question, rest_of
from heliograph.transport.shared_memory import SharedUpload, cut_short, take_slots
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import ContentOffer
from heliograph_proto.sessions import Traffic
from heliograph_proto.v1 import bulk_pb2

if TYPE_CHECKING:
    from heliograph.transport.blocking_grpc import GrpcShell


class _Calls:
    """The calls and connections of a download. Each is cancelled, also one that is made later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[Any] = []
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """True once they were cancelled."""
        return self._is_cancelled

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
        if self._core.has_lease:
            calls = _Calls()
            transfer = Transfer(calls.cancel)
            keep_sending = partial(self._keep_sending, kept(upload), calls)
            self._start_carrier("heliograph-upload", upload, transfer, keep_sending)
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

    # Uploads that go on after a break

    def _keep_sending(self, upload: StartUpload, calls: _Calls) -> None:
        """Send bytes, and what the server lacks of them after each break."""
        rest: StartUpload | None = upload
        tries = Tries()
        while rest is not None:
            link, session = self._shell.link, self._info.session
            try:
                return self._send(rest, calls)
            except Exception as broken:
                error = handshake.upload_error(broken, self._address)
                # A daemon that the session has left, or not reached yet, does not know its secret.
                is_elsewhere = self._info.session != session
                may_go_on = (is_cut(broken) or is_elsewhere) and not calls.is_cancelled
                pause = tries.again(link) if may_go_on else None
            if pause is None:
                raise error
            time.sleep(pause)
            self._shell.await_up(NO_LIMIT, lambda: calls.is_cancelled)
            if upload.pending is not None and upload.pending.done:
                return
            rest = rest_of(rest, self._shell.call(question(rest), NO_LIMIT))

    def _send(self, upload: StartUpload, calls: _Calls) -> None:
        """Send bytes by the best way there is. `calls` gets the call, for a cancel."""
        if isinstance(upload.target, bytes) and (shared := self._shared_upload(upload)):
            requests: SimpleQueue[bytes | None] = SimpleQueue()
            method: Any = self._channel.stream_stream(handshake.UPLOAD_SHARED, None, None)
            call = method(iter(requests.get, None))
            calls.add(call)
            return self._send_shared(shared, call, requests)
        is_elsewhere = isinstance(upload.target, bytes) and self._core.places_contents
        if not is_elsewhere and (connection := self._direct.take()) is not None:
            calls.add(connection)
            return self._direct.upload(connection, upload, lambda: None)
        method = self._channel.stream_unary(handshake.UPLOAD, None, bulk_pb2.UploadResponse.FromString)
        raised: list[HeliographError] = []
        call = method.future(_noting(self._chunks(upload, Transfer(lambda: None)), raised))
        calls.add(call)
        if (status := call.exception()) is not None:
            raise next(iter(raised), status)

    def _start_call(self, upload: StartUpload) -> Transfer:
        method: Any = self._channel.stream_unary(handshake.UPLOAD, None, bulk_pb2.UploadResponse.FromString)
        call: Any = None
        raised: list[HeliographError] = []
        transfer = Transfer(lambda: call.cancel())
        call = method.future(_noting(self._chunks(upload, transfer), raised))
        call.add_done_callback(lambda _: self._upload_ended(upload, transfer, call, raised))
        return transfer

    def _chunks(self, upload: StartUpload, transfer: Transfer) -> Iterator[bytes]:
        target = messages.upload_target(self._info.session, upload.target, upload.data.nbytes, upload.attempt)
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

    def _upload_ended(
        self, upload: StartUpload, transfer: Transfer, call: Any, raised: Sequence[HeliographError]
    ) -> None:
        status = call.exception() if not call.cancelled() else call
        error = None if status is None else next(iter(raised), None)
        if status is not None and error is None:
            error = handshake.typed_error(status, self._address, handshake.TAKE_AN_UPLOAD)
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

        Raises the errors of BulkService.Admit. Waits for a connection, and announces again if it
        breaks meanwhile.
        """
        admitted = [
            bulk_pb2.AdmittedContent(digest=digest, tensor=tensor, size_bytes=size_bytes)
            for digest, tensor, size_bytes in contents
        ]
        deadline, tries = Deadline(ADMIT_SECONDS + self._info.lease_seconds, "announcing contents"), Tries()
        while True:
            self._shell.await_up(deadline)
            link = self._shell.link
            try:
                return Announcement(self._channel, self._address, self._info.session, admitted, tell)
            except (HeliographError, ValueError) as error:
                pause = tries.again(link) if is_cut(error) and self._core.has_lease else None
                if pause is None:
                    raise
            time.sleep(pause)

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
        """Receive bytes, and go on after each break.

        `calls` gets the calls, for a cancel by another thread.
        """
        arrived, tries = Arrived(), Tries()
        while True:
            link, session = self._shell.link, self._info.session
            try:
                self._receive_rest(download, deadline, calls, arrived)
                return
            except (grpc.RpcError, HeliographError, ValueError) as error:
                is_elsewhere = self._info.session != session
                cut = (is_cut(error) or is_elsewhere) and self._core.has_lease and not calls.is_cancelled
                if isinstance(error, grpc.RpcError):
                    broken = handshake.typed_error(error, self._address, "send a tensor's bytes")
                elif isinstance(error, HeliographError):
                    broken = error
                else:
                    broken = handshake.broken(self._address, "its channel was closed")
            self._shell.advance(self._core.check)
            pause = tries.again(link) if cut else None
            if pause is None:
                raise broken
            time.sleep(pause)
            self._shell.await_up(deadline, lambda: calls.is_cancelled)
            arrived.tries += 1

    def _receive_rest(
        self, download: ReceiveDownload, deadline: Deadline, calls: _Calls, arrived: Arrived
    ) -> None:
        if (connection := self._direct.take()) is not None:
            calls.add(connection)
            self._direct.download(connection, download.transfer, download.out, deadline, arrived)
            return
        method: Any = self._channel.unary_stream(handshake.DOWNLOAD, None, None)
        request = self._link.download_request(self._info.session, download.transfer, download.out.nbytes)
        request.offset_bytes, request.resume = arrived.count, arrived.tries > 0
        call = method(request.SerializeToString(), timeout=deadline.remaining())
        calls.add(call)
        receiver = messages.Receiver(download.out, request.encodings, arrived.count)
        meter = self._link.receiving(is_packed=bool(request.encodings))
        try:
            for message in call:
                receiver.piece(message)
                arrived.count = receiver.received_bytes
                meter.came(receiver.came_bytes)
            receiver.finish()
            copied = Traffic(copied_out_bytes=receiver.copied_bytes)
            self._shell.advance(lambda: self._core.count(copied))
        finally:
            call.cancel()

    def _follow(self) -> None:
        """Go on with the daemon that has the session now."""
        self._info, self._address = self._shell.info, self._shell.address
        self._direct.close()
        self._link = Link(self._address, self._info, self._shell.compression)
        self._direct = DirectTransfers(self._address, self._info, self._shell.tcp_silence_seconds, self._link)
        self._channels.close()
        self._channels = Channels(self._address, self._shell.credentials)

    def renew(self) -> None:
        """End all calls, since the session's connection broke, and go on over other connections."""
        shell, before = self._shell, self._channel
        self._channel = open_channel(shell.address, shell.channel_options, shell.credentials)
        if (self._info.session, self._info.direct) != (shell.info.session, shell.info.direct):
            self._follow()
        before.close()
        self._direct.renew()

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


def _noting(messages: Iterator[bytes], raised: list[HeliographError]) -> Iterator[bytes]:
    """Yield messages, and note the error that ends them: gRPC does not say what ended its requests."""
    try:
        yield from messages
    except HeliographError as error:
        raised.append(error)
        raise
