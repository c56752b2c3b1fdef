"""The file of tokens: the clients that may connect, with their tenants and rights.

    [[token]]
    name = "alice-laptop"
    hash = "sha256:9f86d081..."
    tenant = "alice"
    rights = ["use"]
    expires = 2027-01-01T00:00:00Z

    [token.quota]
    device_memory_bytes = "2GiB"

A token is 256 random bits. The file has only its hash, which does not let a reader connect. The
file is read again when it changes; a broken one is logged, and the tokens before it stay valid.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from heliograph_proto.errors import ConfigurationError, UnauthenticatedError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.files import AccessFile, read_text
from heliograph_server.config.schema import entries
from heliograph_server.config.values import checked
from heliograph_server.resources.principals import Principal, Right

#: The prefix of a token, by which people and secret scanners recognize it.
PREFIX = "hgt_"
TOKEN_BYTES = 32
SCHEME = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
MAX_NAME = 100
#: The content of the file, in errors.
WHAT = "tokens"
#: The first lines of a file.
HEADING = (
    "# Clients that may connect, with hashes of their tokens: heliograph token new|ls|rm --file FILE\n\n"
)
_KEYS = ("name", "hash", "tenant", "rights", "expires", "quota")
_ADVICE = "create tokens with: heliograph token new --file FILE"


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the file."""

    name: str
    hash: str = field(repr=False)
    tenant: str = "default"
    rights: frozenset[Right] = frozenset((Right.USE,))
    #: The expiry, in seconds since 1970; None: never.
    expires: float | None = None
    #: The fields of the quota that differ from the daemon's.
    quota: Mapping[str, float] = field(default_factory=dict)

    def is_expired(self, now: float) -> bool:
        """True if the token has expired."""
        return self.expires is not None and self.expires <= now

    def principal(self, quota: Quota) -> Principal:
        """The principal that the token identifies."""
        changed: dict[str, Any] = dict(self.quota)
        return Principal(self.tenant, self.rights, replace(quota, **changed), self.name, self.hash)


def new_token() -> str:
    """Return a random token."""
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_of(token: str) -> str:
    """The hash of a token, which the file keeps."""
    return SCHEME + hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def parse_tokens(text: str, where: str) -> tuple[Token, ...]:
    """Parse the text of a file. Raises ConfigurationError, which repeats no hash."""
    try:
        return _entries(text, where)
    except (RecursionError, OverflowError, ValueError):
        # From deep nesting, and from numbers that are too long to convert or to print.
        raise ConfigurationError(f"{where} is not a file of tokens", advice=_ADVICE) from None


def _entries(text: str, where: str) -> tuple[Token, ...]:
    found = tuple(_parsed(one, place) for one, place in tables(text, where, "token", _ADVICE))
    for what, values in (("name", [one.name for one in found]), ("hash", [one.hash for one in found])):
        if len(set(values)) != len(values):
            raise ConfigurationError(f"{where}: two tokens have the same {what}", advice="remove one of them")
    return found


def tables(text: str, where: str, key: str, advice: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The tables of a file that has nothing but `[[key]]`, each with its place for errors. Raises
    ConfigurationError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} is not TOML: {error}", advice=advice) from None
    found = table.pop(key, [])
    if table or not isinstance(found, list):
        raise ConfigurationError(
            f"{where} has entries that are not {key}s: {', '.join(table) or key}",
            advice=f"write each {key} as a table: [[{key}]]",
        )
    for number, one in enumerate(found, 1):
        place = f"{where}: {key} {number}"
        if not isinstance(one, dict):
            raise ConfigurationError(f"{place} is not a table", advice=f"write each as [[{key}]]")
        yield one, place


def check_keys(entry: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Check that an entry has known keys only. Raises ConfigurationError."""
    if unknown := sorted(set(entry) - set(known)):
        raise ConfigurationError(
            f"{where} has the unknown key {unknown[0]!r}", advice=f"known: {', '.join(known)}"
        )


def _parsed(entry: dict[str, Any], where: str) -> Token:
    check_keys(entry, _KEYS, where)
    name = check_name(entry.get("name"), f"{where}: its name")
    where = f"{where} ({name})"
    hashed = entry.get("hash")
    if not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
        raise ConfigurationError(f"{where}: its hash is malformed", advice='give "sha256:" and 64 hex digits')
    return Token(
        name,
        hashed,
        check_name(entry.get("tenant", "default"), f"{where}: its tenant"),
        parse_rights(entry.get("rights", ["use"]), where),
        _moment(entry.get("expires"), where),
        parse_quota(entry.get("quota", {}), where, "token"),
    )


def check_name(name: Any, what: str) -> str:
    """Check a name for use in logs and metrics. Raises ConfigurationError."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ConfigurationError(f"{what} is not valid", advice=f"give 1 to {MAX_NAME} printable characters")
    return name


def parse_rights(names: Any, where: str) -> frozenset[Right]:
    """Parse the names of rights. Raises ConfigurationError."""
    known = [one.value for one in Right]
    if not isinstance(names, list | tuple) or not names or any(one not in known for one in names):
        raise ConfigurationError(f"{where}: its rights are {names!r:.100}", advice=f"give some of {known}")
    return frozenset(map(Right, names))


def _moment(found: Any, where: str) -> float | None:
    match found:
        case None:
            return None
        case datetime():
            return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
        case date():
            return datetime(found.year, found.month, found.day, tzinfo=UTC).timestamp()
    raise ConfigurationError(
        f"{where}: it expires {found!r:.40}", advice="give a date and time: 2027-01-01T00:00:00Z"
    )


def parse_quota(table: Any, where: str, key: str) -> dict[str, float]:
    """Parse the fields of a quota that an entry of `[[key]]` has. Raises ConfigurationError."""
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where}: its quota is not a table", advice=f"write [{key}.quota]")
    known = {one.name: one for one in entries(Quota)}
    found: dict[str, float] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(
                f"{where}: unknown quota {key!r}", advice=f"known: {', '.join(sorted(known))}"
            )
        found[key] = checked(known[key], value, f"{where}: quota {key}")
    return found


