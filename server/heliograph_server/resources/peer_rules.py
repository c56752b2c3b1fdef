"""The daemons that this one connects to when a session names them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from heliograph_proto.addresses import Address, parse_address
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, PermissionDeniedError

_Rule: TypeAlias = Callable[[Address], bool]
_FORMS = "HOST, HOST:PORT, a network such as 10.0.0.0/24, loopback, or *"


@dataclass(frozen=True, slots=True)
class PeerRules:
    """The addresses that sessions may name."""

    allowed: tuple[_Rule, ...]
    advice: str = "the daemon's operator may add it: pool_peers"

    def check(self, url: str) -> None:
        """Raise PermissionDeniedError unless one of the rules allows the address, and
        InvalidArgumentError for a malformed one."""
        address = parse_address(url)
        if not any(rule(address) for rule in self.allowed):
            raise PermissionDeniedError(f"this daemon does not connect to {address}", advice=self.advice)


def rules_of(entries: Sequence[str], *, asks: bool, is_local: bool) -> PeerRules:
    """The rules of a configuration: its entries, or without any the default.

    `asks`: only callers with the right `pool` may name addresses. `is_local`: all addresses of the
    daemon are loopback ones, so its callers are on this host. Raises ConfigurationError.
    """
    if entries:
        return PeerRules(tuple(map(_rule, entries)))
    if asks:
        return ANY
    if is_local:
        return PeerRules((_is_loopback,), "it listens on loopback and asks for no token: set pool_peers")
    # Otherwise callers on other hosts would reach what only this host may reach.
    return PeerRules(
        (lambda address: not _is_own(address),), "it asks for no token: use tokens, or set pool_peers"
    )


def _is_loopback(address: Address) -> bool:
    return address.is_loopback


def _is_own(address: Address) -> bool:
    """True for addresses that mean something else on each host."""
    found = _ip(address.host)
    if found is None:
        return address.is_loopback or address.host.rstrip(".").endswith("localhost")
    return found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _rule(entry: str) -> _Rule:
    if entry == "*":
        return lambda _address: True
    if entry == "loopback":
        return _is_loopback
    if "/" in entry and "//" not in entry:
        return _network(entry)
    try:
        named = parse_address(entry)
    except InvalidArgumentError as error:
        raise ConfigurationError(f"pool_peers: {error.message}", advice=f"give {_FORMS}") from None
    if named.scheme in ("local", "unix"):
        return lambda address: address.scheme == "unix" and address.path == named.path
    # Without a port in the entry, every port of the host.
    has_port = not entry.endswith("]") and entry.rpartition(":")[2].isdecimal() and entry.count(":") > 0
    host, port = named.host.lower(), named.port if has_port else 0
    return lambda address: address.host.lower() == host and port in (0, address.port)


def _network(entry: str) -> _Rule:
    try:
        network = ipaddress.ip_network(entry)
    except ValueError as error:
        raise ConfigurationError(f"pool_peers: {error}", advice=f"give {_FORMS}") from None

    def holds(address: Address) -> bool:
        found = _ip(address.host)
        return found is not None and found in network

    return holds


#: Every address.
ANY = PeerRules((lambda _address: True,))
