"""Addresses in settings, and unix sockets bound to them, with errors that have advice."""

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
    errno.EADDRINUSE: "the address is in use",
    errno.EADDRNOTAVAIL: "the address does not belong to this host",
    errno.EACCES: "ports below 1024 are for root",
}
#: How long to wait for an answer from a socket that may be stale.
PROBE_SECONDS = 1.0


def host_and_port(text: str, setting: str) -> Address:
    """Parse a setting of the form HOST:PORT. Raises ConfigurationError, also if one of them is
    missing."""
    advice = "give HOST:PORT, such as 127.0.0.1:7071, or 0.0.0.0:7071 for other hosts"
    try:
        address = parse_address(f"grpc://{text}")
    except InvalidArgumentError as error:
        raise ConfigurationError(f"{setting} is {text!r}: {error.message}", advice=advice) from None
    if "://" in text or address.device or not text.rpartition("]")[2].rpartition(":")[1]:
        raise ConfigurationError(f"{setting} is {text!r}", advice=advice)
    return address


def bind_socket(name: str) -> socket.socket:
    """Bind a unix socket of packets: at a path with mode 0600, or at an abstract name, which begins
    with a zero byte. Raises ConfigurationError, OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if name.startswith("\0"):
            made.bind(name)
        else:
            remove_stale(Path(name), socket.SOCK_SEQPACKET)
            with private_files():
                made.bind(name)
    except BaseException:
        made.close()
        raise
    return made


def unbind(address: Address) -> None:
    """Remove the file of a unix socket."""
    if address.scheme == "unix":
        Path(address.path).unlink(missing_ok=True)


def why_not_bound(address: Address) -> str:
    """The reason why gRPC could not listen at an address, found by binding a socket, as gRPC gives
    none."""
    if address.scheme == "unix":
        return "the socket could not be created"
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
    return "the address is in use"


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError if a socket cannot be created in a folder."""
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder} for the socket", advice=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"cannot create a socket in {folder}: permission denied")


def remove_stale(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
    """Remove a socket that a crashed server left behind. Raises ConfigurationError if it is in
    use."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot access {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"{path} exists and is not a socket", advice="choose another path")
    if _answers(path, kind):
        raise ConfigurationError(f"another server listens at {path}", advice="stop it or choose another path")
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
def private_files() -> Iterator[None]:
    """Create files with mode 0600, so that a socket has it from the start."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
