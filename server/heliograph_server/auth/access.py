"""Access to a daemon, from its start to its end: tokens, certificates, quotas and the
interceptor."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from heliograph_proto.addresses import Address
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.certificates import CertificateFiles, ServerCertificates
from heliograph_server.auth.clients import ClientCertificates
from heliograph_server.auth.files import AccessFile, may_be_read_by_all
from heliograph_server.auth.interceptor import AuthInterceptor
from heliograph_server.auth.tokens import (
    Token,
    TokenFile,
    add_token,
    hash_of,
    new_token,
    read_tokens,
)
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.exposure import check_together
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: Sessions of revoked and expired tokens end within twice this time.
SWEEP_SECONDS = 1.0
FIRST_NAME = "first"


class Access:
    """Tokens, certificates and the interceptor of a configuration."""

    def __init__(self, config: ServerConfig, refused: Counter[int]) -> None:
        """Read the files, and create a missing file of tokens. Raises ConfigurationError.

        Called on the event loop of the server. `refused` counts refused calls by reason.
        """
        check_together(config)
        #: The token that was created here, to be printed once; empty if there is none.
        self.first_token = ""
        self._was_shown = False
        if config.tokens and not Path(config.tokens).exists():
            self.first_token = _make_first(Path(config.tokens))
        self.tokens = TokenFile(config.tokens) if config.tokens else None
        if config.tokens and may_be_read_by_all(config.tokens):
            logger.warning("%s is readable by all users; it holds names and hashes only", config.tokens)
        self.certificates = _certificates(config)
        self.clients = (
            None if self.tokens or not config.tls_client_ca else ClientCertificates(config.tls_clients)
        )
        callers = self.tokens or self.clients
        self.gate = AuthInterceptor(callers, config.quota, refused) if callers is not None else None
        self._quota = config.quota
        #: The quotas of tokens by hash, as the host has them.
        self._quotas: dict[str, Quota] = {}
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def interceptors(self) -> Sequence[aio.ServerInterceptor]:
        """The server's interceptors; none without authentication."""
        return (self.gate,) if self.gate is not None else ()

    def credentials(self, address: Address) -> grpc.ServerCredentials | None:
        """The credentials of the listening port of an address, or None for plain text."""
        if not address.is_tls:
            return None
        assert self.certificates is not None, "the configuration was checked"
        return self.certificates.credentials()

    def http_context(self, address: Address) -> ssl.SSLContext | None:
        """The context of a server of HTTP at an address, or None for plain text."""
        if not address.is_tls:
            return None
        assert self.certificates is not None, "the configuration was checked"
        return self.certificates.http_context()

    def shown(self, address: Address) -> str:
        """The URL for clients, with the first token if one was created."""
        if not self.first_token:
            return str(address)
        self._was_shown = True
        return f"{address}?token={self.first_token}"

    @property
    def files(self) -> Iterator[tuple[str, ServerCertificates | AccessFile[Any]]]:
        """The files that are read again, each with its kind for `FileWatch`."""
        if self.tokens is not None:
            yield "tokens", self.tokens.file
        if self.clients is not None and self.clients.file is not None:
            yield "certificates", self.clients.file
        if self.certificates is not None:
            yield "certificates", self.certificates

    def certificate_expiry(self) -> float | None:
        """The expiry of the certificate, in seconds since 1970; None without one."""
        return self.certificates.loaded.expires if self.certificates is not None else None

    def why_not(self, principal: Principal) -> HeliographError | None:
        """The reason why a principal has lost its access, or None; for long calls."""
        callers = self.tokens or self.clients
        return callers.why_not(principal) if callers is not None else None

    def use_quota(self, quota: Quota, host: Host | None) -> None:
        """Set the quota of tenants whose tokens have none of their own."""
        self._quota = quota
        if self.gate is not None:
            self.gate.quota = quota
        if host is not None:
            self._update_quotas(host)

    def _update_quotas(self, host: Host) -> None:
        """Pass changed quotas to the host. If a tenant has several tokens, the last one counts."""
        if self.clients is not None:
            for session in host.sessions:
                principal = session.principal
                if principal.is_daemon:
                    continue
                host.set_quota(principal.tenant, self.clients.quota_of(principal, self._quota))
            return
        if self.tokens is None:
            host.set_quota("", self._quota)  # of all callers
            return
        for one in self.tokens.all:
            quota = one.principal(self._quota).quota
            if self._quotas.get(one.hash) != quota:
                self._quotas[one.hash] = quota
                host.set_quota(one.tenant, quota)

    def watch(self, host: Host) -> None:
        """Start to end sessions whose tokens are revoked or expire, or whose certificates have
        other rights."""
        if (callers := self.tokens or self.clients) is not None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(host, callers))

    async def _sweep(self, host: Host, callers: TokenFile | ClientCertificates) -> None:
        # Principals of the last check: a file may be written in several steps, and a session must
        # not end at the first.
        doubted: set[str] = set()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                callers.refresh(in_doubt=True)
                self._update_quotas(host)
                before, doubted = doubted, set()
                host.end_sessions(partial(_why_ended, callers, before, doubted))
            except Exception:
                logger.exception("cannot end the sessions of callers without access")

    async def close(self) -> None:
        """End the checks, and remove a token file whose first token was never printed.
        Idempotent."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
        if self.first_token and not self._was_shown and self.tokens is not None:
            _forget_first(Path(self.tokens.path), self.first_token)
            self.first_token = ""


def _why_ended(
    callers: TokenFile | ClientCertificates, before: set[str], doubted: set[str], principal: Principal
) -> HeliographError | None:
    """The reason to end the sessions of a principal, once this check and the one before agree."""
    if principal.is_daemon or (error := callers.why_not(principal)) is None:
        return None
    doubted.add(principal.key)
    return error if principal.key in before else None


def _make_first(path: Path) -> str:
    made = new_token()
    rights = frozenset((Right.USE, Right.ADMIN))
    add_token(path, Token(FIRST_NAME, hash_of(made), rights=rights))
    logger.info("created %s with a first token", path)
    return made


def _forget_first(path: Path, made: str) -> None:
    """Remove a file with only a first token that was never printed; it would keep the next start
    from creating another."""
    with suppress(HeliographError, OSError):
        if [one.hash for one in read_tokens(str(path))] == [hash_of(made)]:
            path.unlink()
            logger.info("removed %s: its token was never printed", path)


def _certificates(config: ServerConfig) -> ServerCertificates | None:
    if not any(one.is_tls for one in config.exposed):
        return None
    files = CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
    return ServerCertificates(files, partial(_log, asyncio.get_running_loop()))


def _log(loop: asyncio.AbstractEventLoop, level: int, text: str) -> None:
    """Log on the loop's thread: gRPC requests certificates on threads that Python did not start."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(logger.log, level, "%s", text)
