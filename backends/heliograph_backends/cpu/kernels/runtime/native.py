"""The compiled entries, with a disk cache in a private folder.

numba's cache files are pickles, so write access to them means code execution in this process. The
folder must therefore belong to this user and not be writable by others; otherwise nothing is
cached, and `cache_state` has the reason. A folder that root or this user filled and that this user
cannot write to is also read, so that container images can contain kernels. The name of the inner
folder is a digest of the package's sources, because numba checks only the file of the function that
it loads, not of its callees.

The machine's instruction set is part of numba's own key, so one home folder can serve several kinds
of machines.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from heliograph_backends.cpu.kernels.runtime.compiling import Progress, compile_entries

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "HELIOGRAPH_KERNEL_CACHE"


class Refusal(Enum):
    """The reason why a folder is not used."""

    NOT_CREATED = "the folder cannot be created"
    NOT_A_DIRECTORY = "it is not a directory"
    NOT_OURS = "it belongs to another user"
    WRITABLE_BY_OTHERS = "others can write to it"
    NOT_WRITABLE = "we cannot write to it"
    UNSAFE_PARENT = "others can replace a folder above it"


@dataclass(frozen=True, slots=True)
class CacheState:
    """The folder of compiled kernels, or the reason why there is none."""

    folder: Path | None
    refusal: Refusal | None = None
    #: The number of functions that were compiled instead of loaded.
    compiled: int = 0
    #: True if the folder can only be read; then newly compiled functions are not kept.
    read_only: bool = False


def available() -> bool:
    """True if numba can be imported; imports nothing."""
    return importlib.util.find_spec("numba") is not None


def default_folder() -> Path:
    """Return the folder of the environment variable, else `heliograph/kernels` in the user's cache
    folder."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "heliograph" / "kernels"


def source_digest() -> str:
    """Return a digest of the kernels' sources."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def check_folder(folder: Path) -> Refusal | None:
    """Return the reason why `folder` cannot hold pickles, or None."""
    try:
        status = os.lstat(folder)
    except OSError:
        return Refusal.NOT_CREATED
    if not stat.S_ISDIR(status.st_mode):
        return Refusal.NOT_A_DIRECTORY
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return Refusal.NOT_OURS
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Refusal.WRITABLE_BY_OTHERS
    return None if os.access(folder, os.W_OK | os.X_OK) else Refusal.NOT_WRITABLE


def is_sealed(folder: Path) -> bool:
    """True if the folder belongs to this user or root, this user can read it, and only root can
    write to it."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    if hasattr(os, "getuid") and status.st_uid not in (0, os.getuid()):
        return False
    return os.access(folder, os.R_OK | os.X_OK) and not os.access(folder, os.W_OK)


def parents_are_safe(folder: Path) -> bool:
    """True if no other user can rename or replace a parent of `folder`."""
    if not hasattr(os, "getuid"):
        return True
    for parent in folder.resolve().parents:
        status = os.stat(parent)
        writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if writable or status.st_uid not in (0, os.getuid()):
            return False
    return True


def open_cache(folder: Path) -> CacheState:
    """Create `folder` with mode 0700 if it is missing, check it, and create the inner one for these
    sources; or use a read-only one that was filled before.
    """
    if is_sealed(folder) and is_sealed(folder / source_digest()) and parents_are_safe(folder):
        return CacheState(folder / source_digest(), read_only=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        return CacheState(None, Refusal.NOT_A_DIRECTORY)
    except OSError:
        return CacheState(None, Refusal.NOT_CREATED)
    inner = folder / source_digest()
    refusal = check_folder(folder)
    if refusal is None and not parents_are_safe(folder):
        refusal = Refusal.UNSAFE_PARENT
    if refusal is None:
        inner.mkdir(mode=0o700, exist_ok=True)
        refusal = check_folder(inner)
    return CacheState(inner) if refusal is None else CacheState(None, refusal)


class _Native:
    """The compiled entries of this process; loaded once, under a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runner: Any = None
        self.cache = CacheState(None)

    def load(self, folder: Path | None, progress: Progress | None = None) -> Any:
        with self.lock:
            if self.runner is None:
                cache = open_cache(folder or default_folder())
                _announce(cache)
                with _writable(cache) as place:
                    self.runner, compiled = compile_entries(place, progress)
                self.cache = replace(cache, compiled=compiled)
            return self.runner


#: Places for a copy of a read-only cache: the system's folder of temporary files, else memory,
#: which exists also in containers without a writable folder.
SCRATCH = (None, "/dev/shm")


@contextmanager
def _writable(cache: CacheState) -> Iterator[Path | None]:
    """Yield a folder that numba can use; numba writes to it even to check whether it can.

    For a read-only cache this is a private, temporary copy; None if no copy is possible.
    """
    if not cache.read_only or cache.folder is None:
        yield cache.folder
        return
    with ExitStack() as stack:
        yield _copied(cache.folder, stack)


def _copied(folder: Path, stack: ExitStack) -> Path | None:
    for place in SCRATCH:
        try:
            made = tempfile.TemporaryDirectory(
                prefix="heliograph-kernels-", dir=place, ignore_cleanup_errors=True
            )
            stack.enter_context(made)
            copy = Path(shutil.copytree(folder, Path(made.name, folder.name)))
            for one in (copy, *filter(Path.is_dir, copy.rglob("*"))):
                one.chmod(0o700)
            return copy
        except OSError as error:
            logger.debug("no copy of the CPU kernels in %s: %s", place or "the temporary folder", error)
    logger.warning("CPU kernels in %s are not used: no folder can be written to; mount one at /tmp", folder)
    return None


def _announce(cache: CacheState) -> None:
    """Log that loading will take long, and why the kernels are not kept."""
    if cache.refusal is not None:
        logger.warning("CPU kernels are not kept on disk: %s", cache.refusal.value)
    if cache.folder is None or not any(cache.folder.rglob("*.nbi")):
        logger.info(
            "compiling the CPU kernels: 20 to 40 seconds, once per machine and version; "
            "`heliograph warmup` does it beforehand"
        )


_native = _Native()


def warmup(folder: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> CacheState:
    """Compile all kernels or load them from the cache; the first call determines the folder.

    Raises ImportError if numba is missing.
    """
    _native.load(None if folder is None else Path(folder), progress)
    return _native.cache


def find_cache(folder: str | os.PathLike[str] | None = None) -> CacheState:
    """Return the cache that would be used, or the reason for none; compiles nothing."""
    return open_cache(Path(folder) if folder else default_folder())


def cache_state() -> CacheState:
    """Return the cache in use; without folder and refusal before `warmup`."""
    return _native.cache


def entries() -> Any:
    """Return the module of the compiled entries: `run_program`, `pack_columns` and others."""
    return _native.load(None)
