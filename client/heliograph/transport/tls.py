"""Certificates of clients and daemons: read from files, and asked why they were not accepted.

gRPC says little of a connection that did not come about. So Python's own TLS tries the same once more, for a
bounded time, and its answer is put in words.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.errors import InvalidArgumentError

#: How long a daemon is asked why it does not answer.
PROBE_SECONDS = 1.0
#: How long to wait for a daemon's word on a certificate of ours: with TLS 1.3 it comes after the handshake.
WORD_SECONDS = 0.5
_OWN = "certificate=FILE and key=FILE, or $HELIOGRAPH_CERTIFICATE and $HELIOGRAPH_KEY"

#: OpenSSL's numbers (X509_V_ERR_...) for what may be wrong with a certificate.
_EXPIRED, _NOT_YET = 10, 9
_SELF_SIGNED = (18, 19)
_NO_ISSUER = (2, 20, 21)
_WRONG_NAME = (62, 64)


@dataclass(frozen=True, slots=True)
class TlsDiagnosis:
    """Why there is no connection, and what to do."""

    cause: str
    advice: str
    #: Whether the daemon does not know who asks, rather than the other way round.
    is_about_us: bool = False


def read_pem(credentials: Credentials) -> tuple[bytes | None, bytes | None, bytes | None]:
    """The authorities, the certificate and the key, as gRPC takes them. Raises InvalidArgumentError."""
    ca = _read(credentials.ca, "ca") if credentials.ca else None
    certificate = _read(credentials.certificate, "certificate") if credentials.certificate else None
    key = _read(credentials.key, "key") if credentials.key else None
    if credentials.ca or credentials.certificate:
        # Else nothing can be wrong, and reading the system's authorities takes a tenth of a second.
        context(credentials)
    return ca, certificate, key


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read {name} {path!r}: {error.strerror}", advice=f"{name}= names a PEM file"
        ) from None


def context(credentials: Credentials) -> ssl.SSLContext:
    """What Python needs to do what gRPC does. Raises InvalidArgumentError for files that cannot be used."""
    made = ssl.create_default_context()
    made.set_alpn_protocols(["h2"])
    if credentials.ca:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.set_alpn_protocols(["h2"])
        try:
            made.load_verify_locations(credentials.ca)
        except (ssl.SSLError, OSError):
            raise InvalidArgumentError(
                f"ca {credentials.ca!r} has no certificate that can be read", advice="ca= names a PEM file"
            ) from None
    if credentials.certificate:
        _load_own(made, credentials)
    return made


def _load_own(made: ssl.SSLContext, credentials: Credentials) -> None:
    try:
        made.load_cert_chain(credentials.certificate, credentials.key, password=_no_password)
    except ssl.SSLError as error:
        why = (
            "it is not the key of this certificate"
            if error.reason == "KEY_VALUES_MISMATCH"
            else "one of them is no PEM file of a certificate or a key"
        )
        raise InvalidArgumentError(
            f"certificate {credentials.certificate!r} and key {credentials.key!r}: {why}",
            advice="certificate= and key= name PEM files that belong together, the key without a password",
        ) from None


def _no_password() -> str:
    return ""


def why_no_tls(address: Address, credentials: Credentials) -> TlsDiagnosis | None:
    """Why a grpcs:// daemon that accepts connections was not spoken with; None if nothing is found."""
    tls = context(credentials)
    try:
        with (
            _connected(address) as plain,
            tls.wrap_socket(plain, server_hostname=address.tls_name or address.host) as made,
        ):
            if made.selected_alpn_protocol() == "h2":
                _hear(made)
    except OSError as error:
        return _in_words(error, address, credentials)
    except ValueError:
        pass  # a name that is none
    return None


