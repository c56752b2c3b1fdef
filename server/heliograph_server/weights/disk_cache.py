"""A disk cache of contents, with a byte quota and LRU eviction, shared by several daemons.

    FOLDER/blobs/ab/abcdef...   a content, named by its digest; its mtime is that of its last use
    FOLDER/claims/12/1234...    a tenant has uploaded a content: the name is a hash of both
    FOLDER/parts/...            files being written

There is no index that could be inconsistent, and no lock: a blob appears by a rename, complete and
flushed, and removing it twice is harmless. Readers check the digest of every blob. Claims keep
tenants apart: without a claim a blob does not exist for a tenant, and looking up a missing blob
takes the same steps whether or not another tenant has it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from heliograph_proto.digests import DIGEST_BYTES, digest_of, hasher
from heliograph_proto.errors import ConfigurationError

logger = logging.getLogger(__name__)

#: The size of one read or write.
PIECE_BYTES = 2**20
#: Files occupy whole blocks, and a claim occupies one.
BLOCK_BYTES = 4096
#: A part that was not written to for so long was left by a killed process.
STALE_SECONDS = 600.0
#: The time that a count of the folder's bytes is valid; other processes write there too.
COUNT_SECONDS = 5.0
#: The pause after a write failed on a full or broken disk.
PAUSE_SECONDS = 60.0
#: For `os.open`: do not follow symlinks in the folder.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class Blob:
    """A content on disk."""

    digest: bytes
    size_bytes: int
    #: Seconds since 1970.
    used_at: float

    @property
    def disk_bytes(self) -> int:
        return _blocks(self.size_bytes)


class DiskCache:
    """The cache in a folder, which is created. Thread-safe.

    Raises ConfigurationError for a folder that cannot be used.
    """

    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes
        self._lock = threading.Lock()
        self._counted_bytes = 0
        self._counted_at = float("-inf")
        self._paused_until = float("-inf")
        self._make_folders()
        self._sweep_parts()

    def __repr__(self) -> str:
        return f"<DiskCache {self.folder}, at most {self.quota_bytes:,} bytes>"

    def _make_folders(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("blobs", "claims", "parts"):
                (self.folder / name).mkdir(mode=0o700, exist_ok=True)
            probe = self._new_part(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"cannot keep contents in {self.folder}: {error.strerror or error}",
                advice="choose a folder that this user may write to: --cache DIR",
            ) from None

    # Look-ups

    def holds(self, tenant: bytes, digest: bytes) -> bool:
        """True if the tenant has uploaded this content and it is still here."""
        return self._claim(tenant, digest).exists() and self._blob(digest).exists()

    def open(self, digest: bytes) -> FileSource | None:
        """Open a content to read and check it, and mark it as used. None if it cannot be read."""
        path = self._blob(digest)
        try:
            file = os.open(path, os.O_RDONLY | _NO_FOLLOW)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._reject(digest, str(error.strerror or error))
            return None
        self._touch(path)
        return FileSource(file, os.fstat(file).st_size, lambda reason: self._reject(digest, reason))

    def blobs(self) -> list[Blob]:
        """All contents, the most recently used first."""
        found = []
        for path, status in _files(self.folder / "blobs"):
            digest = _digest_of_name(path)
            if digest is not None:
                found.append(Blob(digest, status.st_size, status.st_mtime))
        return sorted(found, key=lambda blob: -blob.used_at)

    def is_whole(self, digest: bytes) -> bool:
        """Check the digest of a content. False for one that is broken or gone; it is not
        removed."""
        try:
            with self._blob(digest).open("rb", buffering=0) as file:
                taken = hasher()
                for piece in _pieces(file):
                    taken.update(piece)
                return bool(taken.digest() == digest)
        except OSError:
            return False

    # Changes

    def add(self, tenant: bytes, digest: bytes, size_bytes: int, pieces: Iterable[memoryview]) -> bool:
        """Cache a content that the tenant uploaded. Return True if it is cached now.

        A content that is here already is marked as used. A full or broken disk is logged, and
        nothing is cached: a blob is written completely or not at all. Raises the errors of reading
        `pieces`.
        """
        path = self._blob(digest)
        try:
            if not self._touch(path):
                if not self._make_room(_blocks(size_bytes) + BLOCK_BYTES):
                    return False
                self._write(path, digest, size_bytes, pieces)
            self._make_claim(tenant, digest)
        except OSError as error:
            self._pause(error)
            return False
        return True

    def remove(self, digest: bytes) -> bool:
        """Remove a content. Return True if it was here. Raises OSError if it cannot be removed."""
        try:
            self._blob(digest).unlink()
        except FileNotFoundError:
            return False
        self._forget_count()
        self._sweep_claims()
        return True

    def _write(self, path: Path, digest: bytes, size_bytes: int, pieces: Iterable[memoryview]) -> None:
        part = self._new_part(digest)
        try:
            with part.open("r+b", buffering=0) as file:
                _reserve(file, size_bytes)
                taken = hasher()
                for piece in pieces:
                    taken.update(piece)
                    _write_all(file, piece)
                os.fsync(file.fileno())
            if taken.digest() != digest:
                raise OSError(errno.EIO, "the bytes do not match their digest")
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(part, path)
            _flush_folder(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            self._forget_count()
            raise

    def _new_part(self, digest: bytes) -> Path:
        path = self.folder / "parts" / f"{digest.hex()[:16]}.{os.getpid()}.{secrets.token_hex(8)}"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_FOLLOW, 0o600))
        return path

    def _touch(self, path: Path) -> bool:
        """Mark a content as used. Return True if it is here."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    # Claims

    def _make_claim(self, tenant: bytes, digest: bytes) -> None:
        path = self._claim(tenant, digest)
        if path.exists():
            return
        part = self._new_part(digest)
        part.write_bytes(digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(part, path)

    def _sweep_claims(self) -> None:
        """Remove the claims of contents that are not here any more."""
        here = {blob.digest for blob in self.blobs()}
        for path, _ in _files(self.folder / "claims"):
            try:
                if path.read_bytes() not in here:
                    path.unlink()
            except FileNotFoundError:
                pass

    # Room

    def size_bytes(self) -> int:
        """The bytes on disk: contents, claims and parts."""
        total = 0
        for name in ("blobs", "claims", "parts"):
            total += sum(_blocks(status.st_size) for _, status in _files(self.folder / name))
        return total

    def _make_room(self, size_bytes: int) -> bool:
        """Evict the least recently used contents until so many bytes fit. Return True if they
        do."""
        if size_bytes > self.quota_bytes or time.monotonic() < self._paused_until:
            return False
        with self._lock:
            now = time.monotonic()
            is_old = now > self._counted_at + COUNT_SECONDS
            if is_old or self._counted_bytes + size_bytes > self.quota_bytes:
                self._counted_bytes, self._counted_at = self.size_bytes(), now
            while (excess := self._counted_bytes + size_bytes - self.quota_bytes) > 0:
                if not self._evict(excess):
                    break
                self._counted_bytes = self.size_bytes()
            fits = self._counted_bytes + size_bytes <= self.quota_bytes
            self._counted_bytes += size_bytes if fits else 0
            return fits

    def _evict(self, excess_bytes: int) -> int:
        """Remove contents and their claims until about so many bytes are free. Return their
        number."""
        count = freed = 0
        for blob in reversed(self.blobs()):
            if freed >= excess_bytes:
                break
            self._blob(blob.digest).unlink(missing_ok=True)
            freed += blob.disk_bytes + BLOCK_BYTES  # for a claim, or several
            count += 1
        if count:
            logger.info("cache %s: evicted %d contents", self.folder, count)
            self._sweep_claims()
        return count

    def _forget_count(self) -> None:
        with self._lock:
            self._counted_at = float("-inf")

    def _sweep_parts(self) -> None:
        """Remove the parts that killed processes left."""
        now = time.time()
        for path, status in _files(self.folder / "parts"):
            if now - status.st_mtime > STALE_SECONDS:
                path.unlink(missing_ok=True)

    # Failures

    def _pause(self, error: OSError) -> None:
        """Log a failed write, and pause writing."""
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        full = " (the disk is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        logger.warning(
            "cache %s: nothing is kept for %.0f s: %s%s",
            self.folder,
            PAUSE_SECONDS,
            error.strerror or error,
            full,
        )

    def _reject(self, digest: bytes, reason: str) -> None:
        """Remove a content that cannot be used, so that it is uploaded again."""
        logger.warning("cache %s: content %s is removed: %s", self.folder, digest.hex()[:16], reason)
        try:
            self._blob(digest).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cache %s: it cannot be removed: %s", self.folder, error.strerror)

    # Names

    def _blob(self, digest: bytes) -> Path:
        return _path(self.folder / "blobs", digest)

    def _claim(self, tenant: bytes, digest: bytes) -> Path:
        return _path(self.folder / "claims", digest_of(b"claim" + tenant + digest))


