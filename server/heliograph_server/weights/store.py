"""What the sessions of a host hold together: contents by tenant and digest, in the memory of devices.

A tenant is whoever shows one secret when sessions are opened. Its sessions share: one copy of a content on a
device serves them all, and one of them is told of what another brought. Sessions of different tenants
share no memory, and nothing that one of them is answered depends on what another has. A session without a
secret is a tenant of its own.

    held:   some session holds it, and plans may use copies of it; the last session's end frees it
    kept:   nobody holds it, but an upload that broke off may go on: for a bounded time, in bounded memory,
            and only until a device's memory is needed for another content
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from heliograph_backends.contract import Buffer, MultiBuffer
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.models import ModelInfo
from heliograph_server.resources.quotas import Account, Charge
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines
from heliograph_server.weights.tenant_store import TenantContents


class ContentSource(Protocol):
    """A content that can be read, until `close`."""

    size_bytes: int
    #: To be called with why, if the bytes are not what they should be.
    spoilt: Callable[[str], None]

    def read_into(self, offset_bytes: int, out: memoryview) -> int:
        """Reads bytes from an offset on; how many, 0 at the end. Raises OSError."""
        ...

    def close(self) -> None: ...


class Cache(Protocol):
    """What the core needs of `heliograph_server.weights.disk_cache.DiskCache`."""

    def holds(self, tenant: bytes, digest: bytes) -> bool: ...

    def open(self, digest: bytes) -> ContentSource | None: ...

    def add(self, tenant: bytes, digest: bytes, size_bytes: int, pieces: Iterable[memoryview]) -> bool: ...


class ModelFolder(Protocol):
    """What the core needs of `heliograph_server.weights.model_files.ModelFiles`."""

    def names(self) -> tuple[str, ...]: ...

    def describe(self, name: str) -> ModelInfo: ...

    def holds(self, digest: bytes) -> bool: ...

    def open(self, digest: bytes) -> ContentSource | None: ...


logger = logging.getLogger(__name__)

#: How long what an upload left behind is kept for whoever goes on with it.
KEEP_SECONDS = 600.0
#: How much of it, in all.
KEEP_BYTES = 4 * 2**30
#: The shortest secret: nobody guesses so many random bytes. The longest is a bound, no more.
SECRET_BYTES = (16, 1024)

#: A tenant and a digest.
Key: TypeAlias = tuple[bytes, bytes]


def tenant_of(secret: bytes, operators_name: str = "") -> bytes:
    """A tenant's name here: a hash, so that the secret lies neither in memory nor on disk. Tenants to whom
    the operator gave different names share nothing, even if they know one secret.

    Raises InvalidArgumentError for a secret that could be guessed.
    """
    least, most = SECRET_BYTES
    if not least <= len(secret) <= most:
        raise InvalidArgumentError(
            f"a tenant's secret has {least} to {most} bytes, not {len(secret)}",
            advice="take 32 random bytes, or send none",
        )
    if operators_name:
        # Names have no zero bytes, so that no name and secret are as another two.
        return digest_of(b"heliograph named tenant\0" + operators_name.encode() + b"\0" + secret)
    return digest_of(b"heliograph tenant\0" + secret)


@dataclass(eq=False, slots=True)
class PartialContent:
    """The first bytes of a content, whose upload broke off."""

    buffer: Buffer
    #: Has taken the bytes that came.
    hash: Any
    received_bytes: int
    size_bytes: int
    #: As what its memory counts.
    charge: Charge

    def free(self) -> None:
        """Gives all of it back."""
        self.buffer.free()
        self.charge.give()


@dataclass(eq=False, slots=True)
class WholeContent:
    """A content that no plan used yet; this holds it."""

    holdings: TenantContents
    digest: bytes
    size_bytes: int


Kept: TypeAlias = PartialContent | WholeContent


class ContentStore:
    """Thread-safe. Memory is freed outside of the lock, since it may be another host's."""

    def __init__(
        self,
        cache: Cache | None = None,
        models: ModelFolder | None = None,
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
        #: By tenant, with how many sessions each has.
        self._tenants: dict[bytes, tuple[TenantContents, int]] = {}
        #: With the time when it goes, the oldest first.
        self._kept: OrderedDict[Key, tuple[float, Kept]] = OrderedDict()
        self._closed = False
        #: Of contents that clients asked for: how many were here, and how many were not.
        self.hits = self.misses = 0

    def __repr__(self) -> str:
        return f"<ContentStore of {len(self._tenants)} tenants, {len(self._kept)} kept>"

    def count(self, hits: int, misses: int) -> None:
        """Clients asked for contents: how many were here, and how many they must bring."""
        with self._lock:
            self.hits += hits
            self.misses += misses

    @property
    def kept_bytes(self) -> int:
        """What is kept for uploads that may go on."""
        with self._lock:
            return sum(one.size_bytes for _, one in self._kept.values())

    # Tenants

    def enter(self, tenant: bytes, room: MemoryReclaim, account: Account) -> TenantContents:
        """What a tenant has, for one more session of it, which counts on its account."""
        with self._lock:
            holdings, count = self._tenants.get(tenant) or (TenantContents(room, account), 0)
            self._tenants[tenant] = holdings, count + 1
        return holdings

    def leave(self, tenant: bytes) -> None:
        """The session is over."""
        with self._lock:
            holdings, count = self._tenants[tenant]
            self._tenants[tenant] = holdings, count - 1
        self.tidy()

    def tidy(self) -> None:
        """Forgets tenants that have neither sessions nor contents."""
        with self._lock:
            gone = [
                one for one, (holdings, count) in self._tenants.items() if not count and holdings.is_empty
            ]
            for tenant in gone:
                del self._tenants[tenant]

    def forget_lost(self) -> None:
        """Nobody has what lay on devices that are gone."""
        with self._lock:
            holdings = [one for one, _ in self._tenants.values()]
            lost = [key for key, (_, one) in self._kept.items() if _is_lost(one)]
            gone = [self._kept.pop(key)[1] for key in lost]
        for one in holdings:
            one.forget_lost()
        self._free(gone)

    # Kept

    def received_bytes(self, key: Key) -> int:
        """How many bytes are here of a content whose upload broke off."""
        with self._lock:
            kept = self._kept.get(key, (0.0, None))[1]
        return kept.received_bytes if isinstance(kept, PartialContent) else 0

    def take_beginning(self, key: Key) -> PartialContent | None:
        """What is here of a content whose upload broke off; the caller's from now on."""
        with self._lock:
            found = self._kept.get(key, (0.0, None))[1]
            if isinstance(found, PartialContent):
                del self._kept[key]
                return found
        return None

    def keep(self, key: Key, one: Kept) -> None:
        """Keeps something, in place of the oldest; frees what does not fit, or is less than is there."""
        with self._lock:
            before = self._kept.get(key, (0.0, None))[1]
            is_less = before is not None and _progress(before) >= _progress(one)
            fits = not self._closed and one.size_bytes <= self._keep_bytes and not is_less
            gone: list[Kept] = [] if fits else [one]
            if fits:
                if before is not None:
                    gone.append(self._kept.pop(key)[1])
                self._kept[key] = self._clock() + self._keep_seconds, one
                gone += self._excess()
        self._free(gone)
        if fits:
            self._timers.after(self._keep_seconds, self.expire)

    def forget(self, key: Key) -> None:
        """All of a content is here, and a session holds it: nothing of it need be kept."""
        with self._lock:
            found = self._kept.pop(key, None)
        if found is not None:
            self._free([found[1]])

    def drop_kept(self) -> bool:
        """Frees all that is kept; whether there was something."""
        with self._lock:
            gone = [one for _, one in self._kept.values()]
            self._kept.clear()
        self._free(gone)
        return bool(gone)

    def expire(self) -> None:
        """Frees what was kept for as long as it may be."""
        with self._lock:
            now = self._clock()
            due = [key for key, (end, _) in self._kept.items() if end <= now]
            gone = [self._kept.pop(key)[1] for key in due]
        if gone:
            # Memory may be another host's, for which the timer thread must not wait.
            threading.Thread(target=self._free, args=(gone,), name="heliograph-expiry", daemon=True).start()

    def _excess(self) -> list[Kept]:
        gone = []
        while sum(one.size_bytes for _, one in self._kept.values()) > self._keep_bytes:
            gone.append(self._kept.popitem(last=False)[1][1])
        return gone

    def make_room(self) -> bool:
        """As `room.Giver` says: gives back what is kept. The caller may be changing what its tenant has, and
        another thread what another has: so this waits for none, and leaves what it would wait for."""
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
        return is_some

    def _take(self, key: Key, one: Kept) -> bool:
        """Takes out what is kept under a key, if it is still this."""
        with self._lock:
            is_there = self._kept.get(key, (0.0, None))[1] is one
            if is_there:
                del self._kept[key]
            return is_there

    def idle_on(self, device: str) -> int:
        """As `room.Giver` says."""
        with self._lock:
            kept = [one for _, one in self._kept.values()]
        return sum(_bytes_on(one, device) for one in kept)

    def _free(self, gone: Iterable[Kept]) -> None:
        for one in gone:
            if isinstance(one, PartialContent):
                one.free()
            else:
                one.holdings.release((one.digest,), one)
        self.tidy()

    # Files

    def has_source(self, key: Key) -> bool:
        """Whether the content can be read from a file that this tenant may know of."""
        tenant, digest = key
        if self.models is not None and self.models.holds(digest):
            return True
        return self.cache is not None and self.cache.holds(tenant, digest)

    def source(self, key: Key) -> ContentSource | None:
        """The file of a content that this tenant may know of; the caller closes it."""
        tenant, digest = key
        if self.models is not None and (found := self.models.open(digest)) is not None:
            return found
        if self.cache is not None and self.cache.holds(tenant, digest):
            return self.cache.open(digest)
        return None

    def close(self) -> None:
        """Frees what is kept. Idempotent."""
        with self._lock:
            self._closed = True
        self.drop_kept()
        self._timers.close()


def _bytes_on(one: Kept, device: str) -> int:
    if isinstance(one, WholeContent):
        return one.holdings.bytes_of(one.digest, device)
    parts = _parts_of(one.buffer)
    return sum(part.size_bytes for part in parts if part.buffer_type.device.name == device)


def _parts_of(buffer: Buffer) -> tuple[Buffer, ...]:
    return tuple(buffer.parts) if isinstance(buffer, MultiBuffer) else (buffer,)


def _is_lost(one: Kept) -> bool:
    """Whether a part of what came lies on a device that is gone. A whole is known by its digest alone."""
    if isinstance(one, WholeContent):
        return False
    return any(part.buffer_type.device.lost is not None for part in _parts_of(one.buffer))


def _progress(one: Kept) -> int:
    return one.size_bytes if isinstance(one, WholeContent) else one.received_bytes
