"""URLs of daemons.

The forms are `local:`, `unix:///path` (or gRPC's `unix:/path`), `grpc://host:port` (or
`host:port`), and `grpcs://host:port` with TLS.

`grpcs://host:port?tls_name=NAME` expects a certificate for NAME instead of the host's name.
`?pin=FINGERPRINT` expects the one certificate with this SHA-256 fingerprint, of any authority and
for any name. `grpc://host:port?insecure=yes` lets a token go to another host in the clear.
`?token=TOKEN` gives the token to present, as `heliograph serve` prints it; the token is never
printed, compared or logged with the address.

`URL#cpu0` names a device. `local:#cpu:threads=2` starts one, and `local:#fake` one without
parameters: after `local:`, a fragment with a colon, or one that does not end in a digit, is a
specification.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from heliograph_proto.errors import InvalidArgumentError

#: The metadata key that carries a token with every call, and the prefix of its value.
TOKEN_KEY = "authorization"
BEARER = "Bearer "
#: The maximum length of a token, in characters. Tokens that Heliograph generates have 47.
MAX_TOKEN = 512


@dataclass(frozen=True, slots=True)
class Credentials:
    """A token and paths of PEM files; each may be empty.

    `ca` holds the authorities that daemons' certificates are verified against (the system's if
    empty); `certificate` and `key` are presented to daemons that request them. These three apply to
    grpcs:// only.
    """

    token: str = field(default="", repr=False)
    ca: str = ""
    certificate: str = ""
    key: str = ""
    #: True if the token may go to other hosts unencrypted.
    in_clear: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return ((TOKEN_KEY, f"{BEARER}{self.token}"),) if self.token else ()


#: Returns the credentials for the daemon at an address. Called for each new connection, since
#: tokens change.
Shown: TypeAlias = Callable[[str], Credentials]


def nothing_shown(address: str) -> Credentials:
    """Return empty credentials, for daemons without authentication."""
    return Credentials()


def check_token(token: str, what: str = "the token") -> str:
    """Return the token if it is well formed. Raises InvalidArgumentError, without the token."""
    if not isinstance(token, str) or not 0 < len(token) <= MAX_TOKEN:
        raise InvalidArgumentError(
            f"{what} is invalid",
            advice=f"a token has 1 to {MAX_TOKEN} characters; create one with `heliograph token new`",
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidArgumentError(f"{what} has characters that a token cannot have", advice="copy it again")
    return token


Scheme: TypeAlias = Literal["local", "unix", "grpc", "grpcs"]

DEFAULT_PORT = 7070
DEFAULT_URL = f"grpc://127.0.0.1:{DEFAULT_PORT}"
#: The kernel's sockaddr_un holds this many bytes and a terminator.
MAX_SOCKET_PATH = 107
_NOT_IN_HOSTS = frozenset(" ,@=\\\"'<>")
ADVICE = "use local:, unix:///path/to/socket, grpc://host:port, or grpcs://host:port"
_FINGERPRINT = re.compile("[0-9a-f]{64}")
#: A token anywhere in a text that may be a URL: it must not be repeated in an error.
_TOKEN = re.compile(r"(token=)[^&#]*|(hgt_)[\w-]*|(://)[^/?#]*(?=@)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a daemon."""

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""
    #: The device that `URL#device` names; empty if none.
    device: str = ""
    #: The device that `local:#SPECIFICATION` starts; empty if none.
    specification: str = ""
    #: URLs of the members of a pool whose head is in this process; otherwise empty.
    members: tuple[str, ...] = ()
    #: The name that the certificate of a grpcs:// daemon must have; empty: the host's.
    tls_name: str = ""
    #: The SHA-256 fingerprint of the one certificate that a grpcs:// daemon may have, in
    #: hexadecimal digits; empty: any that the authorities vouch for.
    pin: str = ""
    #: True if a token may be sent to a grpc:// daemon on another host.
    insecure: bool = False
    #: The token that the URL gave; empty if none.
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
        parameters = (
            f"tls_name={quote(self.tls_name)}" if self.tls_name else "",
            f"pin={self.pin}" if self.pin else "",
            "insecure=yes" if self.insecure else "",
        )
        query = "&".join(filter(None, parameters))
        return f"{self.scheme}://{self.host_port}{query and '?'}{query}{device}"

    @property
    def plain(self) -> str:
        """The URL as daemons name each other: without a device, and without what is for clients
        alone: a token, a pin, the consent to send a token in the clear."""
        return str(replace(self, device="", token="", pin="", insecure=False))

    @property
    def is_tls(self) -> bool:
        """True if connections are encrypted and the daemon is authenticated."""
        return self.scheme == "grpcs"

    @property
    def host_port(self) -> str:
        """HOST:PORT, as URLs write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def grpc_target(self) -> str:
        """The target that gRPC takes. A numeric address skips name resolution."""
        if self.scheme == "unix":
            return f"unix:{self.path}"
        try:
            version = ipaddress.ip_address(self.host).version
        except ValueError:
            return f"dns:{self.host_port}"
        return f"ipv{version}:{self.host_port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this host can reach it."""
        if self.scheme in ("local", "unix") or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(url: str) -> Address:
    """Parse a URL. Raises InvalidArgumentError."""
    if not url.strip().isprintable():
        shown = without_token(url)[:200]
        raise InvalidArgumentError(f"bad address {shown!r}: it has unprintable characters", advice=ADVICE)
    try:
        return _parsed(url)
    except InvalidArgumentError:
        raise
    except ValueError as error:
        # From urlsplit, for example about brackets in a host.
        shown = without_token(url)[:200]
        raise InvalidArgumentError(f"bad address {shown!r}: {error}", advice=ADVICE) from None