def why_no_plaintext(address: Address) -> TlsDiagnosis | None:
    """Whether a grpc:// address is one where TLS is spoken; None if not."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    asking.set_alpn_protocols(["h2"])
    try:
        with _connected(address) as plain, asking.wrap_socket(plain):
            pass
    except (OSError, ValueError):
        return None
    return TlsDiagnosis(
        "the daemon there speaks TLS, and was spoken to in the clear",
        f"use grpcs://{address.host_port}, and ca=FILE (or $HELIOGRAPH_CA) if the authority is your own",
    )


def _connected(address: Address) -> socket.socket:
    made = socket.create_connection((address.host, address.port), timeout=PROBE_SECONDS)
    made.settimeout(PROBE_SECONDS)
    return made


def _hear(made: ssl.SSLSocket) -> None:
    """Waits for the first bytes that the daemon says, perhaps why it will say no more. Raises OSError."""
    made.settimeout(WORD_SECONDS)
    try:
        # Nothing is sent: a daemon that closes with something unread takes back what it said of us.
        if not made.recv(4096):
            raise _ClosedError
    except TimeoutError:
        pass


class _ClosedError(ConnectionError):
    """The other side closed without a word."""


def _in_words(error: OSError, address: Address, credentials: Credentials) -> TlsDiagnosis | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(error, address, credentials)
    if isinstance(error, _ClosedError):
        return _closed(credentials)
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "ALERT" in reason:
        return _alert(reason, credentials)
    without = f"a daemon without TLS is at grpc://{address.host_port}"
    if isinstance(error, ConnectionError | ssl.SSLEOFError | TimeoutError):
        cause = "it takes connections, but does not complete a TLS handshake"
        return TlsDiagnosis(cause, f"is it the right port? {without}")
    if isinstance(error, ssl.SSLError):
        cause = "what answers there does not speak TLS"
        return TlsDiagnosis(cause, f"{without}; to speak TLS it needs tls_certificate and tls_key")
    return None


def _closed(credentials: Credentials) -> TlsDiagnosis:
    """gRPC's servers do so when they are shown no certificate, or one that they do not accept."""
    shown = f"the certificate {credentials.certificate} that was shown"
    if not credentials.certificate:
        return TlsDiagnosis(
            "it asks for a certificate, it seems, and none was shown", f"show one: {_OWN}", True
        )
    wrong = _verified(credentials)
    if wrong == _EXPIRED:
        return TlsDiagnosis(f"{shown} has expired", f"renew it: {_OWN}", True)
    if wrong == _NOT_YET:
        return TlsDiagnosis(f"{shown} is not valid yet", "is this host's clock right? else wait", True)
    advice = f"show one of an authority that the daemon's operator named: {_OWN}"
    return TlsDiagnosis(
        f"{shown} is not accepted, or of an authority that the daemon does not know", advice, True
    )


def _verified(credentials: Credentials) -> int:
    """What OpenSSL finds wrong with our own certificate, for somebody who trusts it; 0: nothing."""
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    shown.check_hostname, shown.verify_mode = False, ssl.CERT_NONE
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asking.verify_mode = ssl.CERT_REQUIRED
    asking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asking.load_verify_locations(credentials.certificate)
    for one in (shown, asking):
        one.load_cert_chain(credentials.certificate, credentials.key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = shown.wrap_bio(down, up), asking.wrap_bio(up, down, server_side=True)
    try:
        for side in sides * 3:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_code
    except ssl.SSLError:
        pass
    return 0


def _certificate(
    error: ssl.SSLCertVerificationError, address: Address, credentials: Credentials
) -> TlsDiagnosis:
    name = address.tls_name or address.host
    trusted = credentials.ca or "the system's authorities"
    another = "name the authority's file: ca=FILE, or $HELIOGRAPH_CA"
    code = error.verify_code
    if code == _EXPIRED:
        return TlsDiagnosis(
            "its certificate has expired", "have whoever runs the daemon renew it; it need not restart"
        )
    if code == _NOT_YET:
        clock = "is this host's clock right? else wait, or have the certificate made anew"
        return TlsDiagnosis("its certificate is not valid yet", clock)
    if code in _SELF_SIGNED:
        cause = f"its certificate is self-signed, or of an authority that is not among {trusted}"
        return TlsDiagnosis(cause, another)
    if code in _NO_ISSUER:
        return TlsDiagnosis(f"its certificate is of an authority that is not among {trusted}", another)
    if code in _WRONG_NAME:
        tunnel = f"grpcs://{address.host_port}?tls_name=NAME"
        return TlsDiagnosis(
            f"its certificate is not for {name!r}",
            f"use a name that is in it; through a tunnel, say for which name it is: {tunnel}",
        )
    return TlsDiagnosis(
        f"its certificate is not accepted: {error.verify_message}", "have the certificate made anew"
    )


def _alert(reason: str, credentials: Credentials) -> TlsDiagnosis:
    """What the daemon says of us."""
    shown = f"the certificate {credentials.certificate} that was shown"
    if not credentials.certificate and ("CERTIFICATE" in reason or "HANDSHAKE_FAILURE" in reason):
        return TlsDiagnosis(
            "it asks for a certificate, and none was shown", f"show one: {_OWN}", is_about_us=True
        )
    if "EXPIRED" in reason:
        return TlsDiagnosis(f"{shown} has expired", f"renew it: {_OWN}", is_about_us=True)
    if "UNKNOWN_CA" in reason:
        advice = f"show one of an authority that the daemon's operator named: {_OWN}"
        return TlsDiagnosis(
            f"{shown} is of an authority that the daemon does not know", advice, is_about_us=True
        )
    if "CERTIFICATE" in reason:
        return TlsDiagnosis(f"{shown} is not accepted", f"show another: {_OWN}", is_about_us=True)
    words = reason.lower().replace("_", " ")
    return TlsDiagnosis(f"it ended the TLS handshake: {words}", "do both sides speak TLS 1.2 or 1.3?")
