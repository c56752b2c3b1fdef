"""The secret by which a server knows that sessions are of one tenant, and may share uploaded weights.

$HELIOGRAPH_TENANT, any text that others do not guess; else a file of this user, made with the first session.
Two machines are one tenant when they have the same text, or the same file.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from pathlib import Path

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import ConfigurationError

#: The environment variable that has a secret of its own.
TENANT_VARIABLE = "HELIOGRAPH_TENANT"
#: Fewer characters can be guessed.
SHORTEST = 16
_SECRET_BYTES = 32

_lock = threading.Lock()
#: Of this process, where no file can be kept.
_own: bytes = b""


def tenant_secret() -> bytes:
    """What the handshake shows, 32 bytes. Raises ConfigurationError for a text that could be guessed."""
    text = os.environ.get(TENANT_VARIABLE)
    if text:
        if len(text) < SHORTEST:
            raise ConfigurationError(
                f"${TENANT_VARIABLE} has {len(text)} characters, which others could guess",
                advice=f"give it {SHORTEST} or more random ones, or leave it away",
            )
        return digest_of(b"text\0" + text.encode("utf-8", "surrogateescape"))
    with _lock:
        return _kept(_file())


def _file() -> Path | None:
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "heliograph" / "tenant"
    except RuntimeError:
        return None  # nobody's process: there is no home


def _kept(path: Path | None) -> bytes:
    """The file's secret, made if it is missing; where there can be no file, one of this process."""
    global _own
    if path is not None:
        try:
            return _read(path) or _read_made(path)
        except OSError:
            pass
    _own = _own or secrets.token_bytes(_SECRET_BYTES)
    return _own


def _read(path: Path) -> bytes:
    """Empty if there is none, or one that is broken."""
    try:
        found = bytes.fromhex(path.read_text("ascii"))
    except (FileNotFoundError, ValueError):
        return b""
    return found if len(found) == _SECRET_BYTES else b""


def _read_made(path: Path) -> bytes:
    """Writes a new secret, whole, unless another process was faster, and reads what is there then."""
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
