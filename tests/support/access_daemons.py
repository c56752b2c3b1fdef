"""Daemons that ask who connects, and what to show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from certificates import Authority
from daemon_threads import ThreadDaemon, thread_daemon

import heliograph as hg
from heliograph_server.auth.tokens import Token, add_token, hash_of, new_token
from heliograph_server.resources.principals import Right

#: Tenants, and what they may do.
TENANTS: Mapping[str, tuple[Right, ...]] = {
    "alice": (Right.USE,),
    "bob": (Right.USE,),
    "head": (Right.USE, Right.POOL),
}


class Tokens:
    """A file with a token for each tenant."""

    def __init__(self, path: Path, tenants: Mapping[str, tuple[Right, ...]] = TENANTS) -> None:
        self.path = path
        self.of: dict[str, str] = {}
        for tenant, rights in tenants.items():
            self.add(tenant, rights)

    def add(self, tenant: str, rights: tuple[Right, ...] = (Right.USE,), expires: float | None = None) -> str:
        """A token, called as its tenant is."""
        made = self.of[tenant] = new_token()
        add_token(self.path, Token(tenant, hash_of(made), tenant, frozenset(rights), expires))
        return made


@contextmanager
def daemon_with_tokens(tokens: Tokens, **options: Any) -> Iterator[ThreadDaemon]:
    """In the clear, on loopback."""
    with thread_daemon(tokens=str(tokens.path), **options) as made:
        yield made


@contextmanager
def daemon_with_tls(authority: Authority, **options: Any) -> Iterator[ThreadDaemon]:
    """With a certificate of the authority's for localhost and 127.0.0.1, unless `tls` names another pair."""
    pair = options.pop("pair", None) or authority.server()
    listen = options.pop("listen", ("grpcs://127.0.0.1:0",))
    with thread_daemon(listen=listen, tls_certificate=pair.certificate, tls_key=pair.key, **options) as made:
        yield made


def works(session: hg.Session) -> bool:
    """Whether a session computes."""
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    g.output("y", x + 1.0)
    found = session.compile(g).run(x=np.zeros(4, np.float32), timeout=10)["y"]
    return bool((found == 1).all())
