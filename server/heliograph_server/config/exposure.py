"""Whether a daemon may listen where it is to: what is wrong with the settings of access, taken together."""

from __future__ import annotations

from typing import Protocol

from heliograph_proto.addresses import Address
from heliograph_proto.errors import ConfigurationError


class AccessSettings(Protocol):
    """Those of ServerConfig that say who may connect."""

    @property
    def addresses(self) -> tuple[Address, ...]: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def tls_certificate(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_ca(self) -> str: ...
    @property
    def tokens(self) -> str: ...


def check_access(config: AccessSettings) -> None:
    """Whether it may listen at each address. Raises ConfigurationError."""
    for address in config.addresses:
        _check_address(address, config)


def check_together(config: AccessSettings) -> None:
    """Whether settings that need one another are there, before a daemon starts. Raises ConfigurationError."""
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise ConfigurationError(
            "tls_certificate and tls_key go together", advice="name both PEM files, or none"
        )
    if config.tls_client_ca and not any(one.is_tls for one in config.addresses):
        raise ConfigurationError(
            "tls_client_ca asks for certificates, which nobody can show without TLS",
            advice="listen at grpcs://HOST:PORT",
        )
    if config.tls_client_ca and not config.tokens:
        _check_certificates_can_be_shown(config)


def _check_certificates_can_be_shown(config: AccessSettings) -> None:
    for address in config.addresses:
        if not address.is_tls:
            raise ConfigurationError(
                f"whoever comes by {address} can show no certificate, and there are no tokens",
                advice="listen at grpcs:// alone, or name a file of tokens as well",
            )


def _check_address(address: Address, config: AccessSettings) -> None:
    if address.token or address.tls_name:
        raise ConfigurationError(
            f"cannot listen at {address} with a token or a tls_name: they are a client's",
            advice="name a file of tokens: tokens, --tokens FILE",
        )
    if address.is_tls and not (config.tls_certificate and config.tls_key):
        raise ConfigurationError(
            f"{address} needs a certificate and its key",
            advice="tls_certificate and tls_key name PEM files: --tls-certificate FILE --tls-key FILE",
        )
    asks = config.tokens or config.tls_client_ca
    if not address.is_loopback and not asks and not config.insecure:
        how = "without authentication" if address.is_tls else "in the clear and without authentication"
        raise ConfigurationError(
            f"{address} can be reached from other hosts, {how}",
            advice="ask for tokens: --tokens FILE; or listen at 127.0.0.1 and use an SSH tunnel; or say "
            "--insecure if the network is trusted",
        )
