"""The secret by which a server recognises sessions of one tenant, which may share uploaded weights.

It is $HELIOGRAPH_TENANT, a text that others cannot guess, or a file of this user that the first
session creates. Two machines are one tenant if they have the same text, or the same file.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from pathlib import Path

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import ConfigurationError

#: The environment variable with a secret text.
TENANT_VARIABLE = "HELIOGRAPH_TENANT"
#: Shorter texts can be guessed.
SHORTEST = 16
_SECRET_BYTES = 32

_lock = threading.Lock()
#: The secret of this process, if no file can be kept.
_own: bytes = b""


def tenant_secret() -> bytes:
    """Return the 32 bytes for the handshake.

    Raises ConfigurationError for a text that could be guessed.
    """
    text = os.environ.get(TENANT_VARIABLE)
    if text:
        if len(text) < SHORTEST:
            raise ConfigurationError(
                f"${TENANT_VARIABLE} has {len(text)} characters, which others could guess",
                advice=f"use {SHORTEST} or more random ones, or unset it",
            )
        return digest_of(b"text\0" + text.encode("utf-8", "surrogateescape"))
    with _lock:
        return _kept(_file())


def _file() -> Path | None:
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "heliograph" / "tenant"
    except RuntimeError:
        return None  # a user without a home directory


def _kept(path: Path | None) -> bytes:
    """Return the file's secret, created if it is missing, or without a file this process's."""
    global _own
    if path is not None:
        try:
            return _read(path) or _read_made(path)
        except OSError:
            pass
    _own = _own or secrets.token_bytes(_SECRET_BYTES)
    return _own


def _read(path: Path) -> bytes:
    """Return the secret of a file; empty if the file is missing or broken."""
    try:
        found = bytes.fromhex(path.read_text("ascii"))
    except (FileNotFoundError, ValueError):
        return b""
    return found if len(found) == _SECRET_BYTES else b""


def _read_made(path: Path) -> bytes:
    """Write a new secret atomically, unless another process was faster, and read the result."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "w") as file:
            file.write(secrets.token_hex(_SECRET_BYTES))
        if path.exists():
            os.replace(name, path)  # it is broken: see `_read`
        else:
            _link(name, path)
        return _read(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _link(name: str, path: Path) -> None:
    try:
        os.link(name, path)
    except FileExistsError:
        pass
    except OSError:
        os.replace(name, path)  # a file system without links
