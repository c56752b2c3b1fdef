"""Sources of a pool's members: `static:a:7070,b:7070`, `dns:NAME:PORT`, `ray:...`.

Members that speak TLS are `static:grpcs://a:7070`, or `dns:grpcs://NAME:PORT`, where each has a
certificate for NAME.

A source reports the whole list on each change. Listed daemons are tried until they answer; daemons
that leave the list are used as long as they answer. Other kinds of sources are modules of their
own, imported on demand.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Self, TypeAlias

from heliograph_proto.addresses import DEFAULT_PORT, Address, Scheme, parse_address
from heliograph_proto.errors import ConfigurationError, HeliographError, InvalidArgumentError

logger = logging.getLogger(__name__)

#: The interval between resolutions of a name.
RESOLVE_SECONDS = 5.0
#: The time that `close` waits for the resolver, which cannot be interrupted.
CLOSE_SECONDS = 2.0
#: The most members of a pool.
MAX_MEMBERS = 1000

_NAME = re.compile(r"[A-Za-z0-9\[]([A-Za-z0-9_.:\]-]{0,62}[A-Za-z0-9\]])?")
_EXAMPLES = "static:a:7070,b:7070 or dns:NAME:PORT"


@dataclass(frozen=True, slots=True)
class ListedMember:
    """A daemon that should be a member."""

    #: The prefix of its devices' names: NAME/cpu0.
    name: str
    #: A URL for `hg.connect`, without a device.
    url: str


#: Receives the whole list, from any thread.
Changed: TypeAlias = Callable[[Sequence[ListedMember]], None]
#: Receives the reason why the list may be incomplete or outdated, from any thread.
Failed: TypeAlias = Callable[[HeliographError], None]


class MembershipSource(ABC):
    """A source of the daemons of a pool. Thread-safe."""

    #: The part before the colon.
    prefix: str

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """A source from the text after the colon. Raises ConfigurationError."""

    @abstractmethod
    def start(self, changed: Changed, failed: Failed) -> None:
        """Report the list, now or soon, and whenever it changes. Called once.

        Failures are reported and retried; no exception leaves a thread.
        """

    def refresh(self) -> None:
        """Look again soon, since a member was lost. Does nothing by default."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, and report nothing afterwards. Idempotent."""


#: Module and class by prefix, with the extra of this package that it needs.
_KINDS: Mapping[str, tuple[str, str, str]] = {
    "static": (__name__, "StaticSource", ""),
    "dns": (__name__, "DnsSource", ""),
    "ray": ("heliograph_server.pool.ray_discovery", "RaySource", "ray"),
}


def open_source(text: str) -> MembershipSource:
    """The source that a text names. Raises ConfigurationError."""
    prefix, colon, rest = text.strip().partition(":")
    if prefix not in _KINDS or not colon:
        near = get_close_matches(prefix, _KINDS, 1)
        advice = f"did you mean {near[0]}:...?" if near and colon else f"such as {_EXAMPLES}"
        raise ConfigurationError(f"{text[:200]!r} is not a source of members", advice=advice)
    module, name, extra = _KINDS[prefix]
    try:
        kind = getattr(import_module(module), name)
    except ImportError as error:
        advice = f"pip install 'heliograph[{extra}]'" if extra else ""
        raise ConfigurationError(f"{prefix}: members need a package: {error}", advice=advice) from None
    made: MembershipSource = kind.parse(rest)
    return made


class StaticSource(MembershipSource):
    """Daemons that are named one by one."""

    prefix = "static"

    def __init__(self, members: Sequence[ListedMember]) -> None:
        """Raises ConfigurationError for no members, too many, and two of the same name."""
        if not members:
            raise ConfigurationError("a pool needs at least one member", advice=f"such as {_EXAMPLES}")
        if len(members) > MAX_MEMBERS:
            raise ConfigurationError(f"{len(members)} members; at most {MAX_MEMBERS} are possible")
        if (twice := first_twice([one.name for one in members])) is not None:
            raise ConfigurationError(
                f"two members are named {twice!r}", advice="give each a name: static:left=a:7070,right=b:7070"
            )
        self._members = tuple(members)

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls([_listed(one) for one in filter(None, map(str.strip, text.split(",")))])

    def start(self, changed: Changed, failed: Failed) -> None:
        changed(self._members)

    def close(self) -> None:
        pass


def _listed(text: str) -> ListedMember:
    name, equals, url = text.partition("=")
    if not equals or "?" in name:
        # The text after a question mark is part of the URL.
        name, url = "", text
    address = daemon_address(url)
    if url is not text and _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"a member cannot be named {name[:80]!r}", advice="use letters, digits, dots, - and _, at most 64"
        )
    return ListedMember(name or member_name(address), str(address))


