"""`hg.connect`: how a session is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

from heliograph.core.future import ALONE
from heliograph.core.progress import ProgressArgument, checked_progress
from heliograph.graph.arguments import timeout_ms
from heliograph.session import Session
from heliograph.transport.blocking import BlockingShell, GrpcShell
from heliograph.transport.channels import credentials_of
from heliograph.transport.plugins import transport
from heliograph.transport.shared_memory import SharedMemoryArgument, checked_shared_memory, insisted
from heliograph_proto.addresses import DEFAULT_URL, Address, parse_address
from heliograph_proto.errors import InvalidArgumentError

#: What names a server, or several daemons.
Servers: TypeAlias = str | Sequence[str] | None

#: The environment variable that names the server when no URL is given.
SERVER_VARIABLE = "HELIOGRAPH_SERVER"


def address_of(url: Servers) -> Address:
    """The address of a URL, of a pool of several, of $HELIOGRAPH_SERVER, or the default. Raises
    InvalidArgumentError."""
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
    """The address of a pool in this process. Raises InvalidArgumentError."""
    if not urls or not all(isinstance(one, str) for one in urls):
        raise InvalidArgumentError(
            f"{urls!r:.200} is no list of URLs", advice="one URL, or a list of at least one daemon's"
        )
    found = [parse_address(one) for one in urls]
    for one in found:
        if one.scheme == "local" or one.device:
            raise InvalidArgumentError(
                f"{one} cannot be a member of a pool", advice="a member is a whole daemon: grpc://host:port"
            )
        if one.token:
            raise InvalidArgumentError(
                f"a pool's members are shown one token, not one for {one} alone",
                advice="leave it out of the URL, and say token=..., or set $HELIOGRAPH_TOKEN",
            )
    return Address("local", members=tuple(map(str, found)))


def connect(
    url: Servers = None,
    *,
    timeout: float = 10.0,
    progress: ProgressArgument = "auto",
    shared_memory: SharedMemoryArgument = "auto",
    token: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> Session:
    """Opens a session on a server: local:, unix:///path, grpc://host:port, or grpcs://host:port with TLS;
    URL#device names a device.

    Of a list of daemons' URLs this process makes a pool: one list of their devices, named HOST/DEVICE, for
    graphs that run on several of them. At least one must answer within `timeout`; the others join when they
    do, and devices come and go (`session.watch()`).

    `local:` is this process; local:#cpu:threads=2 gives it devices of their own, as `serve --device` does.
    Without a URL: $HELIOGRAPH_SERVER, else grpc://127.0.0.1:7070. `progress` is called, from any thread,
    with (bytes done, bytes in all) while weights are uploaded; "auto" shows bars on stderr for uploads above
    a second, also of tensors, if it is a terminal and rich is installed; None is silent. `shared_memory`:
    "auto" lets tensors go through memory that both sides map, where both prove that they are on one host and
    of one user; True insists on it, False never does.

    `token` is shown to a server that asks for one, by default the URL's own (URL?token=TOKEN, as `heliograph
    serve` prints it), else $HELIOGRAPH_TOKEN, else what is in the file $HELIOGRAPH_TOKEN_FILE. Over TLS, `ca`
    is a PEM file of authorities that vouch for servers ($HELIOGRAPH_CA, else the system's); `certificate` and
    `key` are PEM files to show to servers that ask for them ($HELIOGRAPH_CERTIFICATE and $HELIOGRAPH_KEY).
    All members of a pool are shown the same, which must have the right "pool" there.

    Raises UnavailableError when nobody answers within `timeout` seconds, or a server that answers is still
    starting its devices then, or its certificate is not to be trusted, or where shared memory is insisted on
    and there is none; UnauthenticatedError when the server does not know who asks; NotHeliographError when
    something else answers, VersionMismatchError, DrainingError, LimitExceededError.
    """
    address = address_of(url)
    timeout_ms(timeout)
    shown, wanted = checked_progress(progress), checked_shared_memory(shared_memory)
    credentials = credentials_of(address, token, ca, certificate, key)
    shell: BlockingShell
    if address.scheme == "local":
        if wanted is True:
            raise insisted(address, ALONE)
        shell = transport("local")(address, timeout, credentials)
    else:
        shell = GrpcShell(address, timeout, wanted, None, credentials)
    try:
        return Session(shell, shown)
    except BaseException:
        shell.close()
        raise
