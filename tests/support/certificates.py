"""Certificates for tests: an authority, and what it vouches for, with whatever dates and names."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate and its key."""

    certificate: str
    key: str


class Authority:
    """Signs certificates, which it writes into a folder. Keys are of ECDSA, which are quickly
    made."""

    def __init__(self, folder: Path, name: str = "Test authority") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        made = _builder(self._name, self._name, self._key.public_key(), -1.0, 30.0)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._certificate = made.sign(self._key, hashes.SHA256())
        #: Of those who trust it.
        self.ca = str(folder / "ca.pem")
        Path(self.ca).write_bytes(self._certificate.public_bytes(Encoding.PEM))

    def write_key(self, path: Path) -> None:
        """Its own key, as if it were a server's."""
        path.write_bytes(self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def server(
        self,
        *names: str,
        file: str = "server",
        common_name: str = "server",
        begins_days: float = -1.0,
        ends_days: float = 30.0,
    ) -> Pair:
        """Of a daemon with these names and addresses (loopback's by default); dates from now on."""
        found = [_general(one) for one in names or ("localhost", "127.0.0.1")]
        return self._issue(file, common_name, found, ExtendedKeyUsageOID.SERVER_AUTH, begins_days, ends_days)

    def client(
        self,
        name: str,
        *names: str,
        file: str = "",
        begins_days: float = -1.0,
        ends_days: float = 30.0,
    ) -> Pair:
        """Of a client of this name, and alternative ones such as "DNS:ops.example"."""
        found = [_alternative(one) for one in names]
        return self._issue(file or name, name, found, ExtendedKeyUsageOID.CLIENT_AUTH, begins_days, ends_days)

    def _issue(
        self,
        file: str,
        name: str,
        names: list[x509.GeneralName],
        purpose: x509.ObjectIdentifier,
        begins_days: float,
        ends_days: float,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(_named(name), self._name, key.public_key(), begins_days, ends_days)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = made.sign(self._key, hashes.SHA256())
        pair = Pair(str(self._folder / f"{file}.pem"), str(self._folder / f"{file}-key.pem"))
        Path(pair.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        Path(pair.certificate).write_bytes(certificate.public_bytes(Encoding.PEM))
        return pair


def serial_of(pem: bytes | str) -> int:
    """The number of a certificate, by which two of them differ."""
    data = pem.encode() if isinstance(pem, str) else pem
    return x509.load_pem_x509_certificate(data).serial_number


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])


def _alternative(name: str) -> x509.GeneralName:
    kind, _, text = name.partition(":")
    if kind == "IP":
        return x509.IPAddress(ipaddress.ip_address(text))
    kinds = {"DNS": x509.DNSName, "URI": x509.UniformResourceIdentifier, "email": x509.RFC822Name}
    return kinds[kind](text)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begins_days: float,
    ends_days: float,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins_days * DAY)
        .not_valid_after(now + ends_days * DAY)
    )
