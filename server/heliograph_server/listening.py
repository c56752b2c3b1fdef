"""Binding a server to its addresses, with errors that say what to do."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpc import aio

from heliograph_proto.addresses import Address
from heliograph_proto.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How long to wait for an answer from a socket that may be stale.
PROBE_SECONDS = 1.0


def bind(server: aio.Server, address: Address) -> Address:
    """Binds; the address with the port that was chosen. Raises ConfigurationError."""
    if address.scheme == "unix":
        _remove_stale(Path(address.path))
        with _private_files():
            _add_port(server, address)
        return address
    return replace(address, port=_add_port(server, address))


def unbind(address: Address) -> None:
    """Removes a socket file."""
    if address.scheme == "unix":
        Path(address.path).unlink(missing_ok=True)


def _add_port(server: aio.Server, address: Address) -> int:
    # To listen, gRPC wants "host:port"; the scheme of a target is for clients.
    name = address.grpc_target if address.scheme == "unix" else str(address).removeprefix("grpc://")
    try:
        port: int = server.add_insecure_port(name)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigurationError(
            f"cannot listen at {address}: the address is taken, or is not this host's",
            advice="end the other server, or choose another address: --listen grpc://127.0.0.1:0",
        )
    return port


def _remove_stale(path: Path) -> None:
    """Removes the socket that a server left behind which did not end well."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot look at {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"{path} exists and is no socket", advice="choose another path")
    if _answers(path):
        raise ConfigurationError(f"another server listens at {path}", advice="end it, or choose another path")
    path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


@contextmanager
def _private_files() -> Iterator[None]:
    """Files made here are their owner's alone: the socket has mode 0600 from its first moment."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
