"""The certificate that a daemon shows, and whose certificates it takes: from files, read when they change.

Connections live on with the certificate that they began with; new ones see the new one. What cannot be used
then changes nothing, and is a line in the log.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from heliograph_proto.errors import ConfigurationError

logger = logging.getLogger(__name__)

#: Warned of when less is left.
SOON_SECONDS = 14 * 86_400.0
#: By OpenSSL's numbers (X509_V_ERR_...).
_UNUSABLE = {
    9: ("is not valid yet", "is this host's clock right? else wait, or have it made anew"),
    10: ("has expired", "renew it"),
    26: ("is not one for servers", "have it made with the purpose serverAuth"),
}


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate with those that vouch for it behind it, its key, and authorities of clients
    (empty: clients are asked for none)."""

    certificate: str
    key: str
    client_ca: str = ""


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """What was in the files, and until when it is good, in seconds since 1970."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    expires: float

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """As gRPC takes it."""
        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=self.client_ca)


def load(files: CertificateFiles) -> LoadedCertificate:
    """Reads and checks. Raises ConfigurationError, which names the file and what is wrong with it."""
    certificate = _read(files.certificate, "tls_certificate")
    key = _read(files.key, "tls_key")
    client_ca = _read(files.client_ca, "tls_client_ca") if files.client_ca else None
    expires = _good_until(files)
    if files.client_ca:
        _check_authorities(files.client_ca)
    return LoadedCertificate(certificate, key, client_ca, expires)


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
            f"tls_client_ca {path} has no certificate that can be read", advice="it names a PEM file"
        ) from None


def _good_until(files: CertificateFiles) -> float:
    """Raises ConfigurationError for a certificate or a key that no client would take."""
    shown = _showing(files)
    try:
        found = _seen_by_a_client(shown, files.certificate)
    except ssl.SSLCertVerificationError as error:
        raise _unusable(error, files.certificate) from None
    except ssl.SSLError as error:
        why = f"tls_certificate {files.certificate} cannot be shown: {error.reason or error}"
        raise ConfigurationError(why, advice="have it made anew, with a key of RSA or ECDSA") from None
    return float(ssl.cert_time_to_seconds(str(found["notAfter"])))


def _showing(files: CertificateFiles) -> ssl.SSLContext:
    """What shows the certificate. Raises ConfigurationError."""
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        shown.load_cert_chain(files.certificate, files.key, password=_no_password)
    except _PasswordError:
        raise ConfigurationError(
            f"tls_key {files.key} is encrypted", advice="write it without a password, and chmod 600 it"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(
                f"tls_key {files.key} is not the key of tls_certificate {files.certificate}",
                advice="name the two that were made together; the certificate itself comes first in its file",
            ) from None
        setting, path = (
            ("tls_key", files.key) if _has_certificate(files) else ("tls_certificate", files.certificate)
        )
        what = "private key" if setting == "tls_key" else "certificate"
        raise ConfigurationError(
            f"{setting} {path} has no {what} that can be read", advice=f"{setting} names a PEM file"
        ) from None
    return shown


class _PasswordError(Exception):
    """Somebody asks for the password of a key."""


def _no_password() -> str:
    raise _PasswordError


def _has_certificate(files: CertificateFiles) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(files.certificate)
    except (ssl.SSLError, OSError):
        return False
    return True


def _seen_by_a_client(shown: ssl.SSLContext, certificate: str) -> dict[str, Any]:
    """The certificate as a client finds it that trusts it, by a handshake in memory: Python reads none
    otherwise. Raises ssl.SSLError."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    # The certificate itself is trusted, so that what is wrong with it alone shows.
    asking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asking.load_verify_locations(certificate)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(down, up)
    server = shown.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for one in (client, server):
            try:
                one.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(client.getpeercert() or {})


def _unusable(error: ssl.SSLCertVerificationError, path: str) -> ConfigurationError:
    why, advice = _UNUSABLE.get(
        error.verify_code, (f"is not accepted: {error.verify_message}", "have it made anew")
    )
    return ConfigurationError(f"tls_certificate {path} {why}", advice=advice)


class ServerCertificates:
    """What a daemon shows to those who connect. gRPC's threads ask it for each connection."""

    def __init__(self, files: CertificateFiles, say: Callable[[int, str], None] = logger.log) -> None:
        """Raises ConfigurationError. `say` writes a line to the log, from gRPC's threads too."""
        self._files, self._say = files, say
        self._seen = self._signature()
        self.loaded = load(files)
        self._warn()

    def credentials(self) -> grpc.ServerCredentials:
        """For a server's port."""
        return grpc.dynamic_ssl_server_credentials(
            self.loaded.configuration(),
            self._changed,  # type: ignore[arg-type]
            require_client_authentication=bool(self._files.client_ca),
        )

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        paths = self._files.certificate, self._files.key, self._files.client_ca
        return tuple(_signature(path) if path else None for path in paths)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC is to show from now on; None: what it has. Never raises."""
        try:
            return self.refresh()
        except Exception as error:
            self._say(logging.ERROR, f"the certificate that was in force stays so: {error!r}")
            return None

    def refresh(self) -> grpc.ServerCertificateConfiguration | None:
        """Reads the files again if they have changed; None if not, or if they cannot be used."""
        seen = self._signature()
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            self.loaded = load(self._files)
        except ConfigurationError as error:
            self._say(logging.ERROR, f"the certificate that was in force stays so: {error.in_a_line()}")
            return None
        self._say(logging.INFO, f"{self._files.certificate} was read again")
        self._warn()
        return self.loaded.configuration()

    def _warn(self) -> None:
        until = datetime.fromtimestamp(self.loaded.expires, UTC)
        if (until - datetime.now(UTC)).total_seconds() < SOON_SECONDS:
            name = self._files.certificate
            self._say(logging.WARNING, f"tls_certificate {name} expires at {until.isoformat()}")


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
