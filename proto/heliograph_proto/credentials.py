"""What a client shows a daemon, and by what it knows that the daemon is the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

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
