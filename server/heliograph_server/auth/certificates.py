"""The certificate of a daemon and the authorities of its clients, from files that are read when
they change.

Connections keep the certificate that they started with; new ones use the new one. An unusable new
certificate is logged, and the old one stays in use.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from heliograph_proto.errors import ConfigurationError

logger = logging.getLogger(__name__)

#: The remaining time below which a warning is logged.
SOON_SECONDS = 14 * 86_400.0
#: Causes and advice by OpenSSL's numbers (X509_V_ERR_...).
_UNUSABLE = {
    9: ("is not valid yet", "check this host's clock, wait, or issue a new one"),
    10: ("has expired", "renew it"),
    26: ("is not a server certificate", "issue one with the purpose serverAuth"),
}


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate followed by its chain, its key, and the authorities of clients
    (empty: client certificates are not required)."""

    certificate: str
    key: str
    client_ca: str = ""


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """The content of the files, and the expiry in seconds since 1970."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    expires: float
    #: The same for servers of HTTP, which ask clients for no certificate.
    context: ssl.SSLContext = field(repr=False)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The configuration for gRPC."""
        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=self.client_ca)


def load(files: CertificateFiles) -> LoadedCertificate:
    """Read and check the files. Raises ConfigurationError with the file and the problem."""
    certificate = _read(files.certificate, "tls_certificate")
    key = _read(files.key, "tls_key")
    client_ca = _read(files.client_ca, "tls_client_ca") if files.client_ca else None
    context = _server_context(files)
    expires = _expiry(context, files)
    if files.client_ca:
        _check_authorities(files.client_ca)
    return LoadedCertificate(certificate, key, client_ca, expires, context)


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {setting} {path}: {error.strerror}", advice=f"{setting} names a PEM file"
        ) from None


def _check_authorities(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError):
        raise ConfigurationError(
            f"tls_client_ca {path} has no readable certificate", advice="tls_client_ca names a PEM file"
        ) from None


def _expiry(context: ssl.SSLContext, files: CertificateFiles) -> float:
    """Return the expiry. Raises ConfigurationError for a certificate or key that clients would
    reject."""
    try:
        found = _seen_by_client(context, files.certificate)
    except ssl.SSLCertVerificationError as error:
        why, advice = _UNUSABLE.get(
            error.verify_code, (f"is not accepted: {error.verify_message}", "issue a new one")
        )
        raise ConfigurationError(f"tls_certificate {files.certificate} {why}", advice=advice) from None
    except ssl.SSLError as error:
        why = f"tls_certificate {files.certificate} cannot be used: {error.reason or error}"
        raise ConfigurationError(why, advice="issue a new one, with an RSA or ECDSA key") from None
    return float(ssl.cert_time_to_seconds(str(found["notAfter"])))


def _server_context(files: CertificateFiles) -> ssl.SSLContext:
    """A context with the certificate and its key. Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except _PasswordError:
        raise ConfigurationError(
            f"tls_key {files.key} is encrypted", advice="write it without a password, and chmod 600 it"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(
                f"tls_key {files.key} is not the key of tls_certificate {files.certificate}",
                advice="give a matching pair; the certificate itself comes first in its file",
            ) from None
        setting, path = (
            ("tls_key", files.key) if _has_certificate(files) else ("tls_certificate", files.certificate)
        )
        what = "private key" if setting == "tls_key" else "certificate"
        raise ConfigurationError(
            f"{setting} {path} has no readable {what}", advice=f"{setting} names a PEM file"
        ) from None
    return context


class _PasswordError(Exception):
    """A key is encrypted."""


def _no_password() -> str:
    raise _PasswordError


def _has_certificate(files: CertificateFiles) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(files.certificate)
    except (ssl.SSLError, OSError):
        return False
    return True


def _seen_by_client(context: ssl.SSLContext, certificate: str) -> dict[str, Any]:
    """Return the certificate as a client that trusts it sees it, by a handshake in memory.

    Python has no other way to read a certificate. Raises ssl.SSLError.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    # The certificate itself is trusted, so that only its own problems show.
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(down, up)
    server = context.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for one in (client, server):
            try:
                one.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(client.getpeercert() or {})


class ServerCertificates:
    """The current certificate of a daemon. gRPC's threads request it for each connection."""

    def __init__(self, files: CertificateFiles, log: Callable[[int, str], None] = logger.log) -> None:
        """Load the files. `log` is called on gRPC's threads too. Raises ConfigurationError."""
        self._files, self._log = files, log
        #: How often a new certificate came into use ("ok"), or was rejected ("failed").
        self.outcomes = Counter(ok=0, failed=0)
        #: Why the latest certificate is not in use; empty if it is.
        self.problem = ""
        self._lock = threading.Lock()
        self._seen = self._found = self._signature()
        #: The certificate that gRPC has.
        self._given = self.loaded = load(files)
        self._warn()

    def credentials(self) -> grpc.ServerCredentials:
        """The credentials of a server's port."""
        return grpc.dynamic_ssl_server_credentials(
            self.loaded.configuration(),
            self._changed,  # type: ignore[arg-type]
            require_client_authentication=bool(self._files.client_ca),
        )

    def http_context(self) -> ssl.SSLContext:
        """The context of a server of HTTP: each connection gets the certificate of its time."""

        def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._newest().context

        # Handshakes begin with this one, also those of clients that name no server.
        context = _server_context(self._files)
        context.sni_callback = choose
        return context

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        paths = self._files.certificate, self._files.key, self._files.client_ca
        return tuple(_signature(path) if path else None for path in paths)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration for gRPC, or None if nothing changed. Never raises."""
        try:
            newest = self._newest()
            with self._lock:
                if self._given is newest:
                    return None
                self._given = newest
            return newest.configuration()
        except Exception as error:
            self._log(logging.ERROR, f"the certificate in use stays in use: {error!r}")
            return None

    def _newest(self) -> LoadedCertificate:
        """The certificate of a handshake that begins now. Never raises."""
        try:
            self.refresh()
        except Exception as error:
            self._log(logging.ERROR, f"the certificate in use stays in use: {error!r}")
        return self.loaded

    def look(self, at_once: bool = False) -> None:
        """Read changed files without waiting for a connection. The files are replaced one after the
        other, so a change counts once two checks agree, or `at_once`."""
        found = self._signature()
        settled, self._found = found == self._found, found
        if settled or at_once:
            self.refresh()

    def refresh(self) -> None:
        """Read the files again if they have changed. A problem is logged."""
        with self._lock:
            seen = self._signature()
            if seen == self._seen:
                return
            self._seen = seen
            try:
                self.loaded = load(self._files)
            except ConfigurationError as error:
                self.problem = error.in_a_line()
                self.outcomes["failed"] += 1
                self._log(logging.ERROR, f"the certificate in use stays in use: {self.problem}")
                return
            self.problem = ""
            self.outcomes["ok"] += 1
        self._log(logging.INFO, f"reloaded {self._files.certificate}")
        self._warn()

    def _warn(self) -> None:
        until = datetime.fromtimestamp(self.loaded.expires, UTC)
        if (until - datetime.now(UTC)).total_seconds() < SOON_SECONDS:
            name = self._files.certificate
            self._log(logging.WARNING, f"tls_certificate {name} expires at {until.isoformat()}")


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
