"""Addresses in settings: those that are listened at, and the daemon that keeps the state."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from urllib.parse import unquote

from heliograph_proto.addresses import Address, parse_address, without_token
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError

_URL = re.compile(r"(grpcs?://[^/?#]*)/?([^?#]*)(.*)|unix:.*", re.IGNORECASE)
_LIKE_URL = re.compile(r"://|^grpcs?:|^unix:", re.IGNORECASE)
#: The longest name of a state, in characters.
MOST_NAME = 255


@dataclass(frozen=True, slots=True)
class KeptElsewhere:
    """A state in the memory of another daemon."""

    #: The daemon, without the name.
    address: Address
    name: str


def is_like_url(text: str) -> bool:
    """Return whether a text is meant as a URL, and not as a folder, even if it is not a right one."""
    return _LIKE_URL.search(text) is not None


def kept_elsewhere(text: str, listened: Address) -> KeptElsewhere | None:
    """Parse the setting `state`; None if it is a folder. Raises ConfigurationError.

    Without a name, it is that of this host with the port or socket at which the daemon listens."""
    found = _URL.fullmatch(text)
    if found is None and is_like_url(text):
        raise _wrong(
            text,
            "it is no URL of a daemon",
            "give a folder, or a daemon: grpc://HOST:PORT/NAME, grpcs://HOST:PORT/NAME or unix:///PATH",
        )
    if found is None:
        return None
    url, name = (found[1] + found[3], unquote(found[2])) if found[1] else (text, "")
    try:
        address = parse_address(url)
    except InvalidArgumentError as error:
        raise _wrong(text, error.message, error.advice) from None
    if address.token or address.device or address.pin or address.insecure:
        raise _wrong(
            text,
            "it has a token, a device, a pin or a consent, which are for clients",
            "set the credentials for other daemons: --pool-token FILE, --pool-ca FILE",
        )
    name = name or f"{socket.gethostname()}:{listened.port or listened.path}"
    if len(name) > MOST_NAME or not name.isprintable():
        raise _wrong(
            text, "its name is too long, or not printable", f"a name has up to {MOST_NAME} characters"
        )
    return KeptElsewhere(address, name)


def _wrong(text: str, why: str, advice: str) -> ConfigurationError:
    return ConfigurationError(f"state is {without_token(text)!r:.200}: {why}", advice=advice)


def web_address(text: str, setting: str) -> Address | None:
    """An address of HTTP, with grpcs for https; None without."""
    if not text:
        return None
    address = listen_address(text.replace("https://", "grpcs://").removeprefix("http://"))
    if address.scheme == "unix":
        raise ConfigurationError(f"{setting} is {text!r:.200}", advice="give HOST:PORT or https://HOST:PORT")
    return address


def listen_address(url: str) -> Address:
    """Parse an address to listen at. Raises ConfigurationError."""
    try:
        address = parse_address(url)
    except InvalidArgumentError as error:
        cause = f"cannot listen at {without_token(url)!r}: {error.message}"
        raise ConfigurationError(cause, advice=error.advice) from None
    if address.scheme == "local" or address.device:
        raise ConfigurationError(
            f"cannot listen at {without_token(url)!r}",
            advice="give grpc://HOST:PORT, grpcs://HOST:PORT or unix:///PATH, without a device",
        )
    return address
