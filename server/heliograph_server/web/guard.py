"""Checks of requests that come from browsers, and the headers of replies. Pure.

A page of another site can make a browser send requests here. It cannot read the replies, except by
a name of its own that it lets resolve to this host, and it cannot set headers of ours. So a
daemon without tokens is asked by its address only, and what changes something needs a header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import suppress

from heliograph_proto.errors import PermissionDeniedError

#: The header that the page sends with whatever changes something.
HEADER = "x-heliograph"
#: The longest value of a Host header.
_LONGEST_HOST = 300

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "frame-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
#: The headers of every reply.
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def framed(policy: str = "default-src 'none'") -> dict[str, str]:
    """The headers of a reply that the page shows in a frame, instead of those in HEADERS.

    The reply has `policy` and an origin of its own, in a tab of its own too: its scripts can read
    neither the page nor the daemon's replies.
    """
    return {
        "content-security-policy": f"{policy}; frame-ancestors 'self'; sandbox allow-scripts",
        # A tab of another origin has no group of tabs to be alone in.
        "cross-origin-opener-policy": "unsafe-none",
        "x-frame-options": "SAMEORIGIN",
    }


def check_host(host: str, own: str) -> None:
    """Check that a request without a token was sent to an address, to this host, or to `own`, the
    name in the configuration. Raises PermissionDeniedError."""
    name = _name_of(host)
    if name in ("localhost", own.lower()):
        return
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return
    raise PermissionDeniedError(
        f"the dashboard has no tokens, and was asked for as {host!r:.80}",
        advice="open it by its address, such as http://127.0.0.1:7080, or set a file of tokens",
    )


def check_origin(headers: Mapping[str, str]) -> None:
    """Check that a request that changes something was sent by the page itself. Raises
    PermissionDeniedError."""
    site = headers.get("sec-fetch-site", "same-origin")
    origin, host = headers.get("origin"), headers.get("host", "")
    is_own = origin is None or origin.partition("://")[2].lower() == host.lower()
    if headers.get(HEADER) != "1" or site not in ("same-origin", "none") or not is_own:
        raise PermissionDeniedError(
            "the request was not sent by the page of the dashboard",
            advice=f"a program sends the header {HEADER}: 1, and its token: authorization: Bearer TOKEN",
        )


def _name_of(host: str) -> str:
    """The name or address in a Host header, in lower case, without its port."""
    if len(host) > _LONGEST_HOST:
        return ""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
