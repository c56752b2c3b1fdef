"""What a daemon shows others: members of its pool, and daemons that it exchanges values with."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from heliograph._channels import token_in
from heliograph._tls import read_pem
from heliograph_proto.addresses import parse_address
from heliograph_proto.credentials import Credentials
from heliograph_proto.errors import ConfigurationError, HeliographError, InvalidArgumentError

logger = logging.getLogger(__name__)


class PoolCredentials:
    """Files are read whenever a connection is made, so that they may change. Thread-safe.

    Raises ConfigurationError for files that cannot be used. Later, one that cannot be read is logged, and
    what was read before is shown.
    """

    def __init__(self, token_file: str = "", ca: str = "", certificate: str = "", key: str = "") -> None:
        if bool(certificate) != bool(key):
            raise ConfigurationError(
                "a certificate and its key go together", advice="--pool-certificate FILE --pool-key FILE"
            )
        self._token_file = token_file
        self._files = Credentials(ca=ca, certificate=certificate, key=key)
        self._lock = threading.Lock()
        self._is_bad = False
        try:
            read_pem(self._files)
            self._token = self._read()
        except InvalidArgumentError as error:
            raise ConfigurationError(f"for the pool: {error.message}", advice=error.advice) from None

    def __call__(self, address: str) -> Credentials:
        """What is shown there now. A pool that speaks TLS shows its token to nobody in the clear but on
        loopback: who may name other daemons could have it sent wherever somebody listens. Raises
        InvalidArgumentError."""
        found = parse_address(address)
        with self._lock:
            self._refresh()
            is_private = found.is_tls or found.is_loopback or not self._files.ca
            return replace(self._files, token=self._token if is_private else "")

    def _refresh(self) -> None:
        try:
            self._token = self._read()
        except HeliographError as error:
            if not self._is_bad:
                logger.error("%s; the token read before stays in use", error.message)
            self._is_bad = True
        else:
            self._is_bad = False

    def _read(self) -> str:
        return token_in(self._token_file, "pool_token") if self._token_file else ""
