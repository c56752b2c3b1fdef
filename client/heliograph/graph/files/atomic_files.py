"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heliograph_proto.errors import InvalidArgumentError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new empty file that takes the place of `path` when the block ends without an error.

    Readers see the old file or the whole new one, also after a crash. Raises InvalidArgumentError
    when it cannot be written.
    """
    if not path.name:
        raise unwritable(path, "it is no name of a file")
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        part.open("xb").close()
        mode = part.stat().st_mode
        yield part
        # The block may have replaced it by a file that only its user can read.
        part.chmod(mode)
        _flush(part)
        os.replace(part, path)
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from None
    finally:
        part.unlink(missing_ok=True)


def unwritable(path: Path, why: str) -> InvalidArgumentError:
    """Return the error for a file that cannot be written."""
    return InvalidArgumentError(
        f"cannot write {path}: {why}", advice="name a folder that exists, may be written to and has room"
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