def without_token(text: str) -> str:
    """Return a text that may contain URLs with the tokens masked."""
    return _TOKEN.sub(lambda found: f"{found[found.lastindex or 0]}...", text)


def _parsed(url: str) -> Address:
    url, _, device = url.strip().partition("#")
    if "?token=" in device:
        raise InvalidArgumentError("the token follows the device", advice="use URL?token=TOKEN#DEVICE")
    if url.rstrip("/") in ("local:", "local"):
        return _local(device)
    if "=" in device.partition(":")[2]:
        shown = without_token(device)
        advice = f"use local:#{shown} for a device in this process, or start the daemon with --device {shown}"
        raise InvalidArgumentError(f"{shown!r} is not the name of a daemon's device", advice=advice)
    if url.startswith("unix:") and not url.startswith("unix://"):
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
    token = _parameters(f"token={query}").get("token", "") if has_token else ""
    path = unquote(quoted)
    if not path.startswith("/"):
        raise InvalidArgumentError("a unix address needs an absolute path", advice=ADVICE)
    if not path.isprintable():
        raise InvalidArgumentError(
            f"the socket path {path[:200]!r} has unprintable characters", advice=ADVICE
        )
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


def _parameters(query: str) -> dict[str, str]:
    """Parse the query of a URL. Raises InvalidArgumentError, which does not repeat a token."""
    found: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in ("tls_name", "token", "pin", "insecure"):
            raise InvalidArgumentError(
                f"unknown parameter {without_token(key)[:80]!r} in an address",
                advice="the parameters after ? are token=TOKEN, tls_name=NAME and pin=FINGERPRINT for "
                "grpcs://, and insecure=yes for grpc://",
            )
        if key in found or not value:
            raise InvalidArgumentError(
                f"{key} is in the address twice, or empty", advice=f"give {key}=... once"
            )
        found[key] = value
    if "token" in found:
        check_token(found["token"], "the token in the address")
    if "pin" in found:
        found["pin"] = _fingerprint(found["pin"])
    if found.get("insecure", "yes") != "yes":
        raise InvalidArgumentError(
            "insecure is not yes in the address", advice="write insecure=yes, or nothing"
        )
    return found


def _fingerprint(text: str) -> str:
    """Return the digits of a fingerprint, as `openssl x509 -fingerprint -sha256` prints it too.
    Raises InvalidArgumentError."""
    digits = text.lower().removeprefix("sha256:").replace(":", "")
    if not _FINGERPRINT.fullmatch(digits):
        raise InvalidArgumentError(
            "the pin in the address is no fingerprint",
            advice="a SHA-256 fingerprint has 64 hexadecimal digits",
        )
    return digits


def _grpc(url: str, scheme: Literal["grpc", "grpcs"], device: str) -> Address:
    parts, shown = _split(url), without_token(url)
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        bare = shown.removeprefix("grpc://")
        raise InvalidArgumentError(
            f"bad address {shown!r}: a port is a number from 0 to 65535",
            # A device specification may look like a host and a port.
            advice=f"a device of this process is local:#{bare}" if "=" in bare.partition("?")[0] else ADVICE,
        ) from None
    if not host or parts.path.strip("/") or parts.username:
        raise InvalidArgumentError(f"bad address {shown!r}: it must have a host and no path", advice=ADVICE)
    if host.isdecimal():
        # The resolver would take it as an IPv4 address written as one number.
        raise InvalidArgumentError(
            f"bad address {shown!r}: {host} is not a host",
            advice=f"use 127.0.0.1:{host} if it is a port of this host",
        )
    parameters = _parameters(parts.query)
    _check_host(host, is_bracketed=parts.netloc.startswith("["), shown=shown)
    tls_name = parameters.get("tls_name", "")
    if tls_name:
        _check_host(tls_name, is_bracketed=False, shown=shown)
    for name in ("tls_name", "pin"):
        if name in parameters and scheme != "grpcs":
            raise InvalidArgumentError(
                f"bad address {shown!r}: {name} needs grpcs://",
                advice=f"use grpcs://{host}:{port or DEFAULT_PORT}",
            )
    if "insecure" in parameters and scheme != "grpc":
        raise InvalidArgumentError(f"bad address {shown!r}: insecure is for grpc://", advice="leave it out")
    return Address(
        scheme,
        host=host,
        port=DEFAULT_PORT if port is None else port,
        device=device,
        tls_name=tls_name,
        pin=parameters.get("pin", ""),
        insecure="insecure" in parameters,
        token=parameters.get("token", ""),
    )


def _check_host(host: str, *, is_bracketed: bool, shown: str) -> None:
    if _NOT_IN_HOSTS.intersection(host) or (is_bracketed and not _is_ip(host)):
        raise InvalidArgumentError(f"bad address {shown!r}: {host!r} is not a host", advice=ADVICE)
