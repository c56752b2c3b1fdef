"""The contents of a session: what it holds of its tenant's, and where others may come from.

A content is uploaded before anybody knows which device will need it, unless the client asked where it will
lie: it goes to the first with room for it, and moves when a plan is compiled for another. What plans use
stays where they use it. What lay on a device that is lost is missing, and so asked for again. What lies in a
file here is read when a plan needs it, straight to where that is.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from heliograph_backends.contract import Buffer, BufferType, Device, MultiBuffer, Tensor, Usage
from heliograph_proto.digests import DIGEST_BYTES, hasher
from heliograph_proto.errors import (
    ContentMismatchError,
    DeviceLostError,
    HeliographError,
    InvalidModelError,
    OutOfMemoryError,
)
from heliograph_proto.graph import Leaf
from heliograph_proto.models import ModelInfo
from heliograph_proto.types import tensor_type
from heliograph_server.resources.checks import check_living
from heliograph_server.resources.quotas import Account, Charge, QuotaKind
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.scheduler.slices import digest_of
from heliograph_server.weights.cache_writer import CacheWriter
from heliograph_server.weights.store import ContentSource, ContentStore, Key, PartialContent, WholeContent
from heliograph_server.weights.tenant_store import Copy, parts_of

#: What is read at once: it is hashed while it is in the cache of a core.
PIECE_BYTES = 256 * 2**10
#: Threads that read contents from files, each for one content.
READ_THREADS = 4


class SessionWeights:
    """One session's. Thread-safe. Without a tenant, nothing outlives the session."""

    def __init__(
        self,
        devices: Callable[[], Sequence[Device]],
        room: MemoryReclaim,
        store: ContentStore | None = None,
        tenant: bytes = b"",
        cache_writer: CacheWriter | None = None,
        account: Account | None = None,
    ) -> None:
        self._account = account or Account()
        #: By priority.
        self._devices = devices
        self._room = room
        self._store = store or ContentStore()
        self._cache_writer = cache_writer
        self._is_known = bool(tenant)
        #: One without a secret is a tenant of its own.
        self._tenant = tenant or secrets.token_bytes(16)
        self._holdings = self._store.enter(self._tenant, room, self._account)
        self._lock = threading.Lock()
        self._held: set[bytes] = set()
        #: Those that a plan was compiled for.
        self._used: set[bytes] = set()
        #: Where those are to lie that were missing last.
        self._homes: Mapping[bytes, BufferType] = {}
        #: Plans by the part of a weight that they use, and its memory.
        self._parts: Counter[Copy] = Counter()
        self._closed: HeliographError | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Contents {len(self._held)}, {self.size_bytes:,} bytes>"

    @property
    def size_bytes(self) -> int:
        """With what it shares with other sessions."""
        return self._holdings.size_bytes(self._all_held())

    def _all_held(self) -> tuple[bytes, ...]:
        with self._lock:
            return tuple(self._held)

    def _key(self, digest: bytes) -> Key:
        return self._tenant, digest

    # What comes

    def expect(self, homes: Mapping[bytes, BufferType]) -> None:
        """Contents that are missing, by digest, and where each will be needed: their uploads go there."""
        self._homes = dict(homes)

    def charge(self, size_bytes: int) -> Charge:
        """Counts memory of a content that comes without us; `add` counts it by itself. Raises
        OutOfMemoryError."""
        return self._account.charge(QuotaKind.MEMORY, size_bytes)

    def begin(self, digest: bytes, size_bytes: int, offset_bytes: int) -> PartialContent:
        """Where an upload goes: new memory, or at a later byte what an earlier upload left.

        Raises OutOfMemoryError, and ContentMismatchError when there is no such beginning.
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
            f"the upload cannot go on at byte {offset_bytes:,}: what came before is not here any more",
            advice="send the content from its beginning",
        )

    def keep(self, digest: bytes, beginning: PartialContent) -> None:
        """An upload broke off: what came stays for a while, for this tenant to go on with it."""
        if self._is_known and beginning.received_bytes:
            self._store.keep(self._key(digest), beginning)
        else:
            beginning.free()

    def add(self, digest: bytes, buffer: Buffer) -> None:
        """Keeps verified bytes; the second of two equal ones goes.

        Raises the error of a closed session, and LimitExceededError.
        """
        if self._closed is not None:
            buffer.free()
            raise self._closed
        self._holdings.add(digest, buffer, self)
        self._remember(digest)

    def _remember(self, digest: bytes) -> None:
        """The session holds a content now."""
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._held.add(digest)
        if is_over:
            self._holdings.release((digest,), self)
        elif self._is_known:
            self._store.forget(self._key(digest))

    # What there is

    def missing(self, digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Those that are not here, in their order. The others stay until the session ends, or can be read."""
        found = tuple(one for one in digests if not (self._holds(one) or self._can_read(one)))
        self._store.count(len(digests) - len(found), len(found))
        return found

    def received(self, digests: tuple[bytes, ...]) -> tuple[int, ...]:
        """How many bytes are here of contents that are missing: where their uploads go on."""
        return tuple(self._store.received_bytes(self._key(one)) for one in digests)

    def _holds(self, digest: bytes) -> bool:
        """Whether the content is in memory: this session's, or of another one of its tenant."""
        with self._lock:
            is_held = digest in self._held
        if is_held:
            return self._holdings.has(digest)
        if not self._holdings.hold(digest, self):
            return False
        self._remember(digest)
        return True

    def _can_read(self, digest: bytes) -> bool:
        return len(digest) == DIGEST_BYTES and self._store.has_source(self._key(digest))

    def bytes_on(self, device: str, weights: Sequence[Leaf]) -> int:
        """Bytes of those weights that lie on a device; of such as do not lie anywhere yet also what goes once
        they do."""
        return self._holdings.bytes_on(device, [leaf for leaf in weights if self._is_held(leaf)])

    def _is_held(self, leaf: Leaf) -> bool:
        with self._lock:
            return digest_of(leaf.digest) in self._held

    # Files

    def models(self) -> tuple[str, ...]:
        """The files of tensors that the operator allows."""
        return self._store.models.names() if self._store.models is not None else ()

    def describe_model(self, name: str) -> ModelInfo:
        """The tensors of one. Raises InvalidArgumentError, InvalidModelError."""
        if self._store.models is None:
            raise InvalidModelError(
                f"the server has no model {name!r:.100}", advice="its operator allows none (--models)"
            )
        return self._store.models.describe(name)

    def fetch(self, weights: Iterable[Leaf], homes: Mapping[bytes, BufferType]) -> None:
        """Reads those that are not in memory from their files, to the memory that needs them, by digest;
        those without one to any that has room.

        What cannot be read, or has another digest than its name, is missing afterwards. Raises
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
                why = self._fill(buffer, digest, source)
            except BaseException:
                buffer.free()
                raise
            if why:
                buffer.free()
                source.spoilt(why)
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
                pass  # a plan may still put it together elsewhere
        return self._holdings.room_for(size_bytes, self._living())

    def _living(self) -> Sequence[Device]:
        """The devices that are there. Raises DeviceLostError where none is."""
        devices = self._devices()
        return [one for one in devices if one.lost is None] or [check_living(one) for one in devices]

    def _fill(self, buffer: Buffer, digest: bytes, source: ContentSource) -> str:
        """Reads a content into memory, taking the digest of exactly what is written there. Why it is not the
        content that it should be; empty if it is. Raises the error of a session that ends."""
        taken, offset, host = hasher(), 0, _host_view(buffer)
        bounce = memoryview(bytearray(0 if host is not None else PIECE_BYTES))
        try:
            while offset < buffer.size_bytes:
                if self._closed is not None:
                    raise self._closed
                space = bounce if host is None else host[offset : offset + PIECE_BYTES]
                count = source.read_into(offset, space[: buffer.size_bytes - offset])
                if not count:
                    break  # it was cut: its digest tells
                taken.update(space[:count])
                if host is None:
                    buffer.set(offset, space[:count])
                offset += count
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}"
        return "" if taken.digest() == digest else "its bytes do not have its digest"

    # What plans need

    def tensor(self, leaf: Leaf, memory: BufferType) -> Tensor:
        """A weight's tensor in a memory, for a plan; `use` it when there is one. The content must be here.

        Raises InvalidGraphError, MissingContentError, OutOfMemoryError.
        """
        return self._holdings.tensor(leaf, memory, self)

    def cut(
        self, weight: Leaf, parts: Sequence[tuple[Leaf, BufferType]], *, keeps_whole: bool = False
    ) -> None:
        """Puts all parts of a weight where they are to lie; then whatever else of it no plan uses goes, but
        the whole if that is kept. Raises as `tensor` does."""
        self._holdings.cut(weight, parts, self, keeps_whole=keeps_whole)

    def use(self, weights: Iterable[tuple[Leaf, BufferType]]) -> None:
        """A plan was compiled for those copies: they stay, and others that no plan uses go."""
        found = list(weights)
        digests = {digest_of(leaf.digest) for leaf, _ in found}
        with self._lock:
            self._used |= digests
            self._parts.update(parts_of(found))
        self._holdings.use(found, self)
        # What lies with another daemon does not come here only to be written to this one's disk.
        here = {digest_of(leaf.digest) for leaf, memory in found if memory.device.intake is None}
        for digest in here if self._cache_writer is not None and self._is_known else ():
            assert self._cache_writer is not None
            if self._store.models is None or not self._store.models.holds(digest):
                self._cache_writer.keep(self._holdings, self._key(digest))

    def unuse(self, weights: Iterable[tuple[Leaf, BufferType]]) -> None:
        """A plan is gone. Wholes stay until the session ends, for other shapes; what parts no plan uses any
        more gives way to others. Takes no lock that anybody holds for long."""
        with self._lock:
            gone = []
            for one in parts_of(weights):
                self._parts[one] -= 1
                if self._parts[one] <= 0:
                    del self._parts[one]
                    gone.append(one)
            self._holdings.unuse(gone, self)

    def trim(self, weights: Iterable[Leaf]) -> None:
        """A compile failed: of the copies that no plan uses, one is enough."""
        self._holdings.trim(weights, self)

    # The end

    def stop(self, error: HeliographError) -> None:
        """The session ends: what is being read from files, or comes from now on, fails with this error."""
        self._closed = error

    def close(self, error: HeliographError, *, keep: bool = False) -> None:
        """Lets go of all; uploads that are not finished will fail with this error. With `keep`, what no plan
        used yet stays for a while: the client may go on with its uploads in another session."""
        self._closed = error
        with self._lock:
            is_first, self._is_over = not self._is_over, True
            held, self._held = self._held, set()
        for digest in held - self._used if keep and self._is_known else ():
            self._keep_whole(digest)
        self._holdings.release(held, self)
        if is_first:
            self._store.leave(self._tenant)

    def _keep_whole(self, digest: bytes) -> None:
        one = WholeContent(self._holdings, digest, self._holdings.size_bytes((digest,)))
        if self._holdings.hold(digest, one):
            self._store.keep(self._key(digest), one)


def _host_view(buffer: Buffer) -> memoryview | None:
    """The bytes of a buffer in this process's memory, to be read into without another copy."""
    if isinstance(buffer, MultiBuffer) or not buffer.buffer_type.is_host or not buffer.size_bytes:
        return None
    found: memoryview = buffer.array(tensor_type("u8", (buffer.size_bytes,)), 0, (1,)).data
    return found
