"""`heliograph serve --share`: a certificate and a token, and the URL that holds both.

The files are made in a folder: one that is removed with the daemon, or one that the operator names,
whose URL stays the same.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from heliograph_proto.addresses import DEFAULT_PORT, DEFAULT_URL, Address, check_token
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError
from heliograph_server.auth.tokens import Token, add_token, hash_of, new_token, read_tokens
from heliograph_server.config.config import ServerConfig, Sources

#: The life of a certificate. Clients know it by its fingerprint, so a renewed one changes the URL.
DAYS = 3650
#: The name in the certificate, and that of the token.
NAME = "heliograph-share"
#: A listening address for all hosts.
EVERYWHERE = f"grpcs://0.0.0.0:{DEFAULT_PORT}"
_OWN = ("tls_certificate", "tls_key", "tls_client_ca", "tls_clients", "tokens")


@dataclass(frozen=True, slots=True)
class Share:
    """The files of a shared daemon, and what its URL holds."""

    folder: Path
    #: True if the next start has the same URL.
    is_kept: bool
    token: str = field(repr=False)
    fingerprint: str

    def settings(self, config: ServerConfig) -> Mapping[str, Any]:
        """The settings that override those of a configuration."""
        return {
            "listen": (EVERYWHERE,) if config.listen == (DEFAULT_URL,) else config.listen,
            "tls_certificate": str(self.folder / "cert.pem"),
            "tls_key": str(self.folder / "key.pem"),
            "tokens": str(self.folder / "tokens"),
        }

    def url(self, address: Address) -> str:
        """The URL for clients, which is a secret."""
        if not address.is_tls:
            return f"{address}?token={self.token}"
        here = replace(address, host=_own_address()) if _is_any(address.host) else address
        return f"{here}?token={self.token}&pin={self.fingerprint}"

    def notice(self, addresses: tuple[Address, ...]) -> str:
        """The notice for the operator: the access that the URL gives, its reach, and its end."""
        everywhere = any(not one.is_loopback for one in addresses)
        reach = "any host that reaches the port" if everywhere else "this host"
        again = f"until you remove {self.folder}" if self.is_kept else "until it stops"
        return (
            f"Clients with this URL can run graphs on the devices of this daemon, from {reach}, {again}.\n"
            "Treat it as a password. It gives no other right, and no access to other programs or files.\n"
            "  python:  hg.connect(URL)\n"
            "  shell:   export HELIOGRAPH_SERVER='URL'; heliograph devices\n"
            "Ctrl-C stops the daemon."
        )


@contextmanager
def sharing(config: ServerConfig, sources: Sources) -> Iterator[tuple[Share, Sources]]:
    """Make the files of a shared daemon, and the sources of its configuration. Raises
    ConfigurationError."""
    if named := [one for one in _OWN if getattr(config, one)]:
        raise ConfigurationError(
            f"share makes a certificate and a token of its own, and {named[0]} is set",
            advice="leave one of them out; share_folder keeps what share makes",
        )
    if config.share_folder:
        share = open_share(Path(config.share_folder), is_kept=True)
        yield share, _with(sources, share.settings(config))
        return
    with tempfile.TemporaryDirectory(prefix="heliograph-share-", ignore_cleanup_errors=True) as made:
        share = open_share(Path(made), is_kept=False)
        yield share, _with(sources, share.settings(config))


def _with(sources: Sources, settings: Mapping[str, Any]) -> Sources:
    return replace(sources, above={**sources.above, **settings})


def open_share(folder: Path, *, is_kept: bool) -> Share:
    """Make the files that a folder lacks. Raises ConfigurationError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise ConfigurationError(
                f"{folder} is open to other users, and would hold secrets", advice=f"chmod 700 {folder}"
            )
        if not ((folder / "cert.pem").exists() and (folder / "key.pem").exists()):
            _make_certificate(folder)
        encoded = ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text())
        return Share(folder, is_kept, _token(folder), hashlib.sha256(encoded).hexdigest())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"cannot share with the files in {folder}: {why}", advice="name another share_folder"
        ) from None


def _token(folder: Path) -> str:
    """The folder's token, which its file of tokens has. Raises ConfigurationError, OSError."""
    secret, tokens = folder / "token", folder / "tokens"
    if secret.exists() and tokens.exists():
        try:
            found = check_token(secret.read_text().strip())
        except (InvalidArgumentError, UnicodeDecodeError):
            found = ""
        if found and any(one.hash == hash_of(found) for one in read_tokens(str(tokens))):
            return found
        raise ConfigurationError(
            f"the token in {secret} is not one of {tokens}: it was revoked",
            advice=f"remove {secret} and {tokens} to make a new one",
        )
    if tokens.exists():
        raise ConfigurationError(
            f"{folder} has a file of tokens, but no token", advice=f"remove {tokens} to make a new one"
        )
    made = new_token()
    add_token(tokens, Token(NAME, hash_of(made)))
    _write(secret, made.encode() + b"\n")
    return made


def _make_certificate(folder: Path) -> None:
    """Make a self-signed certificate and its key. Raises ConfigurationError, OSError."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise ConfigurationError(
            "share needs cryptography, which makes its certificate", advice="pip install 'heliograph[share]'"
        ) from None
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=DAYS))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(folder / "key.pem", secret)
    _write(folder / "cert.pem", certificate.public_bytes(encoding))


def _write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)


def _is_any(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _own_address() -> str:
    """The address of this host towards other networks, or its name. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect(("192.0.2.1", 9))
            return str(asking.getsockname()[0])
    except OSError:
        return socket.gethostname()
