"""Addresses in settings, and unix sockets bound to them, with errors that say what to do."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from heliograph_proto.addresses import Address, parse_address
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

_REASONS = {
    errno.EADDRINUSE: "the address is taken",
    errno.EADDRNOTAVAIL: "the address is not this host's",
    errno.EACCES: "ports below 1024 are for root",
}
#: How long to wait for an answer from a socket that may be stale.
PROBE_SECONDS = 1.0


def host_and_port(text: str, setting: str) -> Address:
    """The address that a setting names as HOST:PORT, both of which are to be said. Raises
    ConfigurationError."""
    advice = "give HOST:PORT, such as 127.0.0.1:7071, or 0.0.0.0:7071 for other hosts"
    try:
        address = parse_address(f"grpc://{text}")
    except InvalidArgumentError as error:
        raise ConfigurationError(f"{setting} is {text!r}: {error.message}", advice=advice) from None
    if "://" in text or address.device or not text.rpartition("]")[2].rpartition(":")[1]:
        raise ConfigurationError(f"{setting} is {text!r}", advice=advice)
    return address


def bind_socket(name: str) -> socket.socket:
    """A socket of packets for this host: at a path, its owner's alone, or at a name that begins with a zero
    byte, without a file. Raises ConfigurationError, OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if name.startswith("\0"):
            made.bind(name)
        else:
            _remove_stale(Path(name), socket.SOCK_SEQPACKET)
            with _private_files():
                made.bind(name)
    except BaseException:
        made.close()
        raise
    return made


def unbind(address: Address) -> None:
    """Removes a socket file."""
    if address.scheme == "unix":
        Path(address.path).unlink(missing_ok=True)


def _why(address: Address) -> str:
    """Why gRPC could not listen there, which it does not tell: by trying the same without it."""
    if address.scheme == "unix":
        return "the socket could not be made"
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
    except socket.gaierror as error:
        return f"the name does not resolve ({error.strerror})"
    except OSError as error:
        return _REASONS.get(error.errno or 0, error.strerror or "refused by the system")
    return "the address is taken"


def _check_folder(folder: Path) -> None:
    """Raises ConfigurationError for one where no socket can be made."""
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder} for the socket", advice=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"no socket can be made in {folder}: permission denied")


def _remove_stale(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
    """Removes the socket that a server left behind which did not end well."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot look at {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"{path} exists and is no socket", advice="choose another path")
    if _answers(path, kind):
        raise ConfigurationError(f"another server listens at {path}", advice="end it, or choose another path")
    path.unlink(missing_ok=True)


def _answers(path: Path, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
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
