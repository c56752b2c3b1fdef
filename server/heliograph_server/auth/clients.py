"""The callers behind client certificates: tenants, rights and quotas by the names in them.

    [[client]]
    match = "CN:ops-*"
    tenant = "operators"
    rights = ["use", "admin"]

    [client.quota]
    device_memory_bytes = "2GiB"

The first entry with a matching name counts. A certificate without an entry has the right `use`, and
its common name is the tenant. The file is read again when it changes; a broken one is logged, and
the entries before it stay valid.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from heliograph_proto.errors import ConfigurationError, HeliographError, UnauthenticatedError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.files import AccessFile
from heliograph_server.auth.tokens import (
    check_keys,
    check_name,
    parse_quota,
    parse_rights,
    tables,
)
from heliograph_server.resources.principals import Principal, Right

#: The key of a table of the file.
KEY = "client"
_KEYS = ("match", "tenant", "rights", "quota")
_ADVICE = 'write each as [[client]] with match = "CN:NAME", a tenant and rights'
_UNKNOWN = "connect with grpcs://, certificate=FILE and key=FILE"
#: Kinds of names, as OpenSSL writes them, with the keys of gRPC's auth context.
_KINDS = {
    "CN": "x509_common_name",
    "DNS": "peer_dns",
    "URI": "peer_uri",
    "email": "peer_email",
    "IP": "peer_ip",
}
#: Bytes before the length of a name in the encoding of a certificate: tags, and for common names
#: their identifier with the tag of a UTF8String, PrintableString, TeletexString or IA5String.
_BEFORE = {
    "CN": tuple(b"\x06\x03\x55\x04\x03" + tag for tag in (b"\x0c", b"\x13", b"\x14", b"\x16")),
    "DNS": (b"\x82",),
    "URI": (b"\x86",),
    "email": (b"\x81",),
}
#: The longest pattern.
MAX_PATTERN = 500
#: The most certificates whose entries are remembered.
MOST_KNOWN = 10_000


@dataclass(frozen=True, slots=True)
class ClientEntry:
    """One entry of the file."""

    #: The kind of the name, one of `_KINDS`.
    kind: str
    pattern: re.Pattern[str]
    tenant: str
    rights: frozenset[Right]
    #: The fields of the quota that differ from the daemon's.
    quota: Mapping[str, float] = field(default_factory=dict)

    def matches(self, names: Iterable[tuple[str, str]]) -> bool:
        """True if one of the names, each with its kind, matches."""
        return any(kind == self.kind and self.pattern.fullmatch(name) for kind, name in names)


def parse_clients(text: str, where: str) -> tuple[ClientEntry, ...]:
    """Parse the text of a file. Raises ConfigurationError."""
    try:
        return tuple(_parsed(one, place) for one, place in tables(text, where, KEY, _ADVICE))
    except (RecursionError, OverflowError, ValueError):
        # From deep nesting, and from numbers that are too long to convert or to print.
        raise ConfigurationError(f"{where} is not a file of clients", advice=_ADVICE) from None


def _parsed(entry: dict[str, Any], where: str) -> ClientEntry:
    check_keys(entry, _KEYS, where)
    kind, pattern = _pattern(entry.get("match"), where)
    return ClientEntry(
        kind,
        pattern,
        check_name(entry.get("tenant"), f"{where}: its tenant"),
        parse_rights(entry.get("rights", ["use"]), where),
        parse_quota(entry.get("quota", {}), where, KEY),
    )


def _pattern(found: Any, where: str) -> tuple[str, re.Pattern[str]]:
    kind, _, name = found.partition(":") if isinstance(found, str) else ("", "", "")
    if kind not in _KINDS or not 0 < len(name) <= MAX_PATTERN or not name.isprintable():
        raise ConfigurationError(
            f"{where}: its match is {found!r:.100}",
            advice=f'give a kind and a name, such as "CN:ops-*"; the kinds are {", ".join(_KINDS)}',
        )
    # One label, as in certificates: "*.example" must not match a name that another zone made up.
    parts = "[^./]+".join(map(re.escape, name.split("*")))
    return kind, re.compile(parts, re.IGNORECASE if kind in ("DNS", "email") else 0)


class ClientCertificates:
    """The principals of client certificates. Used by one thread.

    `path` is a file of entries; without one, every certificate has the right `use`.
    """

    def __init__(self, path: str) -> None:
        """Read the file. Raises ConfigurationError."""
        self.file = AccessFile(path, "clients", parse_clients, _ADVICE) if path else None
        #: The entry of each certificate that was seen, for these entries.
        self._known: tuple[tuple[ClientEntry, ...], dict[str, ClientEntry | None]] = (), {}

    def __repr__(self) -> str:
        return f"<ClientCertificates {self.file or 'without a file'}>"

    @property
    def entries(self) -> tuple[ClientEntry, ...]:
        """The entries in force, in order."""
        return self.file.value if self.file is not None else ()

    def refresh(self, *, in_doubt: bool = False) -> None:
        """As `AccessFile.refresh`."""
        if self.file is not None:
            self.file.refresh(in_doubt=in_doubt)

    def identify(self, found: Mapping[str, Iterable[bytes]], quota: Quota) -> Principal:
        """Return the principal of a certificate in gRPC's auth context. Raises
        UnauthenticatedError."""
        self.refresh()
        return self._principal(names_of(found), quota)

    def _entry(self, names: list[tuple[str, str]], key: str) -> ClientEntry | None:
        """The first entry that matches, if any. Remembered, as sessions are checked every second."""
        entries, known = self._known
        if entries is not self.entries or len(known) >= MOST_KNOWN:
            entries, known = self._known = self.entries, {}
        if key not in known:
            known[key] = next((one for one in entries if one.matches(names)), None)
        return known[key]

    def _principal(self, names: list[tuple[str, str]], quota: Quota) -> Principal:
        common = next((name for kind, name in names if kind == "CN"), "")
        shown = common or next((name for _, name in names), "")
        key = json.dumps(names)
        if (entry := self._entry(names, key)) is not None:
            changed: dict[str, Any] = dict(entry.quota)
            return Principal(entry.tenant, entry.rights, replace(quota, **changed), shown, key)
        if not common:
            raise UnauthenticatedError(
                "the server requires a certificate with a common name, and none was given", advice=_UNKNOWN
            )
        if any(one.tenant == common for one in self.entries):
            raise UnauthenticatedError(
                f"the certificate's common name {common!r} is the tenant of other certificates",
                advice="ask the server's operator to add an entry for this certificate",
            )
        return Principal(common, frozenset((Right.USE,)), quota, shown, key)

    def quota_of(self, principal: Principal, quota: Quota) -> Quota:
        """The quota of a principal that was identified before."""
        try:
            return self._principal(_names_in(principal), quota).quota
        except UnauthenticatedError:
            return principal.quota

    def why_not(self, principal: Principal) -> HeliographError | None:
        """Return an error if a principal that was identified before has lost its tenant or a right,
        else None."""
        try:
            now = self._principal(_names_in(principal), principal.quota)
        except UnauthenticatedError as error:
            return error
        if now.tenant == principal.tenant and principal.rights <= now.rights:
            return None
        return UnauthenticatedError(
            f"the rights of the certificate {principal.shown!r} changed, and its sessions ended",
            advice="connect again",
        )


def names_of(found: Mapping[str, Iterable[bytes]]) -> list[tuple[str, str]]:
    """The printable names of a certificate in gRPC's auth context, each with its kind."""
    encoded = b"".join(ssl.PEM_cert_to_DER_cert(one.decode()) for one in found.get("x509_pem_cert", ()))
    names: list[tuple[str, str]] = []
    for kind, key in _KINDS.items():
        for raw in found.get(key, ()):
            name = raw.decode("utf-8", "replace")
            if name.strip() and name.isprintable() and _is_whole(kind, raw, encoded):
                names.append((kind, name))
    return names


def _is_whole(kind: str, name: bytes, encoded: bytes) -> bool:
    """True if a certificate has exactly this name: gRPC cuts names at a NUL."""
    found = _length(len(name)) + name
    return kind not in _BEFORE or any(before + found in encoded for before in _BEFORE[kind])


def _length(count: int) -> bytes:
    """A length in ASN.1's distinguished encoding."""
    if count < 0x80:
        return bytes((count,))
    digits = count.to_bytes((count.bit_length() + 7) // 8, "big")
    return bytes((0x80 | len(digits), *digits))


def _names_in(principal: Principal) -> list[tuple[str, str]]:
    """The names of the certificate that a principal was identified by."""
    return [(kind, name) for kind, name in json.loads(principal.key)]