class FileSource:
    """A content in a file that is being read, until `close`."""

    def __init__(
        self, file: int, size_bytes: int, reject: Callable[[str], None], start_bytes: int = 0
    ) -> None:
        self._file = file
        self._start_bytes = start_bytes
        self.size_bytes = size_bytes
        #: Called with the reason if the bytes are wrong. May raise InvalidModelError.
        self.reject = reject

    def read_into(self, offset_bytes: int, out: memoryview) -> int:
        """Read bytes from an offset. Return their number, 0 at the end. Raises OSError."""
        left = out[: self.size_bytes - offset_bytes]
        return read_at(self._file, self._start_bytes + offset_bytes, left)

    def close(self) -> None:
        os.close(self._file)


def read_at(file: int, offset_bytes: int, out: memoryview) -> int:
    """Read from an offset of a file. Return the number of bytes, 0 at its end. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [out], offset_bytes)
    os.lseek(file, offset_bytes, os.SEEK_SET)
    data = os.read(file, out.nbytes)
    out[: len(data)] = data
    return len(data)


def _pieces(file: BinaryIO) -> Iterator[memoryview]:
    space = memoryview(bytearray(PIECE_BYTES))
    while count := file.readinto(space):  # type: ignore[attr-defined]
        yield space[:count]


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The plain files below a folder, without symlinks. Files that disappear meanwhile are
    omitted."""
    for inner, _, names in os.walk(folder):
        for name in names:
            path = Path(inner, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status


def _path(folder: Path, digest: bytes) -> Path:
    name = digest.hex()
    return folder / name[:2] / name


def _digest_of_name(path: Path) -> bytes | None:
    try:
        digest = bytes.fromhex(path.name)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None


def _blocks(size_bytes: int) -> int:
    return max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES


def _reserve(file: BinaryIO, size_bytes: int) -> None:
    """Reserve the space at once, where the system can: other processes count it, and a full disk
    shows before the write."""
    if size_bytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise


def _write_all(file: BinaryIO, piece: memoryview) -> None:
    while piece.nbytes:
        piece = piece[file.write(piece) :]


def _flush_folder(folder: Path) -> None:
    """Flush a folder, so that a rename is durable."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
