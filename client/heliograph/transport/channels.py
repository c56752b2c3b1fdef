"""gRPC channels with credentials: every connection of a client to a daemon is made here.

A token is passed to gRPC with each call, as metadata: interceptors, and gRPC's own plugins for it,
take longer than a small run. Channels without a token are gRPC's own.

A process that forks keeps its sessions; the child's copies are abandoned. gRPC's core does not
survive a fork once it was used: its threads are not there, so the child opens no connection.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import grpc

from heliograph_proto.addresses import Address, Credentials, check_token
from heliograph_proto.errors import InvalidArgumentError, UnsupportedError

Options: TypeAlias = "Sequence[tuple[str, Any]]"

#: The environment variables for the arguments.
VARIABLES = {
    "token": "HELIOGRAPH_TOKEN",
    "ca": "HELIOGRAPH_CA",
    "certificate": "HELIOGRAPH_CERTIFICATE",
    "key": "HELIOGRAPH_KEY",
}
#: The file that a token is read from, if no variable has it.
TOKEN_FILE_VARIABLE = "HELIOGRAPH_TOKEN_FILE"
NO_CREDENTIALS = Credentials()
_FILES = {"ca": "the authorities", "certificate": "the certificate", "key": "the key"}


class Forked(Protocol):
    """A session, as the child of a fork finds it."""

    def abandon(self) -> None: ...


#: The sessions of this process.
FORKED: weakref.WeakSet[Forked] = weakref.WeakSet()
#: The process that used gRPC first: this one, or one that forked it.
_user: list[int] = []


def _abandon_all() -> None:
    for session in list(FORKED):
        session.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


def _check_fork(address: Address) -> None:
    """Raise UnsupportedError in the child of a fork of a process that used gRPC."""
    if not _user:
        _user.append(os.getpid())
    if _user[0] != os.getpid():
        raise UnsupportedError(
            f"cannot connect to {address}: this process was forked from one that had connected already, and "
            "gRPC does not work in such a child",
            advice="spawn it, multiprocessing.get_context('spawn'), or fork before the first hg.connect",
        )


def credentials_of(
    address: Address,
    token: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> Credentials:
    """Return the credentials for an address.

    They come from the arguments, else the address's own token, else the environment. Raises
    InvalidArgumentError.
    """
    given = {"token": token, "ca": ca, "certificate": certificate, "key": key}
    if address.scheme == "local" and not address.members:
        return _nothing(given)
    for name, value in given.items():
        if value is not None and not isinstance(value, str | os.PathLike):
            raise InvalidArgumentError(
                f"{name} is a {type(value).__name__}", advice=f"{name}='...', a string"
            )
    files = {
        name: str(given[name] if given[name] is not None else os.environ.get(VARIABLES[name], ""))
        for name in _FILES
    }
    found = Credentials(token=_token_of(address, token), in_clear=address.insecure, **files)
    if bool(found.certificate) != bool(found.key):
        raise InvalidArgumentError(
            "a certificate and its key go together",
            advice=f"certificate= and key=, or ${VARIABLES['certificate']} and ${VARIABLES['key']}",
        )
    return found


def _nothing(given: Mapping[str, str | None]) -> Credentials:
    """Return the credentials for this process."""
    if named := [name for name, value in given.items() if value]:
        raise InvalidArgumentError(
            f"{named[0]} is for a server in another process",
            advice="leave it out, or name a server",
        )
    return NO_CREDENTIALS


def _token_of(address: Address, given: str | None) -> str:
    if given is not None:
        return check_token(given, "token") if given else ""
    if address.token:
        return address.token
    if found := os.environ.get(VARIABLES["token"], "").strip():
        return check_token(found, f"${VARIABLES['token']}")
    if path := os.environ.get(TOKEN_FILE_VARIABLE, ""):
        return token_in(path, f"${TOKEN_FILE_VARIABLE}")
    return ""


def token_in(path: str, what: str) -> str:
    """Return the token in a file that has nothing else. Raises InvalidArgumentError."""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InvalidArgumentError(
            f"cannot read {path}, which {what} names: {why}", advice="a file with a token and nothing else"
        ) from None
    return check_token(text, f"the content of {path}")


def credentials_elsewhere(credentials: Credentials, own: Address, other: Address) -> Credentials:
    """Return a session's credentials for a daemon other than its own, which its own daemon named.

    A token that is encrypted on the session's connection is not sent unencrypted elsewhere.
    """
    if other.is_tls or other.is_loopback or (credentials.in_clear and not own.is_tls):
        return credentials
    return replace(credentials, token="")


def open_channel(
    address: Address, options: Options, credentials: Credentials = NO_CREDENTIALS
) -> grpc.Channel:
    """Open a channel for blocking code. Raises InvalidArgumentError for unusable files."""
    _check_fork(address)
    made: grpc.Channel
    if address.is_tls:
        secured, more = _secured(address, credentials)
        made = grpc.secure_channel(address.grpc_target, secured, (*options, *more))
    else:
        _check_clear(address, credentials)
        made = grpc.insecure_channel(address.grpc_target, tuple(options))
    return cast(grpc.Channel, _Channel(made, credentials.metadata)) if credentials.token else made


def open_aio_channel(
    address: Address, options: Options, credentials: Credentials = NO_CREDENTIALS
) -> grpc.aio.Channel:
    """Open a channel for asyncio. Raises InvalidArgumentError for unusable files."""
    _check_fork(address)
    made: grpc.aio.Channel
    if address.is_tls:
        secured, more = _secured(address, credentials)
        made = grpc.aio.secure_channel(address.grpc_target, secured, (*options, *more))
    else:
        _check_clear(address, credentials)
        made = grpc.aio.insecure_channel(address.grpc_target, tuple(options))
    return cast(grpc.aio.Channel, _AioChannel(made, credentials.metadata)) if credentials.token else made


def fetch_pinned(address: Address, credentials: Credentials, seconds: float) -> None:
    """Fetch the certificate of an address with a pin, which channels to it need. Blocks.

    Raises UnavailableError; for other addresses it does nothing.
    """
    if address.pin:
        from heliograph._probe.pins import pinned
        from heliograph.transport.tls import read_pem

        read_pem(credentials)  # which says what is wrong with files
        pinned(address, credentials, seconds)


def _secured(address: Address, credentials: Credentials) -> tuple[grpc.ChannelCredentials, Options]:
    """Return the credentials of a channel, and its further options."""
    from heliograph.transport.tls import read_pem

    ca, certificate, key = read_pem(credentials)
    name = address.tls_name
    if address.pin:
        from heliograph._probe.pins import pinned

        found = pinned(address, credentials)
        ca, name = found.pem, found.name
    options = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.ssl_channel_credentials(ca, key, certificate), options


def _check_clear(address: Address, credentials: Credentials) -> None:
    """Raise InvalidArgumentError for a token that others could read on its way."""
    if credentials.token and not (address.is_loopback or credentials.in_clear):
        raise InvalidArgumentError(
            f"the token would go to {address} unencrypted, where others may read it",
            advice="use grpcs://; or write grpc://HOST:PORT?insecure=yes if the network is trusted",
        )


def _method(made: Any, own: tuple[tuple[str, str], ...]) -> Any:
    """Wrap a callable, and its `future` if it has one, so that calls have additional metadata."""
    call: Any = _with(made, own)
    if hasattr(made, "future"):
        call.future = _with(made.future, own)
    return call


def _with(call: Callable[..., Any], own: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    def calling(*given: Any, metadata: Sequence[tuple[str, str]] | None = None, **named: Any) -> Any:
        return call(*given, metadata=(*own, *metadata) if metadata else own, **named)

    return calling


class _Calls:
    """A channel whose calls have additional metadata."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._made, self._metadata = channel, metadata

    def _bound(self, kind: str) -> Callable[..., Any]:
        make = getattr(self._made, kind)
        return lambda *given, **named: _method(make(*given, **named), self._metadata)

    def __getattr__(self, name: str) -> Any:
        if name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return self._bound(name)
        return getattr(self._made, name)


class _Channel(_Calls):
    """A grpc.Channel with additional metadata."""

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class _AioChannel(_Calls):
    """A grpc.aio.Channel with additional metadata."""

    async def __aenter__(self) -> _AioChannel:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()
