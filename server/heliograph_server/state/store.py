"""The store: images of sessions, and the contents that they name, on a medium (`medium.py`).

    contents/ab/abcdef...     bytes, named by their BLAKE3 digest
    sessions/1234.../7.image  the image of a session by the digest of its secret; the highest
                              number is the newest, and the one before it is kept
    links/members             the sessions with the members of a pool (`links.py`)

Each file is whole or not there, whenever the daemon is killed. Readers check digests all the same.
Threads hash, write and flush the contents of an image side by side (`files.py`); they get their
names together, before the image is written. An image is written once the names of all its contents
are flushed, also of those that another session has just written. A content is removed only when no
image names it.

Any thread.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

from heliograph_proto.digests import DIGEST_BYTES, digest_of, hasher
from heliograph_proto.errors import SnapshotFailedError
from heliograph_server.state.files import THREADS, Copies, ReadSpace, ahead
from heliograph_server.state.image import MOST_BYTES, Image, decode_image, encode_image
from heliograph_server.state.medium import Medium, MediumLostError, ReadBlock

logger = logging.getLogger(__name__)

#: The images of a session that are kept.
KEPT_IMAGES = 2
#: The largest file of links that is read.
MOST_LINK_BYTES = 2**20
#: The path of the links to members.
_LINKS = "links/members"
#: Whether a path is that of a content.
_IS_CONTENT = re.compile(r"contents/[0-9a-f]{2}/[0-9a-f]+").fullmatch


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
    """Images and contents on a medium, which the store closes. Thread-safe."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.statistics = StoreStatistics()
        #: The memory of copies of what images hold.
        self.copies = Copies()
        self._lock = threading.Lock()
        #: The images of each session, oldest first, with what they name.
        self._images: dict[str, list[tuple[int, frozenset[bytes]]]] = {}
        #: Contents that an image being made will name, by the number of such images.
        self._pinned: Counter[bytes] = Counter()
        #: The losses of the medium after which the images above, and the links, are there.
        self._images_after = self._links_after = medium.losses
        #: The links to members, as they were written last.
        self._links: bytes | None = None

    def __repr__(self) -> str:
        return f"<StateStore in {self.medium.where}, {len(self._images)} sessions>"

    def check(self) -> None:
        """Raise SnapshotFailedError if nothing can be written now."""
        with self._failing_with("writing a snapshot"):
            self.medium.check()

    def close(self) -> None:
        """Let another daemon use what is kept. Idempotent."""
        self.medium.close()

    def _check_held(self) -> None:
        if self.medium.is_taken_over:
            raise SnapshotFailedError(
                f"another daemon has taken over {self.medium.where}",
                advice="end this daemon: its durable sessions go on with the other one",
            )

    def _look_for_losses(self) -> None:
        """Forget the images that a medium has lost, and write the links again."""
        with self._lock:
            losses = self.medium.losses
            if losses != self._images_after:
                self._images_after = losses
                # An image may have been written after the loss, and before it was noticed here.
                for name, known in list(self._images.items()):
                    self._images[name] = [one for one in known if self._has_image(name, one[0])]
            links = self._links if losses != self._links_after else None
        if links is not None:
            self.write_links(links)

    def _has_image(self, name: str, number: int) -> bool:
        return self.medium.size_of(_image(name, number)) is not None

    # Contents

    def holds(self, digest: bytes) -> bool:
        """True if a content is here."""
        return self.medium.size_of(_content(digest)) is not None

    @contextmanager
    def pinned(self) -> Iterator[Pins]:
        """A context in which contents that are added stay, until an image names them.

        Raises SnapshotFailedError."""
        self._look_for_losses()
        with ThreadPoolExecutor(THREADS, "heliograph-state") as threads:
            pins = Pins(self, threads)
            try:
                yield pins
            finally:
                threads.shutdown(cancel_futures=True)
                self.medium.remove(filter(None, pins.parts.values()))
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
        is_here = self.pin(digest, pins)
        with self._lock:
            if is_here or digest in pins.parts:
                self.statistics.reused_bytes += size_bytes
                return
            # Another thread with the same bytes need not write them.
            pins.parts[digest] = ""
        with self._failing_with(f"writing {size_bytes:,} bytes"):
            pins.parts[digest] = self.medium.write(pieces, size_bytes)
        with self._lock:
            self.statistics.written_bytes += size_bytes
            pins.written_bytes += size_bytes

    def _place(self, pins: Pins) -> None:
        """Give the new contents of an image their names, and flush those of all of its contents."""
        self.medium.name({part: _content(digest) for digest, part in pins.parts.items()})
        pins.parts.clear()
        # One of each folder.
        digests = {digest[0]: digest for digest in pins.digests}.values()
        self.medium.flush([_content(digest) for digest in digests], pins.threads.map)

    def read(self, digest: bytes) -> Iterator[memoryview]:
        """Read a content in pieces, each valid until the next one.

        Raises SnapshotFailedError for one that is gone or damaged, the latter after its last
        piece."""
        return self.read_all((digest,))

    def read_all(self, digests: Sequence[bytes]) -> Iterator[memoryview]:
        """As `read`, for contents one after the other. Threads read ahead."""
        spaces, taken = ReadSpace(), hasher()
        blocks = list(self._blocks(digests, spaces))
        for block in ahead(blocks) if len(blocks) > 1 else (one() for one in blocks):
            if not block.is_checked:
                taken.update(block.piece)
            if block.piece.nbytes:
                yield block.piece
            spaces.give(block.space)
            if block.is_last and not block.is_checked:
                self._check(block.digest, taken.digest())
                taken = hasher()

    def _blocks(self, digests: Iterable[bytes], spaces: ReadSpace) -> Iterator[Callable[[], _Block]]:
        """Return functions that read contents."""
        for digest in digests:
            with self._reading(digest):
                blocks = list(self.medium.blocks(_content(digest)))
            for number, read in enumerate(blocks, 1):
                is_last = number == len(blocks)
                yield partial(self._read, digest, read, spaces, is_last, is_last and number == 1)

    def _read(
        self, digest: bytes, read: ReadBlock, spaces: ReadSpace, is_last: bool, is_whole: bool
    ) -> _Block:
        with self._reading(digest):
            piece, space = read(spaces)
        if is_whole:
            # On a thread that reads ahead.
            self._check(digest, digest_of(piece))
        return _Block(digest, piece, space, is_last, is_whole)

    def _check(self, digest: bytes, found: bytes) -> None:
        if found != digest:
            raise self._damaged(digest, "has other bytes than were written")

    @contextmanager
    def _reading(self, digest: bytes) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = "is gone" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise self._damaged(digest, why) from None

    def _damaged(self, digest: bytes, why: str) -> SnapshotFailedError:
        return SnapshotFailedError(
            f"content {digest.hex()[:16]} of {self.medium.shown} {why}",
            advice="the image before it is used, if there is one",
        )

    def whole(self, digest: bytes) -> bytes:
        """Read a small content. Raises SnapshotFailedError."""
        return b"".join(map(bytes, self.read(digest)))

    def size_of(self, digest: bytes) -> int:
        """The bytes of a content; 0 if it is not here."""
        return self.medium.size_of(_content(digest)) or 0

    # Images

    def commit(self, image: Image, pins: Pins) -> bytes:
        """Write an image, whose contents are here and pinned. Return its digest.

        Raises SnapshotFailedError. The images before it stay until `tidy`."""
        self._check_held()
        with self._failing_with("writing contents"):
            self._place(pins)
        missing = [one for one in image.contents() if pins.digests[one] == 0 or not self.holds(one)]
        if missing:
            raise self._damaged(missing[0], "is gone")
        name, data = image.secret_digest.hex(), encode_image(image)
        with self._lock:
            known = [number for number, _ in self._images.get(name, ())]
        # Above those that could not be read, too.
        number = 1 + max(chain(known, self._numbers(name)), default=0)
        with self._failing_with("writing an image"):
            try:
                self._write(_image(name, number), data)
            except BaseException:
                # It may be there all the same, and outlive its session.
                if not self.medium.is_taken_over:
                    self.medium.remove([_image(name, number)])
                raise
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
        Raises MediumLostError.
        """
        images, broken = [], []
        for name in sorted({path.split("/")[1] for path in self.medium.paths("sessions")}):
            image, problems = self._load(name)
            if image is not None:
                images.append(image)
            elif problems:
                broken.append(Broken(name, problems[0]))
        if not broken:
            # The contents that a broken image names are unknown: an operator may still want it.
            self._sweep()
        return images, broken

    def newest(self, secret_digest: bytes) -> tuple[Image | None, list[SnapshotFailedError]]:
        """Read the newest good image of one session; with the problems of newer ones."""
        return self._load(secret_digest.hex())

    def _load(self, name: str) -> tuple[Image | None, list[SnapshotFailedError]]:
        found, problems = None, []
        kept: list[tuple[int, frozenset[bytes]]] = []
        for number in sorted(self._numbers(name), reverse=True):
            try:
                image = self._read_image(name, number)
                found = found or image
                kept.insert(0, (number, image.contents()))
            except MediumLostError:
                raise
            except SnapshotFailedError as error:
                problems.append(error)
                if found is None and "has version" in error.message:
                    break
        with self._lock:
            self._images[name] = kept
        for problem in problems:
            logger.warning("%s", problem)
        return found, problems

    def _read_image(self, name: str, number: int) -> Image:
        path, where = _image(name, number), f"{name[:16]}/{number}.image"
        if (self.medium.size_of(path) or 0) > MOST_BYTES:
            raise SnapshotFailedError(f"image {where} is damaged: it is too large")
        try:
            data = self.medium.read(path, MOST_BYTES)
        except OSError as error:
            raise SnapshotFailedError(f"image {where} cannot be read: {error.strerror}") from None
        image = decode_image(data, where)
        if image.secret_digest.hex() != name:
            raise SnapshotFailedError(f"image {where} is damaged: it is of another session")
        for digest in image.contents():
            if len(digest) != DIGEST_BYTES or not self.holds(digest):
                raise self._damaged(digest, f"is gone, which image {where} names")
        return image

    # Links

    def write_links(self, data: bytes) -> None:
        """Write what is kept of links to members. Raises SnapshotFailedError."""
        self._check_held()
        losses = self.medium.losses
        with self._failing_with("writing the links to members"):
            self._write(_LINKS, data)
        with self._lock:
            self._links, self._links_after = data, losses

    def read_links(self) -> bytes:
        """Read it; empty if there is none. Raises SnapshotFailedError."""
        try:
            return self.medium.read(_LINKS, MOST_LINK_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise SnapshotFailedError(f"the links to members cannot be read: {error.strerror}") from None

    # Removing

    def _drop_images(self, name: str, kept: int) -> None:
        if self.medium.is_taken_over:
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
            first = left[0][0] if left else math.inf
            # Also those that could not be read.
            older = {number for number in self._numbers(name) if number < first}
            self.medium.remove([_image(name, one) for one in older | {number for number, _ in gone}])
            if not left:
                self.medium.remove_folder(f"sessions/{name}")
            self._remove(unneeded)

    def _remove(self, digests: Iterable[bytes]) -> None:
        if not self.medium.is_taken_over:
            self.medium.remove(map(_content, digests))

    def _named(self) -> set[bytes]:
        named = {one for images in self._images.values() for _, digests in images for one in digests}
        return named | set(self._pinned)

    def _sweep(self) -> None:
        """Remove the contents that no image names, which a killed daemon left."""
        with self._lock:
            named = set(map(_content, self._named()))
            paths = self.medium.paths("contents")
            self.medium.remove(one for one in paths if _IS_CONTENT(one) and one not in named)

    # Files

    def size_bytes(self) -> int:
        """The bytes of all files."""
        return self.medium.size_bytes()

    def _numbers(self, name: str) -> Iterator[int]:
        for path in self.medium.paths(f"sessions/{name}"):
            stem, _, suffix = path.rpartition("/")[2].rpartition(".")
            if suffix == "image" and stem.isdecimal():
                yield int(stem)

    def _write(self, path: str, data: bytes) -> None:
        """Write a file whole or not at all."""
        part = self.medium.write((memoryview(data),), len(data))
        try:
            self.medium.name({part: path})
            self.medium.flush([path], map)
        except BaseException:
            self.medium.remove([part])
            raise

    @contextmanager
    def _failing_with(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.statistics.failures += 1
            raise SnapshotFailedError(
                f"{what} to {self.medium.shown} failed: {error.strerror or error}",
                advice=self.medium.advice(error),
            ) from None


class Pins:
    """Contents that stay while an image is made."""

    def __init__(self, store: StateStore, threads: ThreadPoolExecutor) -> None:
        self._store = store
        #: Those that write new contents.
        self.threads = threads
        self.digests: Counter[bytes] = Counter()
        #: New contents, which have no name; "" while they are written.
        self.parts: dict[bytes, str] = {}
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


def _content(digest: bytes) -> str:
    name = digest.hex()
    return f"contents/{name[:2]}/{name}"


def _image(name: str, number: int) -> str:
    return f"sessions/{name}/{number}.image"


def now_us() -> int:
    """The time in microseconds since 1970."""
    return time.time_ns() // 1000
