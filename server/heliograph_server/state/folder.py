"""A folder as the medium of a store.

    FOLDER/lock          held by the one daemon that uses the folder
    FOLDER/parts/...     files being written; emptied at the start

A file is written as a part, flushed, and renamed; then its folder is flushed. So a file is whole or
not there, whenever the daemon is killed.

Any thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from heliograph_proto.errors import ConfigurationError
from heliograph_server.state.files import flush, read_blocks, write_new
from heliograph_server.state.medium import FULL, Each, ReadBlock

logger = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXO
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


class FolderMedium:
    """A `Medium` in a folder, which is created.

    Raises ConfigurationError for a folder that cannot be used, or that another daemon uses.
    """

    shown = "the state folder"
    losses = 0
    is_reachable = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        #: Folders with names that may not be flushed yet, by the number of the last such name.
        self._unflushed: dict[Path, int] = {}
        self._last_name = 0
        self._held = -1
        #: The text by which this daemon knows its lock.
        self._mark = secrets.token_hex(16).encode()
        try:
            self._open()
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"cannot keep the state of sessions in {folder}: {error.strerror or error}",
                advice="choose a folder that this user may write to: --state DIR",
            ) from None
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<FolderMedium {self.folder}>"

    @property
    def where(self) -> str:
        """As `Medium.where`."""
        return f"the state folder {self.folder}"

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(self.folder)
        self._held = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | _NO_FOLLOW, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another daemon keeps the state of its sessions in {self.folder}",
                advice="end that daemon, or choose another folder: --state DIR",
            ) from None
        os.ftruncate(self._held, 0)
        os.pwrite(self._held, self._mark, 0)
        os.fsync(self._held)
        for name in ("contents", "sessions", "links", "parts"):
            path = self.folder / name
            path.mkdir(mode=0o700, exist_ok=True)
            _check_private(path)
        flush(self.folder)
        # A daemon may have been killed before it flushed these.
        contents = self.folder / "contents"
        self._unflushed = dict.fromkeys((self.folder / "sessions", contents, *contents.iterdir()), 0)
        for part in (self.folder / "parts").iterdir():
            part.unlink(missing_ok=True)
        probe = self.folder / self._new_part()
        write_new(probe, ())
        probe.unlink()

    def close(self) -> None:
        """As `Medium.close`."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    @property
    def is_taken_over(self) -> bool:
        """True if another daemon uses the folder: a file system of several hosts may give a lock
        away while its holder is cut off."""
        try:
            return (self.folder / "lock").read_bytes() != self._mark
        except OSError:
            return True

    # Writing

    def check(self) -> None:
        """As `Medium.check`: a write finds it out soon enough."""

    def write(self, pieces: Iterable[memoryview], size_bytes: int) -> str:
        """As `Medium.write`."""
        part = self._new_part()
        try:
            write_new(self.folder / part, pieces)
        except BaseException:
            (self.folder / part).unlink(missing_ok=True)
            raise
        return part

    def _new_part(self) -> str:
        return f"parts/{secrets.token_hex(12)}"

    def name(self, parts: Mapping[str, str]) -> None:
        """As `Medium.name`. The parts are flushed."""
        for part, path in parts.items():
            self._name(self.folder / part, self.folder / path)

    def _name(self, part: Path, path: Path) -> None:
        # Under the lock, so that the folder is known as unflushed once the file can be found.
        with self._lock:
            self._last_name += 1
            if not path.parent.exists():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._unflushed[path.parent.parent] = self._last_name
            self._unflushed[path.parent] = self._last_name
            os.replace(part, path)

    def flush(self, paths: Iterable[str], each: Each) -> None:
        """As `Medium.flush`."""
        files = {self.folder / path for path in paths}
        folders = {folder for path in files for folder in (path.parent, path.parent.parent)}
        with self._lock:
            found = {str(one): self._unflushed[one] for one in folders if one in self._unflushed}
        for _ in each(lambda folder: flush(Path(folder)), found):
            pass
        with self._lock:
            for folder, number in found.items():
                # Another session may have given a name there meanwhile.
                if self._unflushed.get(Path(folder)) == number:
                    del self._unflushed[Path(folder)]

    # Removing

    def remove(self, paths: Iterable[str]) -> None:
        """As `Medium.remove`."""
        for path in paths:
            try:
                (self.folder / path).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("state %s: %s cannot be removed: %s", self.folder, path, error.strerror)

    def remove_folder(self, path: str) -> None:
        """As `Medium.remove_folder`."""
        folder = self.folder / path
        try:
            if folder.is_dir():
                for inner in folder.iterdir():
                    inner.unlink(missing_ok=True)
                folder.rmdir()
                flush(folder.parent)
        except OSError as error:
            logger.warning("state %s: %s cannot be removed: %s", self.folder, path, error.strerror)

    # Reading

    def size_of(self, path: str) -> int | None:
        """As `Medium.size_of`."""
        try:
            return (self.folder / path).stat().st_size
        except OSError:
            return None

    def paths(self, folder: str) -> Sequence[str]:
        """As `Medium.paths`."""
        found = (path for path in (self.folder / folder).rglob("*") if not path.is_dir())
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def blocks(self, path: str) -> Iterator[ReadBlock]:
        """As `Medium.blocks`."""
        return read_blocks(self.folder / path)

    def read(self, path: str, most_bytes: int) -> bytes:
        """As `Medium.read`."""
        file = os.open(self.folder / path, os.O_RDONLY | _NO_FOLLOW)
        with open(file, "rb") as source:
            return source.read(most_bytes)

    def size_bytes(self) -> int:
        """As `Medium.size_bytes`."""
        total = 0
        for inner, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.lstat(os.path.join(inner, name)).st_size
                except OSError:
                    continue
        return total

    def advice(self, error: OSError) -> str:
        """As `Medium.advice`."""
        if error.errno in FULL:
            return "make room on the disk; the last snapshot stays, and runs go on"
        return "look after the disk of the state folder; the last snapshot stays"


def _check_own(path: Path) -> None:
    """Raise ConfigurationError for a folder in which others may put other folders in place of ours:
    they would read users' data, or have sessions restored that they made up."""
    found = path.stat()
    groups = (os.getegid(), *os.getgroups())
    is_ours = found.st_uid in (os.geteuid(), 0) or found.st_gid in groups
    if not is_ours or found.st_mode & stat.S_IWOTH:
        raise ConfigurationError(
            f"others may replace what is in {path}",
            advice=f"chmod o-w {path}, or choose a folder of this user: --state DIR",
        )


def _check_private(path: Path) -> None:
    """Raise ConfigurationError for a folder that others may open: it has users' data."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"{path} is no folder", advice="choose another folder: --state DIR")
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to another user", advice="choose a folder of this user: --state DIR"
        )
    if found.st_mode & _OTHERS:
        raise ConfigurationError(
            f"{path} has users' data, and others may open it",
            advice=f"chmod -R o= {path.parent}",
        )
