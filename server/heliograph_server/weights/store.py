"""Contents that the sessions of a host share, by tenant and digest, in device memory.

A tenant is identified by the secret presented when its sessions open. Its sessions share contents:
one copy of a content on a device serves them all. Sessions of different tenants share no memory,
and no answer to one tenant depends on what another one has. A session without a secret is a tenant
of its own.

    held:   a session holds it, and plans may use copies of it; freed with the last session, and
            before that if no plan uses it, no session is about to compile with it, and other work
            needs its memory
    kept:   no session holds it, but an interrupted upload may continue: for a bounded time, in
            bounded memory, and only until a device's memory is needed for another content

An upload under way has the memory of the whole content. It gives that away, and ends, if nothing
came for a while and other work needs memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from heliograph_backends.contract import Buffer, MultiBuffer
from heliograph_proto.digests import DIGEST_BYTES, digest_of
from heliograph_proto.errors import InvalidArgumentError
from heliograph_server.resources.quotas import Account, Charge
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines
from heliograph_server.weights.disk_cache import DiskCache, FileSource
from heliograph_server.weights.model_files import ModelFiles
from heliograph_server.weights.tenant_store import TenantContents

logger = logging.getLogger(__name__)

#: The time that the bytes of an interrupted upload are kept.
KEEP_SECONDS = 600.0
#: The most bytes kept, in all.
KEEP_BYTES = 4 * 2**30
#: An upload without bytes for so long gives way to whatever needs its memory.
STALLED_SECONDS = 5.0
#: Lengths of a secret. So many random bytes cannot be guessed; the longest is only a bound.
SECRET_BYTES = (16, 1024)

#: A tenant and a digest.
Key: TypeAlias = tuple[bytes, bytes]


def tenant_of(secret: bytes, operators_name: str = "") -> bytes:
    """The name of a tenant: a hash, so that the secret is neither in memory nor on disk.

    Tenants to which the operator gave different names share nothing, even with the same secret.
    Raises InvalidArgumentError for a secret that could be guessed.
    """
    least, most = SECRET_BYTES
    if not least <= len(secret) <= most:
        raise InvalidArgumentError(
            f"a tenant's secret must have {least} to {most} bytes, not {len(secret)}",
            advice="use 32 random bytes, or send no secret",
        )
    if operators_name:
        # Names contain no zero bytes, so different pairs of name and secret have different hashes.
        return digest_of(b"heliograph named tenant\0" + operators_name.encode() + b"\0" + secret)
    return digest_of(b"heliograph tenant\0" + secret)


@dataclass(eq=False, slots=True)
class PartialContent:
    """The first bytes of a content whose upload was interrupted."""

    buffer: Buffer
    #: Updated with the bytes that arrived.
    hash: Any
    received_bytes: int
    size_bytes: int
    #: The quota charge of its memory.
    charge: Charge

    def bytes_on(self, device: str) -> int:
        """The bytes of its memory on a device."""
        parts = _parts_of(self.buffer)
        return sum(part.size_bytes for part in parts if part.buffer_type.device.name == device)

    def free(self) -> None:
        """Free the memory and give back its charge."""
        self.buffer.free()
        self.charge.give()


@dataclass(eq=False, slots=True)
class WholeContent:
    """A content that no plan has used yet. This object is its holder."""

    holdings: TenantContents
    digest: bytes
    size_bytes: int


Kept: TypeAlias = PartialContent | WholeContent


class ContentStore:
    """The contents of all tenants. Thread-safe.

    Memory is freed outside of the lock, since it may be on another host.
    """

    def __init__(
        self,
        cache: DiskCache | None = None,
        models: ModelFiles | None = None,
        keep_seconds: float = KEEP_SECONDS,
        keep_bytes: int = KEEP_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.models = models
        self._keep_seconds, self._keep_bytes = keep_seconds, keep_bytes
        self._clock = clock
        self._timers = Deadlines(clock)
        self._lock = threading.Lock()
        #: By tenant, with the number of its sessions.
        self._tenants: dict[bytes, tuple[TenantContents, int]] = {}
        #: With the time when each expires; the oldest first.
        self._kept: OrderedDict[Key, tuple[float, Kept]] = OrderedDict()
        self._closed = False
        #: Contents that clients looked up: found, and not found.
        self.hits = self.misses = 0

    def __repr__(self) -> str:
        return f"<ContentStore of {len(self._tenants)} tenants, {len(self._kept)} kept>"

    def count(self, hits: int, misses: int) -> None:
        """Count look-ups of contents: found here, and to be uploaded."""
        with self._lock:
            self.hits += hits
            self.misses += misses

    @property
    def kept_bytes(self) -> int:
        """The bytes kept for uploads that may continue."""
        with self._lock:
            return sum(one.size_bytes for _, one in self._kept.values())

    # Tenants

    def enter(self, tenant: bytes, room: MemoryReclaim, account: Account) -> TenantContents:
        """Register one more session of a tenant and return the tenant's contents, charged to its
        account."""
        with self._lock:
            holdings, count = self._tenants.get(tenant) or (TenantContents(room, account), 0)
            self._tenants[tenant] = holdings, count + 1
        account.join(holdings)
        return holdings

    def leave(self, tenant: bytes) -> None:
        """End a session of a tenant."""
        with self._lock:
            holdings, count = self._tenants[tenant]
            self._tenants[tenant] = holdings, count - 1
        self.tidy()

    def tidy(self) -> None:
        """Forget tenants that have neither sessions nor contents."""
        with self._lock:
            gone = [
                one for one, (holdings, count) in self._tenants.items() if not count and holdings.is_empty
            ]
            left = [self._tenants.pop(tenant)[0] for tenant in gone]
        for holdings in left:
            holdings.leave()

    def forget_lost(self) -> None:
        """Forget the contents on devices that are lost."""
        with self._lock:
            lost = [key for key, (_, one) in self._kept.items() if _is_lost(one)]
            gone = [self._kept.pop(key)[1] for key in lost]
        for one in self._all():
            one.forget_lost()
        self._free(gone)

    def now(self) -> float:
        """The time by which uploads count as stalled, and kept contents expire."""
        return self._clock()

    # Kept

    def received_bytes(self, key: Key) -> int:
        """The number of bytes here of a content whose upload was interrupted."""
        with self._lock:
            kept = self._kept.get(key, (0.0, None))[1]
        return kept.received_bytes if isinstance(kept, PartialContent) else 0

    def take_beginning(self, key: Key) -> PartialContent | None:
        """Take the kept beginning of a content whose upload was interrupted. The caller owns it."""
        with self._lock:
            found = self._kept.get(key, (0.0, None))[1]
            if isinstance(found, PartialContent):
                del self._kept[key]
                return found
        return None

    def keep(self, key: Key, one: Kept) -> None:
        """Keep a content or its beginning. Free the oldest ones beyond the limit, or `one` itself
        if it does not fit or has fewer bytes than what is kept already."""
        with self._lock:
            before = self._kept.get(key, (0.0, None))[1]
            is_less = before is not None and _progress(before) >= _progress(one)
            fits = not self._closed and one.size_bytes <= self._keep_bytes and not is_less
            gone: list[Kept] = [] if fits else [one]
            if fits:
                if before is not None:
                    gone.append(self._kept.pop(key)[1])
                self._kept[key] = self._clock() + self._keep_seconds, one
                while sum(kept.size_bytes for _, kept in self._kept.values()) > self._keep_bytes:
                    gone.append(self._kept.popitem(last=False)[1][1])
        self._free(gone)
        if fits:
            self._timers.after(self._keep_seconds, self.expire)

    def forget(self, key: Key) -> None:
        """Drop the kept entry of a content that a session holds completely."""
        with self._lock:
            found = self._kept.pop(key, None)
        if found is not None:
            self._free([found[1]])

    def drop_kept(self) -> bool:
        """Free everything that is kept. Return True if there was any."""
        with self._lock:
            gone = [one for _, one in self._kept.values()]
            self._kept.clear()
        self._free(gone)
        return bool(gone)

    def expire(self) -> None:
        """Free what has been kept for its whole time."""
        with self._lock:
            now = self._clock()
            due = [key for key, (end, _) in self._kept.items() if end <= now]
            gone = [self._kept.pop(key)[1] for key in due]
        if gone:
            # Memory may be on another host; the timer thread must not wait for it.
            threading.Thread(target=self._free, args=(gone,), name="heliograph-expiry", daemon=True).start()

    def make_room(self) -> bool:
        """As `Reclaimable.make_room`: free everything that is kept, and copies that no plan uses.

        The caller may hold the lock of one tenant's contents, and another thread that of another's.
        So this waits for no such lock, and skips contents that it would wait for.
        """
        with self._lock:
            kept = list(self._kept.items())
        is_some = False
        for key, (_, one) in kept:
            if isinstance(one, WholeContent):
                if one.holdings.try_release(one.digest, one):
                    self._take(key, one)
                    is_some = True
            elif self._take(key, one):
                one.free()
                is_some = True
        made = [one.make_room() for one in self._all()]
        return is_some or any(made)

    def _all(self) -> list[TenantContents]:
        with self._lock:
            return [one for one, _ in self._tenants.values()]

    def _take(self, key: Key, one: Kept) -> bool:
        """Remove the kept entry of a key, if it is still `one`."""
        with self._lock:
            is_there = self._kept.get(key, (0.0, None))[1] is one
            if is_there:
                del self._kept[key]
            return is_there

    def idle_on(self, device: str) -> int:
        """As `Reclaimable.idle_on`."""
        with self._lock:
            kept = [one for _, one in self._kept.values()]
        kept_bytes = sum(_bytes_on(one, device) for one in kept)
        return kept_bytes + sum(one.idle_on(device) for one in self._all())

    def _free(self, gone: Iterable[Kept]) -> None:
        for one in gone:
            if isinstance(one, PartialContent):
                one.free()
            else:
                one.holdings.release((one.digest,), one)
        self.tidy()

    # Files

    def has_source(self, key: Key) -> bool:
        """True if the content can be read from a file that this tenant may read."""
        tenant, digest = key
        if len(digest) != DIGEST_BYTES:
            return False
        if self.models is not None and self.models.holds(digest):
            return True
        return self.cache is not None and self.cache.holds(tenant, digest)

    def source(self, key: Key) -> FileSource | None:
        """Open the file of a content that this tenant may read. The caller closes it."""
        tenant, digest = key
        if self.models is not None and (found := self.models.open(digest)) is not None:
            return found
        if self.cache is not None and self.cache.holds(tenant, digest):
            return self.cache.open(digest)
        return None

    def close(self) -> None:
        """Free everything that is kept. Idempotent."""
        with self._lock:
            self._closed = True
        self.drop_kept()
        self._timers.close()


def _bytes_on(one: Kept, device: str) -> int:
    if isinstance(one, WholeContent):
        return one.holdings.bytes_of(one.digest, device)
    return one.bytes_on(device)


def _parts_of(buffer: Buffer) -> tuple[Buffer, ...]:
    return tuple(buffer.parts) if isinstance(buffer, MultiBuffer) else (buffer,)


def _is_lost(one: Kept) -> bool:
    """True if a part of an interrupted upload is on a lost device. A whole content is known only by
    its digest."""
    if isinstance(one, WholeContent):
        return False
    return any(part.buffer_type.device.lost is not None for part in _parts_of(one.buffer))


def _progress(one: Kept) -> int:
    return one.size_bytes if isinstance(one, WholeContent) else one.received_bytes
