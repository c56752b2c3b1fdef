"""`hg.connect`: opening a session."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from heliograph._base.reopening import Reopening, reopening
from heliograph.core.future import ALONE
from heliograph.core.progress.bars import Progress, ProgressArgument, checked_progress
from heliograph.graph.arguments import connect_seconds
from heliograph.session import Session
from heliograph.transport.blocking import BlockingShell
from heliograph.transport.blocking_grpc import GrpcShell
from heliograph.transport.bulk.link import CompressionArgument
from heliograph.transport.channels import credentials_of
from heliograph.transport.handshake import (
    LEAST_SILENCE_SECONDS,
    MOST_SILENCE_SECONDS,
    SILENCE_SECONDS,
    Wish,
)
from heliograph.transport.plugins import transport
from heliograph.transport.reconnecting import (
    DurableArgument,
    ReconnectArgument,
    checked_wish,
    ends_with_process,
)
from heliograph.transport.shared_memory import SharedMemoryArgument, checked_shared_memory, insisted
from heliograph_proto.addresses import DEFAULT_URL, Address, Credentials, parse_address
from heliograph_proto.errors import InvalidArgumentError

#: The URL of a server, or those of several daemons.
Servers: TypeAlias = str | Sequence[str] | None

#: The environment variable that names the server when no URL is given.
SERVER_VARIABLE = "HELIOGRAPH_SERVER"


def address_of(url: Servers) -> Address:
    """Return the address of a URL, a pool of daemons, $HELIOGRAPH_SERVER, or the default.

    Raises InvalidArgumentError.
    """
    if isinstance(url, Sequence) and not isinstance(url, str):
        return _pool_of(url)
    if url is not None and not isinstance(url, str):
        raise InvalidArgumentError(
            f"a URL is a string, not {type(url).__name__}",
            advice="such as 'grpc://127.0.0.1:7070', 'unix:///path' or 'local:'; or a list of daemons' URLs",
        )
    if url is not None and not url.strip():
        raise InvalidArgumentError(
            "the URL is empty",
            advice=f"name a server, or leave the URL out for ${SERVER_VARIABLE}, else {DEFAULT_URL}",
        )
    return parse_address(url or os.environ.get(SERVER_VARIABLE) or DEFAULT_URL)


def _pool_of(urls: Sequence[str]) -> Address:
    if not urls or not all(isinstance(one, str) for one in urls):
        raise InvalidArgumentError(
            f"{urls!r:.200} is not a list of URLs", advice="one URL, or a list of at least one daemon's"
        )
    found = [parse_address(one) for one in urls]
    for one in found:
        if one.scheme == "local" or one.device:
            raise InvalidArgumentError(
                f"{one} cannot be a member of a pool", advice="a member is a whole daemon: grpc://host:port"
            )
        if one.pin:
            raise InvalidArgumentError(
                f"{one} cannot be a member of a pool by its fingerprint",
                advice="members connect to one another by certificates of an authority: ca=FILE",
            )
        if one.token:
            raise InvalidArgumentError(
                f"all members of a pool get the same token, not one for {one} alone",
                advice="leave it out of the URL, and pass token=... or set $HELIOGRAPH_TOKEN",
            )
    return Address("local", members=tuple(map(str, found)))


def check_silence(seconds: float) -> None:
    """Raise InvalidArgumentError for a silence that cannot be noticed."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not LEAST_SILENCE_SECONDS <= seconds <= MOST_SILENCE_SECONDS:
        raise InvalidArgumentError(
            f"silence_seconds={seconds!r:.40}",
            advice=f"a number from {LEAST_SILENCE_SECONDS:g} to {MOST_SILENCE_SECONDS:g}",
        )


def connect(
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
) -> Session:
    """Open a session on a server.

    Args:
        url: `local:` for this process, `unix:///path`, `grpc://host:port`, or `grpcs://host:port`
            with TLS (`?pin=FINGERPRINT` accepts one certificate alone, as `heliograph serve
            --share` prints it; `grpc://host:port?insecure=yes` lets a token go to another host in
            the clear). URL#device selects a device. `local:#cpu:threads=2` gives the session
            devices of its own, as `serve --device` does. A list of daemons' URLs makes this process
            the head of a pool: one list of their devices, named HOST/DEVICE, for graphs that run on
            several of them. At least one daemon must answer within `timeout`; the others join
            later, and devices come and go (`session.watch()`). All get the same credentials, which
            need the right "pool" there. Default: $HELIOGRAPH_SERVER, else grpc://127.0.0.1:7070.
        timeout: Seconds to wait for the server, or None for no limit.
        progress: A function of (bytes done, total bytes), called from any thread while weights are
            uploaded. "auto" shows bars for what takes more than a second, in notebooks, and on
            stderr if it is a terminal and rich is installed. None is silent.
        shared_memory: Whether tensors go through memory that both sides map, and commands over a
            unix socket. "auto": if both prove to be of one host and user. True insists on it.
        token: The token for a server that requires one. Default: the one in the URL
            (URL?token=TOKEN), else $HELIOGRAPH_TOKEN, else the file $HELIOGRAPH_TOKEN_FILE.
        ca, certificate, key: PEM files with the authorities of TLS, the client's certificate and
            its key (default: $HELIOGRAPH_CA, else the system's; $HELIOGRAPH_CERTIFICATE; _KEY).
        silence_seconds: The server counts as gone after this much silence, 0.25 to 3600 s.
        direct: Whether TCP connections beside gRPC's are used where the server offers them.
        compression: Whether large tensors and weights are compressed on their way. "auto": where
            the link is so slow that it pays. "on": whatever gets smaller.
        reconnect: Whether it connects again after a break; a number: for so many seconds at most.
        durable: Whether it outlives a daemon with `--state` (`Session.snapshot`); a number: the
            seconds between snapshots.

    Raises UnavailableError if no server answers within `timeout` seconds, if it is still starting
    then, if its certificate is not trusted, or if required shared memory is missing;
    UnauthenticatedError; NotHeliographError; UnsupportedError without `--state`;
    InvalidArgumentError, VersionMismatchError, DrainingError and LimitExceededError.
    """
    address, seconds = address_of(url), connect_seconds(timeout)
    check_silence(silence_seconds)
    shown, sharing = checked_progress(progress), checked_shared_memory(shared_memory)
    credentials, wish = credentials_of(address, token, ca, certificate, key), checked_wish(reconnect, durable)
    if address.scheme == "local":
        return _session(_local(address, seconds, credentials, sharing, wish), shown)
    how = (sharing, silence_seconds, credentials, direct, compression, wish)
    return _opened(address, how, shown, reconnect, seconds)


def _opened(
    address: Address, how: Any, progress: Progress | None, reconnect: ReconnectArgument, seconds: float
) -> Session:
    """Open a session at a daemon; `how` are the further arguments of the shell."""
    again = reopening(reconnect, partial(_opened, address, how, progress, reconnect))
    return _session(GrpcShell(address, seconds, *how), progress, again)


def _local(
    address: Address, seconds: float, credentials: Credentials, sharing: SharedMemoryArgument, wish: Wish
) -> BlockingShell:
    if wish.is_durable:
        raise ends_with_process()
    if sharing is True:
        raise insisted(address, ALONE)
    shell: BlockingShell = transport("local")(address, seconds, credentials)
    return shell


def _session(shell: BlockingShell, progress: Progress | None, reopening: Reopening | None = None) -> Session:
    try:
        return Session(shell, progress, reopening)
    except BaseException:
        shell.close()
        raise
