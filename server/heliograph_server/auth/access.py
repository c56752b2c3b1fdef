"""What a daemon knows of those who may connect, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
from grpc import aio

from heliograph_proto.addresses import Address
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.certificates import CertificateFiles, ServerCertificates
from heliograph_server.auth.interceptor import AuthInterceptor
from heliograph_server.auth.tokens import (
    Token,
    TokenFile,
    add_token,
    hash_of,
    may_be_read_by_all,
    new_token,
    read_tokens,
)
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.exposure import check_together
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: Sessions of tokens that were taken back or have expired end within twice this time.
SWEEP_SECONDS = 1.0
FIRST_NAME = "first"


class Access:
    """Tokens, certificates and the gate, as a configuration says."""

    def __init__(self, config: ServerConfig) -> None:
        """Reads the files; makes a file of tokens that is not there. Raises ConfigurationError. On the event
        loop of the server."""
        check_together(config)
        #: The token that was made here, to be shown once; empty if none was.
        self.first_token = ""
        self._was_shown = False
        if config.tokens and not Path(config.tokens).exists():
            self.first_token = _make_first(Path(config.tokens))
        self.tokens = TokenFile(config.tokens) if config.tokens else None
        if config.tokens and may_be_read_by_all(config.tokens):
            logger.warning("%s may be read by everybody; it has hashes alone, and names", config.tokens)
        self.certificates = _certificates(config)
        asks = self.tokens is not None or bool(config.tls_client_ca)
        self.gate = AuthInterceptor(self.tokens, config.quota) if asks else None
        self._quota = config.quota
        #: Of tokens, by their hash, as they were told last.
        self._quotas: dict[str, Quota] = {}
        self._sweeper: asyncio.Task[None] | None = None
        _warn(config)

    @property
    def interceptors(self) -> Sequence[aio.ServerInterceptor]:
        """Of the server; none where nobody is asked."""
        return (self.gate,) if self.gate is not None else ()

    def credentials(self, address: Address) -> grpc.ServerCredentials | None:
        """With what a server listens there; None: in the clear."""
        if not address.is_tls:
            return None
        assert self.certificates is not None, "the configuration was checked"
        return self.certificates.credentials()

    def shown(self, address: Address) -> str:
        """The URL that is ready to be used; with the first token, if one was made."""
        if not self.first_token:
            return str(address)
        self._was_shown = True
        return f"{address}?token={self.first_token}"

    def certificate_expiry(self) -> float | None:
        """Until when its certificate is good, in seconds since 1970; None: it has none."""
        return self.certificates.loaded.expires if self.certificates is not None else None

    def why_not(self, principal: Principal) -> HeliographError | None:
        """Why somebody who was let in once is not any more: for calls that go on for long."""
        return self.tokens.why_not(principal) if self.tokens is not None else None

    def use_quota(self, quota: Quota, host: Host | None) -> None:
        """From now on tenants have this, unless their tokens say otherwise."""
        self._quota = quota
        if self.gate is not None:
            self.gate.quota = quota
        if host is not None:
            self._tell_quotas(host)

    def _tell_quotas(self, host: Host) -> None:
        """What changed of what tenants may have; of one that has several tokens, the last one counts."""
        if self.tokens is None:
            # Everybody, or those who were known by their certificates.
            for tenant in {"", *(one.tenant for one in host.tenants())}:
                host.set_quota(tenant, self._quota)
            return
        for one in self.tokens.all:
            quota = one.principal(self._quota).quota
            if self._quotas.get(one.hash) != quota:
                self._quotas[one.hash] = quota
                host.set_quota(one.tenant, quota)

    def watch(self, host: Host) -> None:
        """From now on sessions end with their tokens."""
        if self.tokens is not None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(host, self.tokens))

    async def _sweep(self, host: Host, tokens: TokenFile) -> None:
        # Of the last look: a file may be written in several steps, and no session is to end by the first.
        doubted: set[str] = set()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                tokens.refresh(in_doubt=True)
                self._tell_quotas(host)
                before, doubted = doubted, set()
                host.end_sessions(partial(_why_ended, tokens, before, doubted))
            except Exception:
                logger.exception("sessions of tokens that are not in force could not be ended")

    async def close(self) -> None:
        """Idempotent."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
        if self.first_token and not self._was_shown and self.tokens is not None:
            _forget_first(Path(self.tokens.path), self.first_token)
            self.first_token = ""


def _why_ended(
    tokens: TokenFile, before: set[str], doubted: set[str], principal: Principal
) -> HeliographError | None:
    """Why sessions of a principal end; not before this look and the one `before` it agree."""
    if (error := tokens.why_not(principal)) is None:
        return None
    doubted.add(principal.key)
    return error if principal.key in before else None


def _make_first(path: Path) -> str:
    made = new_token()
    rights = frozenset((Right.USE, Right.ADMIN))
    add_token(path, Token(FIRST_NAME, hash_of(made), rights=rights))
    logger.info("%s was made, with a first token", path)
    return made


def _forget_first(path: Path, made: str) -> None:
    """A first token that nobody was shown would keep the next start from making another."""
    with suppress(HeliographError, OSError):
        if [one.hash for one in read_tokens(str(path))] == [hash_of(made)]:
            path.unlink()
            logger.info("%s was taken away again: nobody was shown its token", path)


def _certificates(config: ServerConfig) -> ServerCertificates | None:
    if not any(one.is_tls for one in config.addresses):
        return None
    files = CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
    return ServerCertificates(files, partial(_say, asyncio.get_running_loop()))


def _say(loop: asyncio.AbstractEventLoop, level: int, text: str) -> None:
    """Writes to the log on the loop's thread: gRPC's, which ask for certificates, are none of Python's."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(logger.log, level, "%s", text)


def _warn(config: ServerConfig) -> None:
    for address in config.addresses:
        if not address.is_loopback and not address.is_tls and config.tokens:
            logger.warning(
                "tokens come to %s in the clear, where others may read them; grpcs:// is encrypted",
                address,
            )
