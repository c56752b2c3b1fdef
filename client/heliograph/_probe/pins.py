"""Daemons whose certificate a URL names by its fingerprint: grpcs://HOST:PORT?pin=FINGERPRINT.

gRPC has no check of fingerprints. So Python's TLS fetches the certificate, and only one with the
expected fingerprint becomes the channel's single authority. The program that answers gRPC's own
handshake then needs the key of that very certificate.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.errors import UnavailableError

#: The time for fetching a certificate where no other limit is given.
PIN_SECONDS = 10.0
#: The most certificates that are remembered.
MOST_KNOWN = 256


@dataclass(frozen=True, slots=True)
class PinnedCertificate:
    """A certificate with the expected fingerprint, in PEM, and a name that it is for."""

    pem: bytes
    name: str


#: Certificates by fingerprint, which identifies them for good.
_known: dict[str, PinnedCertificate] = {}


def pinned(address: Address, credentials: Credentials, seconds: float = PIN_SECONDS) -> PinnedCertificate:
    """Return the certificate of a daemon with a pin. Blocks, unless it is known already.

    Raises UnavailableError if it has another fingerprint, or cannot be fetched within `seconds`.
    """
    if (found := _known.get(address.pin)) is not None:
        return found
    seconds = max(seconds, 0.001)
    try:
        encoded = check_pin(address, credentials, seconds)
        pem = ssl.DER_cert_to_PEM_cert(encoded)
        made = PinnedCertificate(pem.encode(), _name(address, credentials, pem, seconds))
    except UnavailableError:
        raise  # it is an OSError too
    except (OSError, UnicodeError) as error:
        raise _unreachable(address, error, seconds) from None
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[address.pin] = made
    return made


def check_pin(address: Address, credentials: Credentials, seconds: float) -> bytes:
    """Fetch the certificate that a daemon presents now, encoded. Raises UnavailableError if it has
    another fingerprint, and OSError."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    encoded, _ = _presented(asking, address, credentials, seconds)
    found = hashlib.sha256(encoded).hexdigest()
    if not compare_digest(found, address.pin):
        raise UnavailableError(
            f"the certificate of {address.scheme}://{address.host_port} has the fingerprint {found}, not "
            f"{address.pin}",
            advice="ask for a new URL if the daemon was started again with --share; otherwise another "
            "program answers in its place, so send it no token",
        )
    return encoded


def _name(address: Address, credentials: Credentials, pem: str, seconds: float) -> str:
    """A name that a certificate is for. Raises OSError if it is not valid."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    asking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asking.load_verify_locations(cadata=pem)
    _, found = _presented(asking, address, credentials, seconds)
    names = dict(reversed(found.get("subjectAltName", ())))
    common = (value for part in found.get("subject", ()) for key, value in part if key == "commonName")
    name = names.get("DNS") or names.get("IP Address") or next(common, address.host)
    return str(name).replace("*", "any")


def _presented(
    asking: ssl.SSLContext, address: Address, credentials: Credentials, seconds: float
) -> tuple[bytes, dict[str, Any]]:
    asking.set_alpn_protocols(["h2"])
    if credentials.certificate:
        asking.load_cert_chain(credentials.certificate, credentials.key)
    with (
        socket.create_connection((address.host, address.port), timeout=seconds) as plain,
        asking.wrap_socket(plain, server_hostname=address.tls_name or address.host) as made,
    ):
        return made.getpeercert(binary_form=True) or b"", dict(made.getpeercert() or {})


def _unreachable(address: Address, error: Exception, seconds: float) -> UnavailableError:
    advice = "is the daemon running, and does no firewall block the port? is it the right URL?"
    match error:
        case ssl.SSLCertVerificationError():
            why = f"its certificate is not accepted: {error.verify_message}"
            advice = "ask for a URL with a new certificate"
        case ssl.SSLError():
            why = "the program there does not complete a TLS handshake"
        case ConnectionRefusedError():
            why = "connection refused"
        case TimeoutError():
            why = f"no reply within {seconds:g} s"
        case socket.gaierror() | UnicodeError():
            why = f"the name {address.host!r} does not resolve"
        case _:
            why = str(getattr(error, "strerror", None) or error).lower()
    return UnavailableError(f"no server answers at {address}: {why}", advice=advice)
