"""URLs of daemons: `local:`, `unix:///path` (or gRPC's `unix:/path`), `grpc://host:port` (or `host:port`).

`URL#cpu0` names a device. `local:#cpu:threads=2` starts one, and `local:#fake` one without parameters: behind
`local:` a fragment that has a colon, or does not end in a digit, is a specification.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from heliograph_proto.errors import InvalidArgumentError

Scheme: TypeAlias = Literal["local", "unix", "grpc"]

DEFAULT_PORT = 7070
DEFAULT_URL = f"grpc://127.0.0.1:{DEFAULT_PORT}"
#: The kernel's sockaddr_un holds so many bytes, and a terminator.
MAX_SOCKET_PATH = 107
_NOT_IN_HOSTS = frozenset(" ,@=\\\"'<>")
ADVICE = "use local:, unix:///path/to/socket, or grpc://host:port"


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
        return f"grpc://{self._host_port()}{device}"

    def _host_port(self) -> str:
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
            return f"dns:{self._host_port()}"
        return f"ipv{version}:{self._host_port()}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.scheme != "grpc" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(url: str) -> Address:
    """The address that a URL names. Raises InvalidArgumentError."""
    if not url.strip().isprintable():
        raise InvalidArgumentError(f"bad address {url[:200]!r}: what is no character is in it", advice=ADVICE)
    try:
        return _parsed(url)
    except InvalidArgumentError:
        raise
    except ValueError as error:
        # As urlsplit says that brackets or letters are no part of a host.
        raise InvalidArgumentError(f"bad address {url[:200]!r}: {error}", advice=ADVICE) from None


def _parsed(url: str) -> Address:
    url, _, device = url.strip().partition("#")
    if url.rstrip("/") in ("local:", "local"):
        return _local(device)
    if "=" in device.partition(":")[2]:
        advice = f"a device of its own comes with local:, or start the daemon with --device {device}"
        raise InvalidArgumentError(f"{device!r} is no device of a daemon", advice=advice)
    if url.startswith("unix:") and not url.startswith("unix://"):
        # As gRPC writes it.
        return _unix(unquote(url.removeprefix("unix:")), device)
    if "://" not in url:
        url = f"grpc://{url}"
    parts = _split(url)
    if parts.scheme == "unix":
        return _unix(unquote(parts.netloc + parts.path), device)
    if parts.scheme == "grpcs":
        raise InvalidArgumentError("grpcs:// is not offered by this version", advice=ADVICE)
    if parts.scheme != "grpc":
        raise InvalidArgumentError(f"unknown scheme {parts.scheme!r} in {url!r}", advice=ADVICE)
    return _grpc(url, device)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidArgumentError(f"bad address {url!r}: {error}", advice=ADVICE) from None


def _local(fragment: str) -> Address:
    if ":" in fragment or not fragment[-1:].isdecimal():
        return Address("local", specification=fragment)
    return Address("local", device=fragment)


def _unix(path: str, device: str) -> Address:
    if not path.startswith("/"):
        raise InvalidArgumentError("a unix address needs an absolute path", advice=ADVICE)
    if not path.isprintable():
        raise InvalidArgumentError(f"the socket path {path[:200]!r} is none", advice=ADVICE)
    if len(path.encode()) > MAX_SOCKET_PATH:
        raise InvalidArgumentError(
            f"the socket path has {len(path.encode())} bytes; at most {MAX_SOCKET_PATH} fit"
        )
    return Address("unix", path=path, device=device)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _grpc(url: str, device: str) -> Address:
    parts = _split(url)
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidArgumentError(f"bad address {url!r}: {error}", advice=ADVICE) from None
    if not host or parts.path.strip("/") or parts.query or parts.username:
        raise InvalidArgumentError(f"bad address {url!r}: a host is needed, no path", advice=ADVICE)
    if _NOT_IN_HOSTS.intersection(host) or (parts.netloc.startswith("[") and not _is_ip(host)):
        raise InvalidArgumentError(f"bad address {url!r}: {host!r} is no host", advice=ADVICE)
    return Address("grpc", host=host, port=DEFAULT_PORT if port is None else port, device=device)
