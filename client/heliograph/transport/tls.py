"""Certificates of clients and daemons: reading them, and diagnosing why one was not accepted.

gRPC says little about a connection that failed. So Python's own TLS tries the same once more,
within a time limit, and the result becomes a diagnosis.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.errors import InvalidArgumentError, UnavailableError

#: The time for a daemon's answer to a diagnosis.
PROBE_SECONDS = 1.0
#: The time for a daemon's alert about our certificate: with TLS 1.3 it comes after the handshake.
ALERT_SECONDS = 0.5
_OWN = "certificate=FILE and key=FILE, or $HELIOGRAPH_CERTIFICATE and $HELIOGRAPH_KEY"

#: OpenSSL's numbers (X509_V_ERR_...) of faults in certificates.
_EXPIRED, _NOT_YET = 10, 9
_SELF_SIGNED = (18, 19)
_NO_ISSUER = (2, 20, 21)
_WRONG_NAME = (62, 64)


@dataclass(frozen=True, slots=True)
class TlsDiagnosis:
    """The reason why there is no connection, and advice."""

    cause: str
    advice: str
    #: True if the daemon does not accept this client, rather than the other way round.
    is_ours: bool = False


def read_pem(credentials: Credentials) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Return the authorities, the certificate and the key, as gRPC needs them.

    Raises InvalidArgumentError.
    """
    ca = _read(credentials.ca, "ca") if credentials.ca else None
    certificate = _read(credentials.certificate, "certificate") if credentials.certificate else None
    key = _read(credentials.key, "key") if credentials.key else None
    if credentials.ca or credentials.certificate:
        # Nothing can be wrong otherwise, and reading the system's authorities takes a tenth of a
        # second.
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
    """Return Python's TLS context for these credentials.

    Raises InvalidArgumentError for unusable files.
    """
    made = ssl.create_default_context()
    made.set_alpn_protocols(["h2"])
    if credentials.ca:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.set_alpn_protocols(["h2"])
        try:
            made.load_verify_locations(credentials.ca)
        except (ssl.SSLError, OSError):
            raise InvalidArgumentError(
                f"ca {credentials.ca!r} has no readable certificate", advice="ca= names a PEM file"
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
            else "one of them is not a PEM file of a certificate or a key"
        )
        raise InvalidArgumentError(
            f"certificate {credentials.certificate!r} and key {credentials.key!r}: {why}",
            advice="certificate= and key= name PEM files that belong together, the key without a password",
        ) from None


def _no_password() -> str:
    return ""


def why_no_tls(address: Address, credentials: Credentials) -> TlsDiagnosis | None:
    """Diagnose a grpcs:// daemon that accepts connections; None if nothing is found."""
    if address.pin:
        return _why_not_pinned(address, credentials)
    tls = context(credentials)
    try:
        with (
            _connected(address) as plain,
            tls.wrap_socket(plain, server_hostname=address.tls_name or address.host) as made,
        ):
            if made.selected_alpn_protocol() == "h2":
                _await_alert(made)
    except OSError as error:
        return _diagnosis(error, address, credentials)
    except ValueError:
        pass  # not a valid name
    return None


def _why_not_pinned(address: Address, credentials: Credentials) -> TlsDiagnosis | None:
    """Diagnose a daemon whose certificate the URL names by its fingerprint."""
    from heliograph._probe.pins import check_pin

    try:
        check_pin(address, credentials, PROBE_SECONDS)
    except UnavailableError as error:
        return TlsDiagnosis(error.message, error.advice)
    except OSError as error:
        return _diagnosis(error, address, credentials)
    return None


def why_no_plaintext(address: Address) -> TlsDiagnosis | None:
    """Return a diagnosis if TLS is spoken at a grpc:// address; None if not."""
    probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    probe.check_hostname, probe.verify_mode = False, ssl.CERT_NONE
    probe.set_alpn_protocols(["h2"])
    try:
        with _connected(address) as plain, probe.wrap_socket(plain):
            pass
    except (OSError, ValueError):
        return None
    return TlsDiagnosis(
        "the daemon there speaks TLS, but the URL does not use it",
        f"use grpcs://{address.host_port}, and ca=FILE (or $HELIOGRAPH_CA) if the authority is your own",
    )


def _connected(address: Address) -> socket.socket:
    made = socket.create_connection((address.host, address.port), timeout=PROBE_SECONDS)
    made.settimeout(PROBE_SECONDS)
    return made


def _await_alert(made: ssl.SSLSocket) -> None:
    """Wait for the daemon's first bytes, perhaps an alert. Raises OSError."""
    made.settimeout(ALERT_SECONDS)
    try:
        # Nothing is sent: a daemon that closes with unread bytes discards its alert.
        if not made.recv(4096):
            raise _ClosedError
    except TimeoutError:
        pass