class TokenFile:
    """The valid tokens: those of the file when it was last readable. Used by one thread."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises ConfigurationError."""
        self.path = path
        self.file = AccessFile(path, WHAT, parse_tokens, _ADVICE)

    def __repr__(self) -> str:
        return f"<TokenFile {self.path}: {len(self.all)} tokens>"

    def refresh(self, *, in_doubt: bool = False) -> None:
        """As `AccessFile.refresh`."""
        self.file.refresh(in_doubt=in_doubt)

    def find(self, secret: str) -> Token | None:
        """Return the entry of a token, if there is one. The time it takes depends on neither."""
        self.refresh()
        hashed = hash_of(secret).encode()
        found: Token | None = None
        for one in self.all:
            if hmac.compare_digest(one.hash.encode(), hashed):
                found = one
        return found

    @property
    def all(self) -> Sequence[Token]:
        """All tokens, expired ones too."""
        return self.file.value

    def identify(self, secret: str, quota: Quota) -> Principal:
        """Return the principal of a token. Raises UnauthenticatedError."""
        found = self.find(secret)
        if found is None:
            raise UnauthenticatedError(
                "the server does not know this token",
                advice="ask its operator for a new one: heliograph token new",
            )
        if found.is_expired(time.time()):
            raise UnauthenticatedError(
                f"the token {found.name!r} has expired", advice="ask the server's operator for another"
            )
        return found.principal(quota)

    def why_not(self, principal: Principal) -> UnauthenticatedError | None:
        """Return an error if a principal that was identified before has lost its token, else
        None."""
        now = time.time()
        kept = next((one for one in self.all if one.hash == principal.key), None)
        if kept is None or kept.tenant != principal.tenant or not principal.rights <= kept.rights:
            cause = "was revoked"
        elif kept.is_expired(now):
            cause = "has expired"
        else:
            return None
        return UnauthenticatedError(
            f"the token {principal.shown!r} {cause}, and its sessions ended",
            advice="ask the server's operator for another, and connect again",
        )


def read_tokens(path: str) -> tuple[Token, ...]:
    """Read the tokens of a file. Raises ConfigurationError."""
    return parse_tokens(read_text(path, WHAT, _ADVICE), path)


# Writing


def add_token(path: Path, token: Token) -> None:
    """Append a token to a file, which is created with mode 0600 if it is missing. Raises
    ConfigurationError."""
    before = read_text(str(path), WHAT, _ADVICE) if path.exists() and path.stat().st_size else HEADING
    if any(one.name == token.name for one in parse_tokens(before, str(path))):
        raise ConfigurationError(
            f"{path} already has a token {token.name!r}", advice="choose another name, or remove that one"
        )
    _replace(path, before.rstrip() + "\n\n" + _written(token))


def remove_token(path: Path, name: str) -> None:
    """Remove a token from a file. Raises ConfigurationError for an unknown name."""
    kept = read_tokens(str(path))
    if all(one.name != name for one in kept):
        known = ", ".join(one.name for one in kept) or "none"
        raise ConfigurationError(f"{path} has no token {name!r}", advice=f"there are: {known}")
    _replace(path, HEADING + "".join(_written(one) for one in kept if one.name != name))


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, and keep its owner. Raises ConfigurationError."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            _copy_owner(path, descriptor)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None


def _copy_owner(path: Path, descriptor: int) -> None:
    """Give a new file the owner and mode of the one that it replaces.

    So root can add a token for a daemon of another user.
    """
    with suppress(OSError):
        before = os.stat(path)
        os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def _written(token: Token) -> str:
    rights = ", ".join(f'"{one}"' for one in Right if one in token.rights)
    lines = [
        "[[token]]",
        f"name = {_quoted(token.name)}",
        f'hash = "{token.hash}"',
        f"tenant = {_quoted(token.tenant)}",
        f"rights = [{rights}]",
    ]
    if token.expires is not None:
        moment = datetime.fromtimestamp(token.expires, UTC).replace(microsecond=0)
        lines.append(f"expires = {moment.isoformat().replace('+00:00', 'Z')}")
    if token.quota:
        lines += ["", "[token.quota]", *(f"{key} = {value}" for key, value in token.quota.items())]
    return "\n".join(lines) + "\n\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
