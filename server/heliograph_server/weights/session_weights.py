"""The contents of a session: those it holds of its tenant, and those that it can read from files.

A content is uploaded before the device that needs it is known, unless the client asked for its
place. It goes to the first device with room, and moves when a plan is compiled for another one.
Contents that plans use stay where they are used; those that plans have used and use no longer stay
until an allocation needs their memory. A content on a lost device is missing, so the client uploads
it again. A content in a file here is read when a plan needs it, straight to its device.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from heliograph_backends.contract import Buffer, BufferType, Device, Tensor, Usage
from heliograph_proto.digests import hasher
from heliograph_proto.errors import (
    ContentMismatchError,
    DeviceLostError,
    HeliographError,
    InvalidModelError,
    MissingContentError,
    OutOfMemoryError,
)
from heliograph_proto.graph import Leaf
from heliograph_proto.models import ModelFile, ModelInfo
from heliograph_server.resources.checks import check_living
from heliograph_server.resources.quotas import Account, Charge, QuotaKind
from heliograph_server.resources.reclaim import MemoryReclaim, Reclaimable
from heliograph_server.scheduler.slices import digest_of
from heliograph_server.weights.cache_writer import CacheWriter
from heliograph_server.weights.disk_cache import FileSource
from heliograph_server.weights.store import ContentStore, Key, PartialContent, WholeContent
from heliograph_server.weights.tenant_store import WeightUse

#: The size of one read. A piece is hashed while it is in a core's cache.
PIECE_BYTES = 256 * 2**10
#: The size of one piece of a content that is written to a file.
WRITE_BYTES = 2**20
#: Threads that read contents from files, one content each.
READ_THREADS = 4


class SessionWeights:
    """The contents of one session. Thread-safe. Without a tenant, nothing outlives the session."""

    def __init__(
        self,
        devices: Callable[[], Sequence[Device]],
        room: MemoryReclaim,
        store: ContentStore | None = None,
        tenant: bytes = b"",
        cache_writer: CacheWriter | None = None,
        account: Account | None = None,
        name: bytes = b"",
    ) -> None:
        """`name`: that of the contents which a session without a tenant takes over (`lent`)."""
        self._account = account or Account()
        #: By priority.
        self._devices = devices
        self._room = room
        self._store = store or ContentStore()
        self._cache_writer = cache_writer
        self._is_known = bool(tenant)
        #: A session without a secret is a tenant of its own.
        self._tenant = tenant or name or secrets.token_bytes(16)
        self._holdings = self._store.enter(self._tenant, room, self._account)
        self._lock = threading.Lock()
        self._held: set[bytes] = set()
        #: Contents that a plan was compiled for.
        self._used: set[bytes] = set()
        #: The memories of the contents that were last found missing.
        self._homes: Mapping[bytes, BufferType] = {}
        self._closed: HeliographError | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<SessionWeights {len(self._held)}, {self.size_bytes:,} bytes>"

    @property
    def size_bytes(self) -> int:
        """The bytes held, including those shared with other sessions."""
        return self._holdings.size_bytes(self._all_held())

    def held(self) -> list[tuple[bytes, int, bool]]:
        """The contents that are held: their digests, their sizes, and whether a model file of the
        server has them."""
        models = self._store.models
        return [
            (one, self._holdings.whole_bytes(one), models is not None and models.holds(one))
            for one in self._all_held()
        ]

    @contextmanager
    def reading(self, digest: bytes) -> Iterator[Iterator[memoryview]]:
        """A context with the bytes of a held content in pieces, each valid until the next one.

        Raises MissingContentError for one that was reclaimed."""
        reader = object()
        if not self._holdings.hold(digest, reader):
            raise MissingContentError(f"content {digest.hex()[:16]} was reclaimed")
        try:
            yield pieces_of(self._holdings.whole(digest, reader))
        finally:
            self._holdings.release((digest,), reader)

    @contextmanager
    def lent(self) -> Iterator[bytes]:
        """A context in which the contents stay when the session ends. Gives the name by which
        another session takes them over."""
        holder = object()
        self._store.enter(self._tenant, self._room, self._account)
        held = [one for one in self._all_held() if self._holdings.hold(one, holder)]
        try:
            yield self._tenant
        finally:
            self._holdings.release(held, holder)
            self._store.leave(self._tenant)

    def _all_held(self) -> tuple[bytes, ...]:
        with self._lock:
            return tuple(self._held)

    def _key(self, digest: bytes) -> Key:
        return self._tenant, digest

    # Adding contents

    def expect(self, homes: Mapping[bytes, BufferType]) -> None:
        """Set the memories of missing contents, by digest, for their uploads."""
        self._homes = dict(homes)

    def charge(self, size_bytes: int) -> Charge:
        """Charge the memory of a content that arrives from elsewhere; `add` charges it by itself.

        Raises OutOfMemoryError.
        """
        return self._account.charge(QuotaKind.MEMORY, size_bytes)

    def begin(self, digest: bytes, size_bytes: int, offset_bytes: int) -> PartialContent:
        """Begin an upload in new memory, or at a later byte in the memory of an interrupted upload.

        Raises OutOfMemoryError, and ContentMismatchError if no interrupted upload ends at that
        byte.
        """
        if not offset_bytes:
            charge = self.charge(size_bytes)
            try:
                buffer = self._memory(size_bytes, self._homes.get(digest))
            except BaseException:
                charge.give()
                raise
            return PartialContent(buffer, hasher(), 0, size_bytes, charge)
        found = self._store.take_beginning(self._key(digest))
        if found is not None and (found.received_bytes, found.size_bytes) == (offset_bytes, size_bytes):
            return found
        if found is not None:
            found.free()
        raise ContentMismatchError(
            f"the upload cannot continue at byte {offset_bytes:,}: the bytes before it are gone",
            advice="send the content from its start",
        )

    def now(self) -> float:
        """The time by which uploads count as stalled."""
        return self._store.now()

    def join(self, upload: Reclaimable) -> None:
        """Register an upload under way, which gives way to whatever needs its memory or quota."""
        self._room.join(upload)
        self._account.join(upload)

    def leave(self, upload: Reclaimable) -> None:
        """Undo `join`. Idempotent."""
        self._room.leave(upload)
        self._account.leave(upload)

    def keep(self, digest: bytes, beginning: PartialContent) -> None:
        """Keep the bytes of an interrupted upload for a while, so that this tenant can continue
        it."""
        if self._is_known and beginning.received_bytes:
            self._store.keep(self._key(digest), beginning)
        else:
            beginning.free()

    def add(self, digest: bytes, buffer: Buffer) -> None:
        """Add verified bytes. A second copy of equal bytes is freed.

        Raises the error of a closed session, and LimitExceededError.
        """
        if self._closed is not None:
            buffer.free()
            raise self._closed
        self._holdings.add(digest, buffer, self)
        self._remember(digest)

    def _remember(self, digest: bytes) -> None:
        """Note that the session holds a content."""
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._held.add(digest)
        if is_over:
            self._holdings.release((digest,), self)
        elif self._is_known:
            self._store.forget(self._key(digest))

    # Looking up contents

    def missing(self, digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The contents that are not here, in their order. The others stay until the session has
        compiled with them, or can be read from files."""
        has_source = self._store.has_source
        found = tuple(one for one in digests if not (self._holds(one) or has_source(self._key(one))))
        self._store.count(len(digests) - len(found), len(found))
        return found

    def received(self, digests: tuple[bytes, ...]) -> tuple[int, ...]:
        """The number of bytes that interrupted uploads left of missing contents: where uploads
        continue."""
        return tuple(self._store.received_bytes(self._key(one)) for one in digests)

    def _holds(self, digest: bytes) -> bool:
        """True if the content is in memory, held by this session or another one of its tenant."""
        if not self._holdings.hold(digest, self):
            return False
        with self._lock:
            is_held = digest in self._held
        if not is_held:
            self._remember(digest)
        return True

    @contextmanager
    def wanted(self, weights: Iterable[Leaf]) -> Iterator[None]:
        """Keep the contents of weights while the context is active, for a compile.

        Afterwards those that no plan uses give way to other work.
        """
        digests = {digest_of(leaf.digest) for leaf in weights}
        for digest in digests:
            self._holds(digest)
        try:
            yield
        finally:
            self._holdings.spare(digests, self)

    def bytes_on(self, device: str, weights: Sequence[Leaf]) -> int:
        """As `TenantContents.bytes_on`, for weights that this session holds."""
        held = set(self._all_held())
        return self._holdings.bytes_on(device, [leaf for leaf in weights if digest_of(leaf.digest) in held])

    # Files

    def models(self) -> tuple[ModelFile, ...]:
        """The model files that the operator allows."""
        return self._store.models.files() if self._store.models is not None else ()

    def describe_model(self, name: str) -> ModelInfo:
        """The tensors of a model file. Raises InvalidArgumentError, InvalidModelError."""
        if self._store.models is None:
            raise InvalidModelError(
                f"the server has no model {name!r:.100}", advice="it serves no models; see --models"
            )
        return self._store.models.describe(name)

    def fetch(self, weights: Iterable[Leaf], homes: Mapping[bytes, BufferType]) -> None:
        """Read the weights that are not in memory from their files, into the memories given by
        digest, or into any memory with room.

        Contents that cannot be read, or do not match their digest, are missing afterwards. Raises
        OutOfMemoryError, InvalidModelError, and the error of a session that ends.
        """
        absent = {leaf.digest for leaf in weights if not self._holds(leaf.digest)}
        if not absent:
            return
        with ThreadPoolExecutor(min(READ_THREADS, len(absent)), "heliograph-read") as threads:
            for done in [threads.submit(self._read, one, homes.get(one)) for one in absent]:
                done.result()

    def _read(self, digest: bytes, memory: BufferType | None) -> None:
        source = self._store.source(self._key(digest))
        if source is None:
            return
        try:
            charge = self._account.charge(QuotaKind.MEMORY, source.size_bytes)
        except BaseException:
            source.close()
            raise
        try:
            buffer = self._memory(source.size_bytes, memory)
            try:
                reason = self._fill(buffer, digest, source)
            except BaseException:
                buffer.free()
                raise
            if reason:
                buffer.free()
                source.reject(reason)
            else:
                self.add(digest, buffer)
        finally:
            charge.give()
            source.close()

    def _memory(self, size_bytes: int, memory: BufferType | None) -> Buffer:
        if memory is not None and memory.device.lost is None:
            try:
                return self._room.for_work(partial(memory.allocate, size_bytes, Usage.WEIGHTS))
            except (OutOfMemoryError, DeviceLostError):
                pass  # the content may still fit elsewhere
        devices = self._devices()
        living = [one for one in devices if one.lost is None] or [check_living(one) for one in devices]
        return self._holdings.room_for(size_bytes, living)

    def _fill(self, buffer: Buffer, digest: bytes, source: FileSource) -> str:
        """Read a content into memory, and check the digest of exactly the bytes written there.

        Return the reason if the content is wrong, else "". Raises the error of a session that ends.
        """
        taken, offset, space = hasher(), 0, memoryview(bytearray(min(PIECE_BYTES, buffer.size_bytes)))
        try:
            while offset < buffer.size_bytes:
                if self._closed is not None:
                    raise self._closed
                count = source.read_into(offset, space[: buffer.size_bytes - offset])
                if not count:
                    break  # the file was truncated: the digest differs
                taken.update(space[:count])
                buffer.set(offset, space[:count])
                offset += count
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}"
        return "" if taken.digest() == digest else "its bytes do not match its digest"

    # Weights of plans

    def tensor(self, leaf: Leaf, memory: BufferType) -> Tensor:
        """As `TenantContents.tensor`."""
        return self._holdings.tensor(leaf, memory, self)

    def cut(
        self, weight: Leaf, parts: Sequence[tuple[Leaf, BufferType]], *, keeps_whole: bool = False
    ) -> None:
        """As `TenantContents.cut`."""
        self._holdings.cut(weight, parts, self, keeps_whole=keeps_whole)

    def leave_elsewhere(self, weights: Iterable[tuple[Leaf, BufferType]]) -> None:
        """As `TenantContents.leave_elsewhere`."""
        self._holdings.leave_elsewhere(weights)

    def use(self, weights: Iterable[tuple[Leaf, BufferType]]) -> WeightUse:
        """Mark copies as used by a plan, until the use ends. Other copies that no plan uses are
        freed."""
        found = list(weights)
        with self._lock:
            self._used |= {digest_of(leaf.digest) for leaf, _ in found}
        made = self._holdings.use(found, self)
        # Contents on another daemon are not fetched only to write them to this one's disk.
        here = {digest_of(leaf.digest) for leaf, memory in found if memory.device.intake is None}
        for digest in here if self._cache_writer is not None and self._is_known else ():
            assert self._cache_writer is not None
            if self._store.models is None or not self._store.models.holds(digest):
                self._cache_writer.keep(self._holdings, self._key(digest))
        return made

    def trim(self, weights: Iterable[Leaf]) -> None:
        """Free unused copies after a failed compile, except for one."""
        self._holdings.trim(weights, self)

    # The end

    def stop(self, error: HeliographError) -> None:
        """Fail reads from files, and later additions, with this error: the session ends."""
        self._closed = error

    def close(self, error: HeliographError, *, keep: bool = False) -> None:
        """Release all contents. Unfinished uploads fail with this error.

        `keep`: contents that no plan has used yet stay for a while, so that the client can continue
        in another session.
        """
        self._closed = error
        with self._lock:
            is_first, self._is_over = not self._is_over, True
            held, self._held = self._held, set()
        for digest in held - self._used if keep and self._is_known else ():
            one = WholeContent(self._holdings, digest, self._holdings.size_bytes((digest,)))
            if self._holdings.hold(digest, one):
                self._store.keep(self._key(digest), one)
        self._holdings.release(held, self)
        if is_first:
            self._store.leave(self._tenant)


def pieces_of(found: Buffer | memoryview) -> Iterator[memoryview]:
    """The bytes of a content in pieces, each valid until the next one."""
    if isinstance(found, memoryview):
        for offset in range(0, found.nbytes, WRITE_BYTES):
            yield found[offset : offset + WRITE_BYTES]
        return
    space = memoryview(bytearray(min(WRITE_BYTES, found.size_bytes)))
    for offset in range(0, found.size_bytes, WRITE_BYTES):
        piece = space[: min(WRITE_BYTES, found.size_bytes - offset)]
        found.get(offset, piece)
        yield piece