class _ClosedError(ConnectionError):
    """The other side closed without an alert."""


def _diagnosis(error: OSError, address: Address, credentials: Credentials) -> TlsDiagnosis | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(error, address, credentials)
    if isinstance(error, _ClosedError):
        return _closed(credentials)
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "ALERT" in reason:
        return _alert(reason, credentials)
    without = f"a daemon without TLS is at grpc://{address.host_port}"
    if isinstance(error, ConnectionError | ssl.SSLEOFError | TimeoutError):
        cause = "it accepts connections, but does not complete a TLS handshake"
        return TlsDiagnosis(cause, f"is it the right port? {without}")
    if isinstance(error, ssl.SSLError):
        cause = "the program there does not speak TLS"
        return TlsDiagnosis(cause, f"{without}; to speak TLS it needs tls_certificate and tls_key")
    return None


def _closed(credentials: Credentials) -> TlsDiagnosis:
    """Diagnose a closed connection, gRPC's reaction to a certificate that is absent or refused."""
    ours = f"the client certificate {credentials.certificate}"
    if not credentials.certificate:
        return TlsDiagnosis(
            "it seems to require a certificate, and the client sent none", f"pass one: {_OWN}", True
        )
    wrong = _verified(credentials)
    if wrong == _EXPIRED:
        return TlsDiagnosis(f"{ours} has expired", f"renew it: {_OWN}", True)
    if wrong == _NOT_YET:
        return TlsDiagnosis(f"{ours} is not valid yet", "is this host's clock right? else wait", True)
    advice = f"use one of an authority that the daemon trusts: {_OWN}"
    return TlsDiagnosis(f"{ours} is not accepted, or its authority is unknown to the daemon", advice, True)


def _verified(credentials: Credentials) -> int:
    """Return the fault that OpenSSL finds in our own certificate when it is trusted; 0 for none."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    server.load_verify_locations(credentials.certificate)
    for one in (client, server):
        one.load_cert_chain(credentials.certificate, credentials.key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
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
    trusted = credentials.ca or "the system's authorities"
    another = "name the authority's file: ca=FILE, or $HELIOGRAPH_CA"
    code = error.verify_code
    if code == _EXPIRED:
        return TlsDiagnosis(
            "its certificate has expired", "the daemon's operator must renew it; no restart is needed"
        )
    if code == _NOT_YET:
        clock = "is this host's clock right? else wait, or have a new certificate issued"
        return TlsDiagnosis("its certificate is not valid yet", clock)
    if code in _SELF_SIGNED:
        cause = f"its certificate is self-signed, or its authority is not among {trusted}"
        return TlsDiagnosis(cause, another)
    if code in _NO_ISSUER:
        return TlsDiagnosis(f"its certificate's authority is not among {trusted}", another)
    if code in _WRONG_NAME:
        return wrong_name(address)
    return TlsDiagnosis(
        f"its certificate is not accepted: {error.verify_message}", "have a new certificate issued"
    )


def wrong_name(address: Address) -> TlsDiagnosis:
    """Diagnose a certificate for other names."""
    tunnel = f"grpcs://{address.host_port}?tls_name=NAME"
    return TlsDiagnosis(
        f"its certificate is not for {(address.tls_name or address.host)!r}",
        f"use a name that is in it; through a tunnel, add the name to the URL: {tunnel}",
    )


def _alert(reason: str, credentials: Credentials) -> TlsDiagnosis:
    """Diagnose a TLS alert of the daemon about this client."""
    ours = f"the client certificate {credentials.certificate}"
    if not credentials.certificate and ("CERTIFICATE" in reason or "HANDSHAKE_FAILURE" in reason):
        return TlsDiagnosis(
            "it requires a certificate, and the client sent none", f"pass one: {_OWN}", is_ours=True
        )
    if "EXPIRED" in reason:
        return TlsDiagnosis(f"{ours} has expired", f"renew it: {_OWN}", is_ours=True)
    if "UNKNOWN_CA" in reason:
        advice = f"use one of an authority that the daemon trusts: {_OWN}"
        return TlsDiagnosis(
            f"{ours} is from an authority that the daemon does not know", advice, is_ours=True
        )
    if "CERTIFICATE" in reason:
        return TlsDiagnosis(f"{ours} is not accepted", f"use another: {_OWN}", is_ours=True)
    words = reason.lower().replace("_", " ")
    return TlsDiagnosis(f"it ended the TLS handshake: {words}", "do both sides speak TLS 1.2 or 1.3?")
