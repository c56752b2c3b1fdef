"""The kernels of this process: loaded from a private folder, or compiled into it meanwhile.

The folder holds machine code, so write access to it means code execution in this process. It must
therefore belong to this user and not be writable by others; otherwise nothing is kept on disk, and
`cache_state` has the reason. A folder that root or this user filled and that this user cannot write
to is also read, so that container images can contain kernels. The name of the inner folder is a
digest of the package's sources; `objects` has its files.

A distribution may contain all objects for this machine, see `levels`; then the folder is not used.

Entries that the folder lacks are compiled in the background, see `compiling`. Programs wait for
their own entries only. Of several processes that need kernels, one compiles, and the others load
what it has finished.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from heliograph_backends.cpu.kernels.program.words import TABLE
from heliograph_backends.cpu.kernels.runtime.compiling import Compiling
from heliograph_backends.cpu.kernels.runtime.levels import packaged_objects
from heliograph_backends.cpu.kernels.runtime.loading import Linker
from heliograph_backends.cpu.kernels.runtime.memory import aligned_words
from heliograph_backends.cpu.kernels.runtime.objects import CORE, MODULES, ObjectFolder, machine_digest
from heliograph_backends.cpu.kernels.runtime.turns import TELL_SECONDS, turn
from heliograph_proto.errors import DeadlineExceededError

logger = logging.getLogger(__name__)

#: Called for each entry that was compiled, with the number that are loaded, the number of all, its
#: name.
Progress: TypeAlias = Callable[[int, int, str], None]

#: The most seconds that a program waits for its entries.
LOAD_SECONDS = 600.0
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
    #: The number of entries that were compiled instead of loaded.
    compiled: int = 0
    #: True if the folder can only be read; then newly compiled entries are not kept.
    read_only: bool = False
    #: The objects of this distribution, which are whole; then the folder is theirs.
    packaged: ObjectFolder | None = None

    def objects(self) -> ObjectFolder | None:
        """Return the objects in the folder."""
        if self.packaged is not None or self.folder is None:
            return self.packaged
        return ObjectFolder(self.folder, machine_digest())


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
    try:
        return (Path(base) if base else Path.home() / ".cache") / "heliograph" / "kernels"
    except RuntimeError:
        # A user without a home. Nothing can be created there.
        return Path(os.devnull, "heliograph")


#: The modules of this folder that machine code depends on.
COMPILED_HERE = ("emitting.py", "runner.py")


def source_digest() -> str:
    """Return a digest of the kernels' sources: all but those that only load and run them."""
    digest = hashlib.sha256()
    own = Path(__file__).parent
    folder = own.parent
    for path in sorted(folder.rglob("*.py")):
        if path.parent == own and path.name not in COMPILED_HERE:
            continue
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def check_folder(folder: Path) -> Refusal | None:
    """Return the reason why `folder` cannot hold machine code, or None."""
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
    # Links among the parents are followed once, so that what is checked is what is used.
    folder = folder.parent.resolve() / folder.name
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
        with suppress(OSError):
            inner.mkdir(mode=0o700, exist_ok=True)
        refusal = check_folder(inner)
    return CacheState(inner) if refusal is None else CacheState(None, refusal)


class Entries:
    """The functions of the kernels that Python calls."""

    __slots__ = ("open_program", "pack_columns", "run_program", "serve", "transpose_rows")

    run_program: Callable[[int, int, int, int, int, bool], int]
    open_program: Callable[[int, int, int], int]
    serve: Callable[[int], int]
    pack_columns: Callable[[int, int, int, int], int]
    transpose_rows: Callable[[int, int, int, int, int], int]


