"""`hg.aio.connect`: opening a session."""

# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from heliograph._base.reopening import reopening
from heliograph.aio.session import Session
from heliograph.connection import Servers, address_of, check_silence
from heliograph.core.future import ALONE
from heliograph.core.progress.bars import Progress, ProgressArgument, checked_progress
from heliograph.graph.arguments import connect_seconds
from heliograph.transport.aio import AioShell
from heliograph.transport.aio_grpc import AioGrpcShell
from heliograph.transport.bulk.link import CompressionArgument, check_compression
from heliograph.transport.channels import NO_CREDENTIALS, credentials_of
from heliograph.transport.handshake import NO_WISH, SILENCE_SECONDS, Wish
from heliograph.transport.plugins import transport
from heliograph.transport.reconnecting import (
    DurableArgument,
    ReconnectArgument,
    checked_wish,
    ends_with_process,
)
from heliograph.transport.shared_memory import SharedMemoryArgument, checked_shared_memory, insisted
from heliograph_proto.addresses import Address, Credentials


class connect:
    """Open a session: `async with hg.aio.connect(url) as session`, or `session = await
    hg.aio.connect(url)`.

    Arguments and errors are those of `hg.connect`.
    """

    def __init__(
        self,
        url: Servers = None,
        *,
        timeout: float | None = 10.0,
        progress: ProgressArgument = "auto",
        shared_memory: SharedMemoryArgument = "auto",
        token: str | None = None,
        ca: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        direct: bool = True,
        compression: CompressionArgument = "auto",
        reconnect: ReconnectArgument = True,
        durable: DurableArgument = False,
    ) -> None:
        self._wish = checked_wish(reconnect, durable)
        self._reconnect = reconnect
        self._direct, self._compression = direct, check_compression(compression)
        self._address = address_of(url)
        self._credentials = credentials_of(self._address, token, ca, certificate, key)
        check_silence(silence_seconds)
        self._silence_seconds = silence_seconds
        self._timeout, self._progress = connect_seconds(timeout), checked_progress(progress)
        self._shared_memory = checked_shared_memory(shared_memory)
        self._session: Session | None = None

    def __await__(self) -> Generator[Any, Any, Session]:
        return self._open().__await__()

    if not TYPE_CHECKING:  # to checkers there are no such attributes

        def __getattr__(self, name: str) -> NoReturn:
            # Forgetting `await` is the usual first mistake under asyncio, and Python's own error
            # would name the class `connect`.
            raise AttributeError(
                f"no session is open yet, so there is no {name!r}: "
                "`async with hg.aio.connect(url) as session`, or `session = await hg.aio.connect(url)`"
            )

    async def __aenter__(self) -> Session:
        self._session = await self._open()
        return self._session

    async def __aexit__(self, *details: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> Session:
        how = (
            self._shared_memory,
            self._silence_seconds,
            self._credentials,
            self._direct,
            self._compression,
            self._wish,
        )
        return await _opened(self._address, how, self._progress, self._reconnect, self._timeout)


async def _opened(
    address: Address, how: Any, progress: Progress | None, reconnect: ReconnectArgument, seconds: float
) -> Session:
    """Open a session; `how` are the further arguments of `open_shell`."""
    shell = await open_shell(address, seconds, *how)
    again = None
    if address.scheme != "local":
        again = reopening(reconnect, partial(_opened, address, how, progress, reconnect))
    try:
        return Session(shell, progress, again)
    except BaseException:
        await shell.close()
        raise


async def open_shell(
    address: Address,
    timeout: float,
    shared_memory: SharedMemoryArgument = "auto",
    silence_seconds: float = SILENCE_SECONDS,
    credentials: Credentials = NO_CREDENTIALS,
    direct: bool = True,
    compression: CompressionArgument = "auto",
    wish: Wish = NO_WISH,
) -> AioShell:
    """Open the connection of a session."""
    if address.scheme == "local":
        if wish.is_durable:
            raise ends_with_process()
        if shared_memory is True:
            raise insisted(address, ALONE)
        shell: AioShell = await transport("local.aio")(address, timeout, credentials)
        return shell
    return await AioGrpcShell.open(
        address, timeout, shared_memory, silence_seconds, credentials, direct, compression, wish
    )
