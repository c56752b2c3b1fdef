"""The entries of the kernels, and folders of their object code.

A file holds the object code of one entry and, behind it, the SHA-256 of the code. Its name has the
entry and a digest of what the code depends on beside the sources: the processor with its
instruction set, the compiler, and the compiler's settings. So one folder can serve several kinds of
machines, and a file is either whole or not used. Imports no numba.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

#: The module of each entry, in the order in which they are compiled: first those that most graphs
#: need, and of these first those that take long.
MODULES: Final = {
    "elementwise_body": "elementwise.interpreter",
    "attention_block": "rows.attention",
    "matmul_block": "matmul.matmul",
    "moves_block": "rows.moves",
    "run_program": "runtime.runner",
    "rows_block": "rows.reductions",
    "serve": "runtime.runner",
    "open_program": "runtime.runner",
    "pack_columns": "runtime.runner",
    "transpose_rows": "runtime.runner",
    "rotary_block": "rows.rope",
    "unpack_panels": "matmul.stored_matmul",
    "multiply_few": "matmul.stored_matmul",
    "multiply_integers": "matmul.integer_matmul",
    "stage_integers": "matmul.integer_matmul",
    "experts_block": "matmul.experts",
    "pack_row": "rows.stored_rows",
    "pack_patches": "windows.patches",
    "windows_block": "windows.planes",
    "convolve_block": "windows.direct",
    "finish_rows": "windows.chains",
    "searches_block": "rows.searches",
    "images_block": "windows.images",
}
#: Entries that Python calls, whatever a program has.
CORE: Final = ("run_program", "open_program", "serve", "pack_columns", "transpose_rows")

_DIGEST_BYTES: Final = 32
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _is_safe(status: os.stat_result) -> bool:
    """True if a file is this user's or root's, and no other user can write to it."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def native_name(entry: str) -> str:
    """Return the symbol that compiled code calls."""
    return f"heliograph_{entry}"


def python_name(entry: str) -> str:
    """Return the symbol that Python calls."""
    return f"python_{entry}"


def machine_digest() -> str:
    """Return a digest of what object code depends on beside the kernels' sources."""
    binding: Any = importlib.import_module("llvmlite.binding")
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
    found = [
        binding.get_process_triple(),
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
        metadata.version("numba"),
        metadata.version("llvmlite"),
        *settings,
    ]
    return hashlib.sha256("\0".join(found).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ObjectFolder:
    """A folder of object code for this machine. No other user can write to it, see `native`."""

    path: Path
    machine: str
    #: True for a part of the installed package, which is as safe as the code that reads it.
    packaged: bool = False

    def file(self, entry: str) -> Path:
        """Return the file of an entry."""
        return self.path / f"{entry}-{self.machine}.o"

    def read(self, entry: str) -> bytes | None:
        """Return the object code of an entry; None if there is no whole file."""
        try:
            # Not through a link, nor of a file that another user can write to.
            with open(os.open(self.file(entry), os.O_RDONLY | _NO_LINK), "rb") as file:
                safe = self.packaged or _is_safe(os.fstat(file.fileno()))
                data = file.read() if safe else b""
        except OSError:
            return None
        code, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        return code if hashlib.sha256(code).digest() == digest else None

    def missing(self) -> list[str]:
        """Return the entries that have no whole file."""
        return [entry for entry in MODULES if self.read(entry) is None]

    def write(self, entry: str, code: bytes) -> None:
        """Keep the object code of an entry. Raises OSError."""
        part = self.path / f".{entry}-{self.machine}.{os.getpid()}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_LINK, 0o644), "wb") as file:
                file.write(code + hashlib.sha256(code).digest())
            part.replace(self.file(entry))
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
