"""URLs of daemons: `local:`, `unix:///path` (or gRPC's `unix:/path`), `grpc://host:port` (or `host:port`), or
`grpcs://host:port` with TLS.

`grpcs://host:port?tls_name=NAME` expects a certificate for another name than the host's. `?token=TOKEN` is
what to show there, as `heliograph serve` prints it; it is not part of what is shown, compared or logged.

`URL#cpu0` names a device. `local:#cpu:threads=2` starts one, and `local:#fake` one without parameters: behind
`local:` a fragment that has a colon, or does not end in a digit, is a specification.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from heliograph_proto.errors import InvalidArgumentError

#: The metadata in which a token goes with every call, and what stands before it there.
TOKEN_KEY = "authorization"
BEARER = "Bearer "
#: The most characters of a token. Those that Heliograph makes have 47.
MAX_TOKEN = 512


@dataclass(frozen=True, slots=True)
class Credentials:
    """A token, and PEM files; all of them may be empty.

    `ca` are the authorities that vouch for daemons (those of the system if empty); `certificate` and `key`
    are shown to daemons that ask for them. The three matter for grpcs:// alone.
    """

    token: str = field(default="", repr=False)
    ca: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return ((TOKEN_KEY, f"{BEARER}{self.token}"),) if self.token else ()


#: Told the address of a daemon whenever a connection with it is made, since tokens change.
Shown: TypeAlias = Callable[[str], Credentials]


def nothing_shown(address: str) -> Credentials:
    """For daemons that ask nobody who they are."""
    return Credentials()


def check_token(token: str, what: str = "the token") -> str:
    """The token, if it can be one. Raises InvalidArgumentError, which does not repeat it."""
    if not isinstance(token, str) or not 0 < len(token) <= MAX_TOKEN:
        raise InvalidArgumentError(
            f"{what} is none",
            advice=f"it is a text of 1 to {MAX_TOKEN} characters, as `heliograph token new` says",
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidArgumentError(f"{what} has characters in it that no token has", advice="copy it anew")
    return token


Scheme: TypeAlias = Literal["local", "unix", "grpc", "grpcs"]

DEFAULT_PORT = 7070
DEFAULT_URL = f"grpc://127.0.0.1:{DEFAULT_PORT}"
#: The kernel's sockaddr_un holds so many bytes, and a terminator.
MAX_SOCKET_PATH = 107
_NOT_IN_HOSTS = frozenset(" ,@=\\\"'<>")
ADVICE = "use local:, unix:///path/to/socket, grpc://host:port, or grpcs://host:port"
#: A token in what may be a URL, where it belongs or not: never repeated in an error.
_TOKEN = re.compile(r"(token=)[^&#]*|(hgt_)[\w-]*|(://)[^/?#]*(?=@)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon is."""

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""
    #: The device that `URL#device` names; empty if none.
    device: str = ""
    #: The device that `local:#SPECIFICATION` starts; empty if none.
    specification: str = ""
    #: URLs of the daemons whose pool is in this process; none elsewhere.
    members: tuple[str, ...] = ()
    #: The name that the certificate of a grpcs:// daemon is for; empty: the host's.
    tls_name: str = ""
    #: What the URL said to show there; empty if nothing.
    token: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        if self.members:
            return ",".join(self.members)
        fragment = self.specification or self.device
        device = f"#{fragment}" if fragment else ""
        match self.scheme:
            case "local":
                return f"local:{device}"
            case "unix":
                return f"unix://{self.path}{device}"
        query = f"?tls_name={quote(self.tls_name)}" if self.tls_name else ""
        return f"{self.scheme}://{self.host_port}{query}{device}"

    @property
    def is_tls(self) -> bool:
        """Whether what goes there is encrypted, and the daemon proves who it is."""
        return self.scheme == "grpcs"

    @property
    def host_port(self) -> str:
        """HOST:PORT, as URLs write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def grpc_target(self) -> str:
        """What gRPC calls it. An address that is numeric skips name resolution."""
        if self.scheme == "unix":
            return f"unix:{self.path}"
        try:
            version = ipaddress.ip_address(self.host).version
        except ValueError:
            return f"dns:{self.host_port}"
        return f"ipv{version}:{self.host_port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.scheme in ("local", "unix") or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(url: str) -> Address:
    """The address that a URL names. Raises InvalidArgumentError."""
    if not url.strip().isprintable():
        shown = without_token(url)[:200]
        raise InvalidArgumentError(f"bad address {shown!r}: what is no character is in it", advice=ADVICE)
    try:
        return _parsed(url)
    except InvalidArgumentError:
        raise
    except ValueError as error:
        # As urlsplit says that brackets or letters are no part of a host.
        shown = without_token(url)[:200]
        raise InvalidArgumentError(f"bad address {shown!r}: {error}", advice=ADVICE) from None


def without_token(text: str) -> str:
    """A text that may be, or have in it, a URL, fit to be shown."""
    return _TOKEN.sub(lambda found: f"{found[found.lastindex or 0]}...", text)


def _parsed(url: str) -> Address:
    url, _, device = url.strip().partition("#")
    if "?token=" in device:
        raise InvalidArgumentError("a token is behind the device", advice="URL?token=TOKEN#DEVICE")
    if url.rstrip("/") in ("local:", "local"):
        return _local(device)
    if "=" in device.partition(":")[2]:
        shown = without_token(device)
        advice = f"a device of its own comes with local:, or start the daemon with --device {shown}"
        raise InvalidArgumentError(f"{shown!r} is no device of a daemon", advice=advice)
    if url.startswith("unix:") and not url.startswith("unix://"):
        # As gRPC writes it.
        return _unix(url.removeprefix("unix:"), device)
    if "://" not in url:
        url = f"grpc://{url}"
    parts = _split(url)
    if parts.scheme == "unix":
        query = f"?{parts.query}" if parts.query else ""
        return _unix(parts.netloc + parts.path + query, device)
    if parts.scheme not in ("grpc", "grpcs"):
        raise InvalidArgumentError(
            f"unknown scheme {parts.scheme!r} in {without_token(url)!r}", advice=ADVICE
        )
    return _grpc(url, "grpcs" if parts.scheme == "grpcs" else "grpc", device)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidArgumentError(f"bad address {without_token(url)!r}: {error}", advice=ADVICE) from None


def _local(fragment: str) -> Address:
    if ":" in fragment or not fragment[-1:].isdecimal():
        return Address("local", specification=fragment)
    return Address("local", device=fragment)


def _unix(quoted: str, device: str) -> Address:
    quoted, has_token, query = quoted.partition("?token=")
    token = _asked(f"token={query}").get("token", "") if has_token else ""
    path = unquote(quoted)
    if not path.startswith("/"):
        raise InvalidArgumentError("a unix address needs an absolute path", advice=ADVICE)
    if not path.isprintable():
        raise InvalidArgumentError(f"the socket path {path[:200]!r} is none", advice=ADVICE)
    if len(path.encode()) > MAX_SOCKET_PATH:
        raise InvalidArgumentError(
            f"the socket path has {len(path.encode())} bytes; at most {MAX_SOCKET_PATH} fit"
        )
    return Address("unix", path=path, device=device, token=token)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _asked(query: str) -> dict[str, str]:
    """What the query of a URL says. Raises InvalidArgumentError, without repeating a token."""
    found: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in ("tls_name", "token"):
            raise InvalidArgumentError(
                f"an address has no {without_token(key)[:80]!r}",
                advice="behind ? there is tls_name=NAME, for grpcs://, and token=TOKEN",
            )
        if key in found or not value:
            raise InvalidArgumentError(f"{key} is in the address twice, or empty", advice=f"{key}=... once")
        found[key] = value
    if "token" in found:
        check_token(found["token"], "the token in the address")
    return found


def _grpc(url: str, scheme: Literal["grpc", "grpcs"], device: str) -> Address:
    parts, shown = _split(url), without_token(url)
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise InvalidArgumentError(
            f"bad address {shown!r}: a port is a number from 0 to 65535", advice=_port_advice(shown)
        ) from None
    if not host or parts.path.strip("/") or parts.username:
        raise InvalidArgumentError(f"bad address {shown!r}: a host is needed, no path", advice=ADVICE)
    if host.isdecimal():
        # To the resolver it is an IPv4 address in one number, which nobody writes.
        raise InvalidArgumentError(
            f"bad address {shown!r}: {host} is no host",
            advice=f"127.0.0.1:{host}, if it is a port of this host",
        )
    asked = _asked(parts.query)
    _check_host(host, is_bracketed=parts.netloc.startswith("["), shown=shown)
    tls_name = asked.get("tls_name", "")
    if tls_name:
        _check_host(tls_name, is_bracketed=False, shown=shown)
    if tls_name and scheme != "grpcs":
        raise InvalidArgumentError(
            f"bad address {shown!r}: tls_name is of grpcs://", advice=f"grpcs://{host}:{port or DEFAULT_PORT}"
        )
    return Address(
        scheme,
        host=host,
        port=DEFAULT_PORT if port is None else port,
        device=device,
        tls_name=tls_name,
        token=asked.get("token", ""),
    )


def _port_advice(shown: str) -> str:
    """What was meant: a device of this process may look like a host and a port."""
    bare = shown.removeprefix("grpc://")
    return f"a device of this process is local:#{bare}" if "=" in bare.partition("?")[0] else ADVICE


def _check_host(host: str, *, is_bracketed: bool, shown: str) -> None:
    if _NOT_IN_HOSTS.intersection(host) or (is_bracketed and not _is_ip(host)):
        raise InvalidArgumentError(f"bad address {shown!r}: {host!r} is no host", advice=ADVICE)