class _Native:
    """The entries of this process, each loaded once."""

    def __init__(self) -> None:
        self.cache = CacheState(None)
        self.functions = Entries()
        #: The functions for each set of needs that was asked for and is loaded.
        self.needed: dict[int, Entries] = {}
        #: The addresses of entries by their `Place`, read by the runner.
        self.table = aligned_words(len(TABLE))
        self._changed = threading.Condition()
        self._linker: Linker | None = None
        self._loaded: set[str] = set()
        self._progress: list[Progress] = []
        self._compiling: Compiling | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        #: The entries that a program was the last to wait for.
        self._wanted: Collection[str] = ()
        self._tell_at = 0.0

    def start(self, folder: Path | None = None, progress: Progress | None = None) -> None:
        """Load what the folder has, and begin to compile the rest. The first call determines the
        folder."""
        with self._changed:
            if progress is not None:
                self._progress.append(progress)
            if len(self._loaded) == len(MODULES) or (self._thread is not None and self._thread.is_alive()):
                return
            if self._linker is None:
                self.cache = find_cache(folder)
                self._linker = Linker()
            kept = self.cache.objects()
            if kept:
                self._load_kept(kept)
            missing = len(MODULES) - len(self._loaded)
            if missing:
                _announce(self.cache, missing)
                self._failure = None
                self._thread = threading.Thread(
                    target=self._fill, args=(kept,), name="heliograph-compiling", daemon=True
                )
                self._thread.start()

    def require(self, entries: Collection[str]) -> Entries:
        """Wait until these entries are loaded. Raises what their compiler raised, or
        DeadlineExceededError."""
        if not self._loaded.issuperset(entries):
            self.start()
            with self._changed:
                self._wanted = entries
                if self._compiling is not None:
                    self._compiling.hasten(entries)
                there = self._changed.wait_for(lambda: self._has(entries), LOAD_SECONDS)
            if self._failure is not None and not self._loaded.issuperset(entries):
                raise self._failure
            if not there:
                message = f"the CPU kernels were not compiled within {LOAD_SECONDS:.0f} s"
                raise DeadlineExceededError(message, advice="run `heliograph warmup` beforehand")
        return self.functions

    def forked(self) -> None:
        """Forget the threads of the process that this one was forked from."""
        self._changed = threading.Condition()
        self._thread = self._compiling = None

    def stop(self) -> None:
        """End the processes that compile."""
        if self._compiling is not None:
            self._compiling.stop()

    def _has(self, entries: Collection[str]) -> bool:
        return self._failure is not None or self._loaded.issuperset(entries)

    def _fill(self, kept: ObjectFolder | None) -> None:
        """Compile and load all entries that are missing; on a thread of its own."""
        try:
            with ExitStack() as stack:
                folder: ObjectFolder | None
                if kept is None or self.cache.read_only:
                    folder = _scratch(stack)
                else:
                    folder = kept
                    stack.enter_context(turn(kept.path, lambda: self._load_kept_from(kept)))
                    self._load_kept_from(kept)
                missing = [entry for entry in MODULES if entry not in self._loaded]
                compiling = Compiling(folder, missing, self._compiled)
                self._compiling = compiling
                compiling.hasten(self._wanted)
                compiling.run()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._compiling = None

    def _load_kept_from(self, kept: ObjectFolder) -> None:
        with self._changed:
            self._load_kept(kept)

    def _load_kept(self, kept: ObjectFolder) -> None:
        for entry in MODULES:
            if entry not in self._loaded and (code := kept.read(entry)) is not None:
                self._load(entry, code)

    def _compiled(self, entry: str, code: bytes) -> None:
        """Tell that an entry was compiled, and load it."""
        with self._changed:
            self.cache = replace(self.cache, compiled=self.cache.compiled + 1)
            done = len(self._loaded) + 1
            for progress in self._progress:
                progress(done, len(MODULES), entry)
            if done == len(MODULES) or time.monotonic() >= self._tell_at:
                self._tell_at = time.monotonic() + TELL_SECONDS
                logger.info("compiling the CPU kernels: %d of %d are done", done, len(MODULES))
            self._load(entry, code)

    def _load(self, entry: str, code: bytes) -> None:
        assert self._linker is not None
        address, function = self._linker.load(entry, code)
        if entry in CORE:
            setattr(self.functions, entry, function)
        for place, name in TABLE.items():
            if name == entry:
                self.table[place] = address
        self._loaded.add(entry)
        self._changed.notify_all()


#: Places for objects that are not kept: the system's folder of temporary files, else memory, which
#: exists also in containers without a writable folder.
SCRATCH = (None, "/dev/shm")


def _scratch(stack: ExitStack) -> ObjectFolder | None:
    """Return a private, temporary folder; None if there is no place for one."""
    for place in SCRATCH:
        try:
            made = tempfile.TemporaryDirectory(
                prefix="heliograph-kernels-", dir=place, ignore_cleanup_errors=True
            )
        except OSError as error:
            logger.debug("no CPU kernels in %s: %s", place or "the temporary folder", error)
        else:
            return ObjectFolder(Path(stack.enter_context(made)), machine_digest())
    return None


def _announce(cache: CacheState, missing: int) -> None:
    """Log that graphs will wait, and why the kernels are not kept."""
    if cache.refusal is not None:
        logger.warning("CPU kernels are not kept on disk: %s", cache.refusal.value)
    logger.info(
        "compiling %d CPU kernels in the background, once per machine and version; graphs wait for those "
        "that they need; `heliograph warmup` does it beforehand",
        missing,
    )


_native = _Native()
atexit.register(_native.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_native.forked)


def start() -> None:
    """Load the kernels of the cache, and compile the others in the background."""
    _native.start()


def warmup(folder: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> CacheState:
    """Compile all kernels or load them from the cache; the first call determines the folder.

    Raises ImportError if numba is missing.
    """
    _native.start(None if folder is None else Path(folder), progress)
    _native.require(MODULES)
    return _native.cache


def find_cache(folder: str | os.PathLike[str] | None = None) -> CacheState:
    """Return the cache that would be used, or the reason for none; compiles nothing."""
    packaged = packaged_objects(source_digest())
    if packaged is not None:
        return CacheState(packaged.path, read_only=True, packaged=packaged)
    return open_cache(Path(folder) if folder else default_folder())


def cache_state() -> CacheState:
    """Return the cache in use; without folder and refusal before `start` or `warmup`."""
    return _native.cache


def table_address() -> int:
    """Return the address of the table of entries."""
    return int(_native.table.ctypes.data)


def entries(needs: int = 0) -> Entries:
    """Return the functions that Python calls, when they and the entries at the places `needs`,
    which are bits, are loaded."""
    found = _native.needed.get(needs)
    if found is None:
        names = {TABLE[place] for place in TABLE if needs >> place & 1}
        found = _native.needed[needs] = _native.require({*CORE, *names})
    return found
