"""Writes the contents that plans use to the disk cache, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from heliograph_backends.contract import Buffer
from heliograph_proto.errors import MissingContentError
from heliograph_server.weights.disk_cache import DiskCache
from heliograph_server.weights.store import ContentStore, Key
from heliograph_server.weights.tenant_store import TenantContents

logger = logging.getLogger(__name__)

#: The size of one read from a device.
PIECE_BYTES = 2**20
#: A content that was written or touched so recently is skipped.
AGAIN_SECONDS = 60.0
#: The time that shutdown waits for pending writes.
CLOSE_SECONDS = 20.0


class CacheWriter:
    """A queue of contents and the thread that writes them. Each content is held until it is
    written."""

    def __init__(self, store: ContentStore, cache: DiskCache) -> None:
        self._store = store
        self._cache = cache
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Key, TenantContents] = OrderedDict()
        #: By tenant and digest: when it was last written or touched.
        self._done: OrderedDict[Key, float] = OrderedDict()
        self._is_busy = False
        self._writing: Key | None = None
        self._closed = False
        self._hurry = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<CacheWriter {len(self._waiting)} contents to write>"

    def keep(self, holdings: TenantContents, key: Key) -> None:
        """Write a content soon, unless that was just done."""
        with self._changed:
            before = self._done.get(key)
            is_fresh = before is not None and time.monotonic() < before + AGAIN_SECONDS
            is_queued = key in self._waiting or key == self._writing
            if self._closed or is_fresh or is_queued or not holdings.hold(key[1], self):
                return
            self._waiting[key] = holdings
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="heliograph-cache", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until everything is written, at most so many seconds. Return True if it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._is_busy), timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write the queue, for at most so many seconds; drop the rest. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self.wait_idle(timeout):
            logger.warning("%d contents could not be cached in time", len(self._waiting))
        self._hurry = True
        self.make_room()
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def make_room(self) -> bool:
        """As `Reclaimable.make_room`: release the contents that are not written yet."""
        with self._changed:
            left = list(self._waiting.items())
        gone = [key for key, holdings in left if holdings.try_release(key[1], self)]
        with self._changed:
            for key in gone:
                self._waiting.pop(key, None)
        self._store.tidy()
        return bool(gone)

    def idle_on(self, device: str) -> int:
        """As `Reclaimable.idle_on`. Most queued contents are used by a session, so none counts as
        idle."""
        return 0

    def _run(self) -> None:
        while (found := self._next()) is not None:
            key, holdings = found
            try:
                self._write(key, holdings)
            except Exception:
                logger.exception("a content could not be cached")
            finally:
                holdings.release((key[1],), self)
                self._store.tidy()
                with self._changed:
                    self._is_busy, self._writing = False, None
                    self._changed.notify_all()

    def _next(self) -> tuple[Key, TenantContents] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._is_busy = True
            self._writing, holdings = self._waiting.popitem(last=False)
            return self._writing, holdings

    def _write(self, key: Key, holdings: TenantContents) -> None:
        tenant, digest = key
        try:
            found = holdings.whole(digest, self)
        except MissingContentError:
            return  # its memory was reclaimed
        size_bytes = found.nbytes if isinstance(found, memoryview) else found.size_bytes
        if self._cache.add(tenant, digest, size_bytes, self._pieces(found, size_bytes)):
            self._remember(key)

    def _pieces(self, found: Buffer | memoryview, size_bytes: int) -> Iterator[memoryview]:
        space = memoryview(bytearray(min(PIECE_BYTES, size_bytes)))
        for offset in range(0, size_bytes, PIECE_BYTES):
            if self._hurry:
                raise TimeoutError("the daemon is shutting down")
            piece = space[: min(PIECE_BYTES, size_bytes - offset)]
            if isinstance(found, memoryview):
                piece = found[offset : offset + piece.nbytes]
            else:
                found.get(offset, piece)
            yield piece

    def _remember(self, key: Key) -> None:
        self._done[key] = time.monotonic()
        self._done.move_to_end(key)
        while len(self._done) > 10_000:
            self._done.popitem(last=False)
