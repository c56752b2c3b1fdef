"""Checks of the access settings of a daemon: its addresses, certificates and tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from heliograph_proto.addresses import Address, without_token
from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.sockets import host_and_port


class AccessSettings(Protocol):
    """The access settings of ServerConfig."""

    @property
    def addresses(self) -> tuple[Address, ...]: ...
    @property
    def gateways(self) -> tuple[Address, ...]: ...
    @property
    def exposed(self) -> tuple[Address, ...]: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def ggml_rpc(self) -> str: ...
    @property
    def share(self) -> bool: ...
    @property
    def models(self) -> str: ...
    @property
    def kserve_http(self) -> str: ...
    @property
    def web(self) -> str: ...
    @property
    def web_llm(self) -> tuple[str, ...]: ...
    @property
    def kserve_shared_memory(self) -> str: ...
    @property
    def tls_certificate(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_ca(self) -> str: ...
    @property
    def tls_clients(self) -> str: ...
    @property
    def tokens(self) -> str: ...


def check_access(config: AccessSettings) -> None:
    """Check that the daemon may listen at each address. Raises ConfigurationError."""
    for address in config.exposed:
        _check_address(address, config)
    for url in config.web_llm:
        scheme, _, place = url.partition("://")
        if (
            scheme not in ("http", "https")
            or not place.rstrip("/")
            or "@" in place
            or "/" in place.rstrip("/")
        ):
            raise ConfigurationError(
                f"web_llm has {without_token(url)!r:.200}",
                advice="give http://HOST:PORT or https://HOST:PORT",
            )
    if config.gateways and not config.models:
        raise ConfigurationError(
            "kserve and kserve_http serve the models of a folder, and there is none",
            advice="set models, --models DIR: it has NAME/1/model.onnx or NAME/1/model.hgraph",
        )
    if config.kserve_shared_memory and not all(one.is_loopback for one in config.gateways):
        raise ConfigurationError(
            "kserve_shared_memory is for clients on this host, and others reach kserve or kserve_http",
            advice="listen at 127.0.0.1 or a unix socket, or leave kserve_shared_memory out",
        )


def check_together(config: AccessSettings) -> None:
    """Check settings that depend on one another, before a daemon starts. Raises
    ConfigurationError."""
    if config.ggml_rpc:
        address = host_and_port(config.ggml_rpc, "ggml_rpc")
        if not (address.is_loopback or config.insecure):
            raise ConfigurationError(
                f"ggml_rpc at {config.ggml_rpc} can be reached from other hosts, in plain text and without "
                "authentication",
                advice="listen at 127.0.0.1, or give --insecure if the network is trusted",
            )
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise ConfigurationError(
            "tls_certificate and tls_key go together", advice="set both PEM files, or none"
        )
    if config.tls_client_ca and not any(one.is_tls for one in config.exposed):
        raise ConfigurationError(
            "tls_client_ca requires certificates of clients, which need TLS",
            advice="listen at grpcs://HOST:PORT",
        )
    if config.tls_clients and (config.tokens or not config.tls_client_ca):
        cause = "tokens identify all callers" if config.tokens else "no certificates of clients are required"
        raise ConfigurationError(
            f"tls_clients has no effect: {cause}",
            advice="set tls_client_ca, and no tokens; or give rights to tokens: heliograph token new --right",
        )
    if config.tls_client_ca and not config.tokens:
        for setting in ("kserve_http", "web"):
            if getattr(config, setting):
                raise ConfigurationError(
                    f"{setting} does not look at certificates of clients, and there are no tokens",
                    advice=f"set a file of tokens too, or leave {setting} out",
                )
        for address in config.exposed:
            if not address.is_tls:
                raise ConfigurationError(
                    f"clients at {address} cannot present a certificate, and there are no tokens",
                    advice="listen at grpcs:// only, or set a file of tokens too",
                )


def _check_address(address: Address, config: AccessSettings) -> None:
    if address.token or address.tls_name or address.pin or address.insecure:
        plain = replace(address, tls_name="", pin="", insecure=False)
        raise ConfigurationError(
            f"cannot listen at {plain} with a token or other parameters, which are for clients",
            advice="set a file of tokens: tokens, --tokens FILE",
        )
    if address.is_tls and not (config.tls_certificate and config.tls_key) and not config.share:
        raise ConfigurationError(
            f"{address} needs a certificate and its key",
            advice="set tls_certificate and tls_key to PEM files: --tls-certificate FILE --tls-key FILE",
        )
    asks = config.tokens or config.tls_client_ca or config.share
    if (config.tokens or config.share) and not (address.is_loopback or address.is_tls or config.insecure):
        raise ConfigurationError(
            f"tokens of clients at {address} would be sent in plain text, and could be intercepted",
            advice="listen at grpcs:// with a certificate: --tls-certificate FILE --tls-key FILE; or give "
            "--insecure if the network is trusted",
        )
    if not address.is_loopback and not asks and not config.insecure:
        how = "without authentication" if address.is_tls else "in plain text and without authentication"
        raise ConfigurationError(
            f"{address} can be reached from other hosts, {how}",
            advice="require tokens, with TLS: --share, or --tokens FILE; or listen at 127.0.0.1 and use an "
            "SSH tunnel; or give --insecure if the network is trusted",
        )
