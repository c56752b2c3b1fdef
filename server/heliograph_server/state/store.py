"""The state folder: images of sessions, and the contents that they name.

    FOLDER/lock                      held by the one daemon that uses the folder
    FOLDER/contents/ab/abcdef...     bytes, named by their BLAKE3 digest
    FOLDER/sessions/1234.../7.image  the image of a session by the digest of its secret; the highest
                                     number is the newest, and the one before it is kept
    FOLDER/links/members             the sessions with the members of a pool (`links.py`)
    FOLDER/parts/...                 files being written

A file is written as a part, flushed, and renamed; then its folder is flushed. So a file is whole or
not there, whenever the daemon is killed. Readers check digests all the same. Threads hash, write
and flush the contents of an image side by side (`files.py`); they get their names together, before
the image is written. An image is written once the names of all its contents are flushed, also of
those that another session has just written. A content is removed only when no image names it.

Any thread.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from heliograph_proto.digests import DIGEST_BYTES, digest_of, hasher
from heliograph_proto.errors import ConfigurationError, SnapshotFailedError
from heliograph_server.state.files import THREADS, Spaces, ahead, flush, read_blocks, write_new
from heliograph_server.state.image import MOST_BYTES, Image, decode_image, encode_image

logger = logging.getLogger(__name__)

#: The images of a session that are kept.
KEPT_IMAGES = 2
#: The largest file of links that is read.
MOST_LINK_BYTES = 2**20
_OTHERS = stat.S_IRWXO
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC

#: Makes a call for each path: one after the other, or on threads.
_Each: TypeAlias = "Callable[[Callable[[Path], None], Iterable[Path]], Iterator[None]]"


@dataclass(frozen=True, slots=True)
class Broken:
    """A session whose images cannot be used."""

    #: The digest of its secret, as its folder's name.
    name: str
    error: SnapshotFailedError


@dataclass(slots=True)
class StoreStatistics:
    """Totals of a store since it was opened."""

    images: int = 0
    written_bytes: int = 0
    #: Bytes that were there already.
    reused_bytes: int = 0
    failures: int = 0


class StateStore:
    """The state folder, which is created. Thread-safe.

    Raises ConfigurationError for a folder that cannot be used, or that another daemon uses.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.statistics = StoreStatistics()
        self._lock = threading.Lock()
        #: The images of each session, oldest first, with what they name.
        self._images: dict[str, list[tuple[int, frozenset[bytes]]]] = {}
        #: Contents that an image being made will name, by the number of such images.
        self._pinned: Counter[bytes] = Counter()
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
        return f"<StateStore {self.folder}, {len(self._images)} sessions>"

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
        probe = self._new_part()
        write_new(probe, ())
        probe.unlink()

    def close(self) -> None:
        """Let another daemon use the folder. Idempotent."""
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

    def _check_held(self) -> None:
        if self.is_taken_over:
            raise SnapshotFailedError(
                f"another daemon has taken over the state folder {self.folder}",
                advice="end this daemon: its durable sessions go on with the other one",
            )

    # Contents

    def holds(self, digest: bytes) -> bool:
        """True if a content is here."""
        return self._content(digest).exists()

    @contextmanager
    def pinned(self) -> Iterator[Pins]:
        """A context in which contents that are added stay, until an image names them."""
        with ThreadPoolExecutor(THREADS, "heliograph-state") as threads:
            pins = Pins(self, threads)
            try:
                yield pins
            finally:
                threads.shutdown(cancel_futures=True)
                for part in pins.parts.values():
                    part.unlink(missing_ok=True)
                self._unpin(pins)

    def _unpin(self, pins: Pins) -> None:
        with self._lock:
            self._pinned -= pins.digests
            self._remove(set(pins.digests) - self._named())

    def pin(self, digest: bytes, pins: Pins) -> bool:
        """Keep a content while the pins last. True if it is here."""
        with self._lock:
            pins.digests[digest] += 1
            self._pinned[digest] += 1
            return self.holds(digest)

    def add(self, digest: bytes, size_bytes: int, pieces: Iterable[memoryview], pins: Pins) -> None:
        """Write a content, unless it is here. The bytes are known to have the digest.

        Raises SnapshotFailedError for a full or broken disk, and the errors of reading `pieces`.
        """
        is_here, part = self.pin(digest, pins), self._new_part()
        with self._lock:
            is_here = is_here or pins.parts.setdefault(digest, part) is not part
            if is_here:
                self.statistics.reused_bytes += size_bytes
                return
        with self._failing_with(f"writing {size_bytes:,} bytes"):
            write_new(part, pieces)
        with self._lock:
            self.statistics.written_bytes += size_bytes
            pins.written_bytes += size_bytes

    def _place(self, pins: Pins) -> None:
        """Give the new contents of an image their names, and flush those of all of its contents."""
        for digest, part in list(pins.parts.items()):
            self._name(part, self._content(digest))
            del pins.parts[digest]
        # One of each folder.
        digests = {digest[0]: digest for digest in pins.digests}.values()
        self._flush_names([self._content(digest) for digest in digests], pins.threads.map)

    def read(self, digest: bytes) -> Iterator[memoryview]:
        """Read a content in pieces, each valid until the next one.

        Raises SnapshotFailedError for one that is gone or damaged, the latter after its last
        piece."""
        return self.read_all((digest,))

    def read_all(self, digests: Sequence[bytes]) -> Iterator[memoryview]:
        """As `read`, for contents one after the other. Threads read ahead."""
        spaces, taken = Spaces(), hasher()
        blocks = list(self._blocks(digests, spaces))
        for block in ahead(blocks) if len(blocks) > 1 else (one() for one in blocks):
            if not block.is_checked:
                taken.update(block.piece)
            if block.piece.nbytes:
                yield block.piece
            spaces.give(block.space)
            if block.is_last and not block.is_checked:
                _check(block.digest, taken.digest())
                taken = hasher()

    def _blocks(self, digests: Iterable[bytes], spaces: Spaces) -> Iterator[Callable[[], _Block]]:
        """Return functions that read contents."""
        for digest in digests:
            with _reading(digest):
                blocks = list(read_blocks(self._content(digest)))
            for number, read in enumerate(blocks, 1):
                is_last = number == len(blocks)
                yield partial(_read, digest, partial(read, spaces), is_last, is_last and number == 1)

    def whole(self, digest: bytes) -> bytes:
        """Read a small content. Raises SnapshotFailedError."""
        return b"".join(map(bytes, self.read(digest)))

    def size_of(self, digest: bytes) -> int:
        """The bytes of a content; 0 if it is not here."""
        try:
            return self._content(digest).stat().st_size
        except OSError:
            return 0

    # Images

    def commit(self, image: Image, pins: Pins) -> bytes:
        """Write an image, whose contents are here and pinned. Return its digest.

        Raises SnapshotFailedError. The images before it stay until `tidy`."""
        self._check_held()
        with self._failing_with("writing contents"):
            self._place(pins)
        missing = [one for one in image.contents() if pins.digests[one] == 0 or not self.holds(one)]
        if missing:
            raise _damaged(missing[0], "is gone")
        name, data = image.secret_digest.hex(), encode_image(image)
        with self._lock:
            known = self._images.get(name, ())
            number = known[-1][0] + 1 if known else 1
        with self._failing_with("writing an image"):
            self._write(self._image(name, number), data)
        with self._lock:
            self._images.setdefault(name, []).append((number, image.contents()))
            self.statistics.images += 1
        return digest_of(data)

    def tidy(self, secret_digest: bytes) -> None:
        """Remove the images of a session but the last ones, and what no image needs any more."""
        self._drop_images(secret_digest.hex(), KEPT_IMAGES)

    def forget(self, secret_digest: bytes) -> None:
        """Remove the images of a session that has ended, and what only they name."""
        self._drop_images(secret_digest.hex(), 0)

    def load(self) -> tuple[list[Image], list[Broken]]:
        """Read the newest good image of each session, and the sessions without one.

        An image that is torn, or names contents that are gone, gives way to the one before it.
        """
        images, broken = [], []
        for folder in sorted(path for path in (self.folder / "sessions").iterdir() if path.is_dir()):
            image, problems = self._load(folder)
            if image is not None:
                images.append(image)
            elif problems:
                broken.append(Broken(folder.name, problems[0]))
        if not broken:
            # The contents that a broken image names are unknown: an operator may still want it.
            self._sweep()
        return images, broken

    def newest(self, secret_digest: bytes) -> tuple[Image | None, list[SnapshotFailedError]]:
        """Read the newest good image of one session; with the problems of newer ones."""
        return self._load(self.folder / "sessions" / secret_digest.hex())

    def _load(self, folder: Path) -> tuple[Image | None, list[SnapshotFailedError]]:
        found, problems = None, []
        kept: list[tuple[int, frozenset[bytes]]] = []
        for number in sorted(_numbers(folder), reverse=True):
            try:
                image = self._read_image(folder.name, number)
                found = found or image
                kept.insert(0, (number, image.contents()))
            except SnapshotFailedError as error:
                problems.append(error)
                if found is None and "has version" in error.message:
                    break
        with self._lock:
            self._images[folder.name] = kept
        for problem in problems:
            logger.warning("%s", problem)
        return found, problems

    def _read_image(self, name: str, number: int) -> Image:
        path = self._image(name, number)
        where = f"{name[:16]}/{path.name}"
        try:
            if path.stat().st_size > MOST_BYTES:
                raise SnapshotFailedError(f"image {where} is damaged: it is too large")
            data = path.read_bytes()
        except OSError as error:
            raise SnapshotFailedError(f"image {where} cannot be read: {error.strerror}") from None
        image = decode_image(data, where)
        if image.secret_digest.hex() != name:
            raise SnapshotFailedError(f"image {where} is damaged: it is of another session")
        for digest in image.contents():
            if len(digest) != DIGEST_BYTES or not self.holds(digest):
                raise _damaged(digest, f"is gone, which image {where} names")
        return image

    # Links

    def write_links(self, data: bytes) -> None:
        """Write what is kept of links to members. Raises SnapshotFailedError."""
        self._check_held()
        with self._failing_with("writing the links to members"):
            self._write(self.folder / "links" / "members", data)

    def read_links(self) -> bytes:
        """Read it; empty if there is none. Raises SnapshotFailedError."""
        try:
            file = os.open(self.folder / "links" / "members", os.O_RDONLY | _NO_FOLLOW)
            with open(file, "rb") as source:
                return source.read(MOST_LINK_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise SnapshotFailedError(f"the links to members cannot be read: {error.strerror}") from None

    # Removing

    def _drop_images(self, name: str, kept: int) -> None:
        if self.is_taken_over:
            return  # they are another daemon's
        with self._lock:
            known = self._images.get(name, [])
            gone, left = known[: len(known) - kept], known[len(known) - kept :]
            if kept and not gone:
                return
            if left:
                self._images[name] = left
            else:
                self._images.pop(name, None)
            unneeded = {digest for _, digests in gone for digest in digests} - self._named()
            try:
                for number, _ in gone:
                    self._image(name, number).unlink(missing_ok=True)
                if not left:
                    _remove_folder(self.folder / "sessions" / name)
            except OSError as error:
                logger.warning("state %s: an image cannot be removed: %s", self.folder, error.strerror)
            self._remove(unneeded)

    def _remove(self, digests: Iterable[bytes]) -> None:
        if self.is_taken_over:
            return
        for digest in digests:
            try:
                self._content(digest).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("state %s: a content cannot be removed: %s", self.folder, error.strerror)

    def _named(self) -> set[bytes]:
        named = {one for images in self._images.values() for _, digests in images for one in digests}
        return named | set(self._pinned)

    def _sweep(self) -> None:
        """Remove the contents that no image names, which a killed daemon left."""
        with self._lock:
            named = self._named()
            for path in (self.folder / "contents").glob("*/*"):
                try:
                    if bytes.fromhex(path.name) not in named:
                        path.unlink(missing_ok=True)
                except (ValueError, OSError):
                    continue

    # Files

    def size_bytes(self) -> int:
        """The bytes of all files."""
        total = 0
        for inner, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.lstat(os.path.join(inner, name)).st_size
                except OSError:
                    continue
        return total

    def _content(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / "contents" / name[:2] / name

    def _image(self, name: str, number: int) -> Path:
        return self.folder / "sessions" / name / f"{number}.image"

    def _new_part(self) -> Path:
        return self.folder / "parts" / secrets.token_hex(12)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file whole or not at all."""
        part = self._new_part()
        try:
            write_new(part, (memoryview(data),))
            self._name(part, path)
            self._flush_names([path], map)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _name(self, part: Path, path: Path) -> None:
        """Give a part, which is flushed, its name. The name itself is not flushed yet."""
        # Under the lock, so that the folder is known as unflushed once the file can be found.
        with self._lock:
            self._last_name += 1
            if not path.parent.exists():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._unflushed[path.parent.parent] = self._last_name
            self._unflushed[path.parent] = self._last_name
            os.replace(part, path)

    def _flush_names(self, paths: Iterable[Path], each: _Each) -> None:
        """Flush the names of files, also those that others gave, if that is left. Raises OSError."""
        folders = {folder for path in paths for folder in (path.parent, path.parent.parent)}
        with self._lock:
            found = {one: self._unflushed[one] for one in folders if one in self._unflushed}
        for _ in each(flush, found):
            pass
        with self._lock:
            for folder, number in found.items():
                # Another session may have given a name there meanwhile.
                if self._unflushed.get(folder) == number:
                    del self._unflushed[folder]

    @contextmanager
    def _failing_with(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.statistics.failures += 1
            full = error.errno in _FULL
            raise SnapshotFailedError(
                f"{what} to the state folder failed: {error.strerror or error}",
                advice=(
                    "make room on the disk; the last snapshot stays, and runs go on"
                    if full
                    else "look after the disk of the state folder; the last snapshot stays"
                ),
            ) from None


class Pins:
    """Contents that stay while an image is made."""

    def __init__(self, store: StateStore, threads: ThreadPoolExecutor) -> None:
        self._store = store
        #: Those that write new contents.
        self.threads = threads
        self.digests: Counter[bytes] = Counter()
        #: New contents, which have no name.
        self.parts: dict[bytes, Path] = {}
        self.written_bytes = 0

    def add(self, data: memoryview) -> Future[bytes]:
        """Write bytes, which stay as they are, on a thread. Its result is their digest.

        It raises SnapshotFailedError."""
        return self.threads.submit(self.add_whole, data)

    def add_whole(self, data: memoryview | bytes) -> bytes:
        """Write bytes, and return their digest. Raises SnapshotFailedError."""
        digest = digest_of(data)
        self._store.add(digest, len(data), (memoryview(data),), self)
        return digest

    def add_checked(self, digest: bytes, size_bytes: int, pieces: Iterable[memoryview]) -> None:
        """Write a content that is to have a digest. Raises SnapshotFailedError if it has another."""
        taken = hasher()

        def checked() -> Iterator[memoryview]:
            for piece in pieces:
                taken.update(piece)
                yield piece
            if taken.digest() != digest:
                raise SnapshotFailedError("bytes changed while they were written", advice="try again")

        self._store.add(digest, size_bytes, checked(), self)

    def keep(self, digests: Sequence[bytes]) -> bool:
        """Keep contents. False if one of them is not here."""
        here = [self._store.pin(one, self) or one in self.parts for one in digests]
        return all(here)


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


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a content that was read."""

    digest: bytes
    piece: memoryview
    #: The memory that it is in.
    space: memoryview
    is_last: bool
    #: True if it is the whole content, and has its digest.
    is_checked: bool


def _read(
    digest: bytes, read: Callable[[], tuple[memoryview, memoryview]], is_last: bool, is_whole: bool
) -> _Block:
    with _reading(digest):
        piece, space = read()
    if is_whole:
        # On a thread that reads ahead.
        _check(digest, digest_of(piece))
    return _Block(digest, piece, space, is_last, is_whole)


def _check(digest: bytes, found: bytes) -> None:
    if found != digest:
        raise _damaged(digest, "has other bytes than were written")


@contextmanager
def _reading(digest: bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "is gone" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise _damaged(digest, why) from None


def _damaged(digest: bytes, why: str) -> SnapshotFailedError:
    return SnapshotFailedError(
        f"content {digest.hex()[:16]} of the state folder {why}",
        advice="the image before it is used, if there is one",
    )


def _numbers(folder: Path) -> Iterator[int]:
    for path in folder.glob("*.image"):
        if path.stem.isdecimal():
            yield int(path.stem)


def _remove_folder(path: Path) -> None:
    """Remove a session's folder with everything in it."""
    if not path.is_dir():
        return
    for inner in path.iterdir():
        inner.unlink(missing_ok=True)
    path.rmdir()
    flush(path.parent)


def now_us() -> int:
    """The time in microseconds since 1970."""
    return time.time_ns() // 1000
