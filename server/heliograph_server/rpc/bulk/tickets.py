"""Uploads of contents by ticket.

One caller announces contents, and follows their progress. Others upload the bytes with its tickets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from heliograph_backends.contract import UploadNews
from heliograph_proto.codec import encode_error
from heliograph_proto.errors import ProtocolError
from heliograph_proto.v1 import bulk_pb2
from heliograph_server.resources.principals import current_principal
from heliograph_server.rpc.receiving import abort, begun, decoded, first_of, next_piece, receive
from heliograph_server.rpc.requests import Context, takes_bytes
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.runtime.upload_tickets import Announced, given_up


class TicketCalls:
    """Two calls of BulkService. Work on devices uses the threads of `workers`."""

    def __init__(self, slot: HostSlot, workers: Executor) -> None:
        self._slot = slot
        self._workers = workers

    async def Admit(self, request: bulk_pb2.AdmitRequest, context: Context) -> None:
        host = self._slot.host
        session = self._slot.session(request.session)
        announced = [Announced(one.tensor, one.size_bytes, one.digest) for one in request.contents]
        news: asyncio.Queue[tuple[int, UploadNews]] = asyncio.Queue()
        notify = partial(_notify, asyncio.get_running_loop(), news)
        # On a thread, since there may be many contents, with a handle to look up for each.
        admitting = self._on_thread(host.admissions.admit, session, announced, notify)
        try:
            made = await asyncio.shield(admitting)
        except asyncio.CancelledError:
            # The client that announced them has left, and no other received the tickets.
            admitting.add_done_callback(self._undo)
            raise
        try:
            await context.write(bulk_pb2.AdmitResponse(tickets=[one.ticket for one in made]))
            left = len(made)
            while left:
                place, what = await news.get()
                left -= what.is_over
                await context.write(_encode_news(place, what))
        finally:
            await asyncio.shield(self._on_thread(_end_all, made))

    def _undo(self, admitting: asyncio.Future[Any]) -> None:
        if not admitting.cancelled() and admitting.exception() is None:
            self._workers.submit(_end_all, admitting.result())

    def _on_thread(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    @takes_bytes
    async def UploadAdmitted(self, requests: AsyncIterator[bytes], context: Context) -> None:
        host = self._slot.host
        first = decoded(await first_of(anext(requests, None)))
        target = bulk_pb2.UploadTarget.FromString((first and first.target) or b"")
        if first is None or first.data.nbytes or target.WhichOneof("target") != "ticket":
            raise ProtocolError("the first message of an upload by ticket has a ticket, and no bytes")
        admission = host.admissions.find(target.ticket, current_principal())
        if target.size_bytes != admission.size_bytes:
            raise ProtocolError(f"{target.size_bytes} bytes, where {admission.size_bytes} were announced")
        # No other upload of the content is open then.
        upload = await begun(admission.begin())
        try:
            limits = admission.session.limits
            await context.write(
                bulk_pb2.UploadAdmittedResponse(
                    incarnation=host.incarnation,
                    received_bytes=upload.received_bytes,
                    chunk_bytes=limits.chunk_bytes,
                )
            )
            second = decoded(await next_piece(requests, limits))
            if second is not None:
                await receive(limits, upload, second, requests, self._workers)
            received = await self._on_thread(upload.finish)
            await context.write(bulk_pb2.UploadAdmittedResponse(received_bytes=received))
        except BaseException:
            await abort(self._workers, upload)
            raise


def _end_all(made: Sequence[Any]) -> None:
    for one in made:
        one.end(given_up())


def _notify(
    loop: asyncio.AbstractEventLoop, news: asyncio.Queue[tuple[int, UploadNews]], place: int, what: UploadNews
) -> None:
    try:
        loop.call_soon_threadsafe(news.put_nowait, (place, what))
    except RuntimeError:
        pass  # the server has ended


def _encode_news(place: int, what: UploadNews) -> bulk_pb2.AdmitResponse:
    error = encode_error(what.error) if what.error is not None else None
    return bulk_pb2.AdmitResponse(
        content=place, received_bytes=what.received_bytes, is_over=what.is_over, error=error
    )