def daemon_address(url: str) -> Address:
    """The address of a daemon, without a device. Raises ConfigurationError."""
    try:
        address = parse_address(url)
    except InvalidArgumentError as error:
        raise ConfigurationError(f"a member at {url[:200]!r}: {error.message}", advice=error.advice) from None
    if address.scheme == "local" or address.device:
        raise ConfigurationError(
            f"{url[:200]!r} is not a daemon", advice="a member is a whole daemon: HOST:PORT or unix:///PATH"
        )
    if address.pin:
        raise ConfigurationError(
            f"the address of {address} contains the fingerprint of a certificate, which is for clients",
            advice="use --pool-ca FILE",
        )
    if address.token:
        raise ConfigurationError(
            f"the address of {address} contains a token",
            advice="put it into a file for --pool-token: lists of members are displayed and logged",
        )
    return address


def first_twice(names: Sequence[str]) -> str | None:
    """The first name that occurs again, ignoring case."""
    seen: set[str] = set()
    for name in names:
        if name.casefold() in seen:
            return name
        seen.add(name.casefold())
    return None


def member_name(address: Address) -> str:
    """The default name of a daemon: its host, with the port if that is not the default."""
    if address.scheme == "unix":
        return address.path.rsplit("/", 1)[-1].partition(".")[0] or "local"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return host if address.port == DEFAULT_PORT else f"{host}:{address.port}"


#: Returns the addresses of a name. Raises OSError.
Resolve: TypeAlias = Callable[[str], Sequence[str]]


def resolve_all(name: str) -> list[str]:
    """All IPv4 and IPv6 addresses of a name."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class DnsSource(MembershipSource):
    """Every address of a name, such as that of a headless service. Resolved periodically."""

    prefix = "dns"

    def __init__(
        self,
        name: str,
        port: int = DEFAULT_PORT,
        resolve: Resolve = resolve_all,
        seconds: float = RESOLVE_SECONDS,
        tls_name: str = "",
    ) -> None:
        """`tls_name` is the name in the members' certificates, if they speak TLS."""
        self._name, self._port, self._tls_name = name, port, tls_name
        self._resolve, self._seconds = resolve, seconds
        self._wake = threading.Event()
        self._closed = False
        self._reported: tuple[ListedMember, ...] | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        address = daemon_address(text)
        if address.scheme == "unix" or "://" in text.removeprefix("grpcs://"):
            raise ConfigurationError(
                f"{text[:200]!r} is not a name and port",
                advice="such as dns:NAME:7070 or dns:grpcs://NAME:7070",
            )
        tls_name = (address.tls_name or address.host) if address.is_tls else ""
        return cls(address.host, address.port, tls_name=tls_name)

    def start(self, changed: Changed, failed: Failed) -> None:
        self._thread = threading.Thread(
            target=self._watch, args=(changed, failed), name="heliograph-dns", daemon=True
        )
        self._thread.start()

    def _watch(self, changed: Changed, failed: Failed) -> None:
        while not self._closed:
            self._look(changed, failed)
            self._wake.wait(self._seconds)
            self._wake.clear()

    def _look(self, changed: Changed, failed: Failed) -> None:
        try:
            found = self._listed(self._resolve(self._name))
        except (OSError, UnicodeError) as error:
            # A failing name server says nothing about the members that were there.
            found = () if self._reported is None or _is_unknown(error) else self._reported
            if not self._closed:
                failed(_unresolved(self._name, error))
        if found != self._reported and not self._closed:
            self._reported = found
            changed(found)

    def _listed(self, addresses: Sequence[str]) -> tuple[ListedMember, ...]:
        made = [self._at(one) for one in sorted(set(addresses), key=_sorted)]
        return tuple(ListedMember(member_name(one), str(one)) for one in made[:MAX_MEMBERS])

    def _at(self, host: str) -> Address:
        scheme: Scheme = "grpcs" if self._tls_name else "grpc"
        return Address(scheme, host=host, port=self._port, tls_name=self._tls_name)

    def refresh(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)


def _sorted(address: str) -> tuple[int, int, str]:
    """A sort key: numerically, IPv4 first."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return 7, 0, address
    return found.version, int(found), address


def _is_unknown(error: BaseException) -> bool:
    """True if the name has no address, rather than that no name server answered."""
    unknown = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
    return isinstance(error, UnicodeError) or (isinstance(error, OSError) and error.errno in unknown)


def _unresolved(name: str, error: BaseException) -> ConfigurationError:
    why = getattr(error, "strerror", None) or str(error)
    return ConfigurationError(
        f"{name} does not resolve: {why}", advice="check the name; members join as soon as it resolves"
    )
