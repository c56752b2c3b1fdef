"""The asyncio shell over the core in this process."""

# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from heliograph.aio import Session
from heliograph.core.effects import Call, ReceiveDownload, StartUpload
from heliograph.core.future import Deadline, Transfer
from heliograph.core.interrupts import runs_handlers, undisturbed
from heliograph.transport.aio import AioShell, AsyncLogSource
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph.transport.log_lines import Follower
from heliograph_proto.addresses import Address, Credentials, parse_address
from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_proto.sessions import LogLine, after_dropped
from heliograph_server.resources.failures import typed

if TYPE_CHECKING:
    from heliograph_server.resources.principals import Principal
    from heliograph_server.runtime.host import Host


class AioLocalShell(AioShell):
    """A session of the core in this process."""

    def __init__(self, address: Address, transport: Any) -> None:
        self._transport = transport
        self._logs: weakref.WeakSet[_LocalLog] = weakref.WeakSet()
        super().__init__(address, transport.info)
        self._scheduled = False
        #: True while a caller sends that waits for its run.
        self.waits: bool = False
        # The core may outlive this shell, and must not keep it alive.
        me = weakref.ref(self)
        transport.session.attach(
            lambda batch: _post(me, "apply", batch),
            lambda error: _post(me, "_lose", error),
            at_once=lambda: _may_run(me()),
        )
        self.core.speaks_bytes = True

    @classmethod
    async def open(
        cls, address: Address, timeout: float, credentials: Credentials = NO_CREDENTIALS
    ) -> AioLocalShell:
        """Open a session. The first one starts the devices of this process."""
        from heliograph_server.inprocess.blocking import LocalTransport

        return cls(address, await asyncio.to_thread(LocalTransport.open, address, timeout, credentials))

    def _ring(self) -> None:
        """Send at the end of this turn of the loop, so that commands go together."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._send)

    def flush(self) -> None:
        """Send at once, since a caller waits: a short run is done then."""
        self.waits = True
        try:
            self._send()
        finally:
            self.waits = False

    def _send(self) -> None:
        undisturbed(self._send_all)

    def _send_all(self) -> None:
        self._scheduled = False
        while commands := self.core.take(self.info.limits.message_bytes):
            try:
                self._transport.session.submit(commands)
            except Exception as error:
                self._lose(typed(error, "sending commands"))

    async def _call(self, call: Call, deadline: Deadline) -> Any:
        work = asyncio.ensure_future(asyncio.to_thread(self._transport.call, call))
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await asyncio.shield(work)
        except TimeoutError:
            work.add_done_callback(lambda done: self._undo(call, done))
            raise deadline.error() from None
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: self._undo(call, done))
            raise

    def _undo(self, call: Call, work: asyncio.Future[Any]) -> None:
        if not work.cancelled() and work.exception() is None:
            self._transport.undo(call)

    async def follow_log(self, level: str) -> AsyncLogSource:
        self.core.check()
        made = _LocalLog(self, partial(self._transport.follow_log, level))
        self._logs.add(made)
        return made

    def _lose(self, error: HeliographError) -> bool:
        was_open = super()._lose(error)
        for one in tuple(self._logs):
            one.close()
        return was_open

    def _start_upload(self, upload: StartUpload) -> Transfer:
        transfer = Transfer(lambda: None)
        self.spawn(self._upload(upload, transfer))
        return transfer

    async def _upload(self, upload: StartUpload, transfer: Transfer) -> None:
        error: HeliographError | None = CancelledError("the upload was cancelled")
        try:
            await asyncio.to_thread(self._transport.upload, upload)
            error = None
        except HeliographError as refused:
            error = refused
        finally:
            self.upload_ended(upload, transfer, error)

    async def _download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        self.core.count(await asyncio.to_thread(self._transport.download, download, deadline))

    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        found: tuple[Any, int] = self._transport.map_memory(tensor)
        return found

    async def _disconnect(self, was_open: bool) -> None:
        await asyncio.to_thread(self._transport.close)


async def session_on(host: Host, client: str, principal: Principal, secret: bytes) -> Session:
    """Open a session of the asyncio client on a host of this process, on the running event loop.

    As `heliograph_server.inprocess.blocking.session_on`.
    """
    from heliograph_server.inprocess.blocking import LocalTransport

    opening = partial(host.open_session, client, secret=secret, principal=principal)
    info = await asyncio.to_thread(opening)
    return Session(AioLocalShell(parse_address("local:"), LocalTransport(host, info)))


class _LocalLog:
    """The log of a session in this process."""

    def __init__(self, shell: AioLocalShell, follow: Callable[[Callable[[], None]], Follower]) -> None:
        woken = self._woken = asyncio.Event()
        self._is_over = False
        on_loop = shell.on_loop
        self._follower = follow(lambda: on_loop(woken.set))

    async def take(self) -> list[LogLine] | None:
        await self._woken.wait()
        if not self._is_over:
            self._woken.clear()
        lines, dropped = self._follower.take()
        return None if self._is_over and not lines else after_dropped(lines, dropped)

    def close(self) -> None:
        self._is_over = True
        self._follower.close()
        self._woken.set()


def _may_run(shell: AioLocalShell | None) -> bool:
    # Nothing interrupts the loop's thread while it sends, but handlers of the program's own.
    return shell is not None and shell.waits and not runs_handlers()


def _post(shell: weakref.ref[AioLocalShell], method: str, argument: Any) -> None:
    """Call a method on the loop, from the thread of a device."""
    found = shell()
    if found is not None:
        found.on_loop(getattr(found, method), argument)
