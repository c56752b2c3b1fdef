"""System shared memory of clients: POSIX objects that they name in requests, in place of bytes.

A region is a part of an object that belongs to the user of the configuration. It is read and
written by calls, not mapped: a client that shrinks its object then gets an error, where access to
mapped memory would end the daemon.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from heliograph_proto.errors import (
    HandleExistsError,
    InvalidInputError,
    LimitExceededError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_server.gateways.kserve.requests import RegionPart

#: The folder of POSIX shared memory.
FOLDER = Path("/dev/shm")
#: The most regions of a tenant.
MOST_REGIONS = 256
#: The most characters of a region's name and of an object's.
MOST_NAME = 200
#: The most bytes of one tensor in a region.
MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region."""

    name: str
    #: The name of the object.
    key: str
    offset: int
    size: int
    descriptor: int


class SharedRegions:
    """The regions of all tenants, which do not see each other's. Thread-safe."""

    def __init__(self, user: int | None) -> None:
        """`user`: the number of the user whose objects may be named; None: of no user."""
        self._user = user
        self._lock = threading.Lock()
        self._regions: dict[tuple[str, str], Region] = {}

    @property
    def are_allowed(self) -> bool:
        """True if there is a user whose objects may be named."""
        return self._user is not None

    def _check_allowed(self) -> None:
        if self._user is None:
            raise UnsupportedError(
                "the server takes no shared-memory regions",
                advice="send the elements in the request; the operator may set kserve_shared_memory",
            )

    def register(self, tenant: str, name: str, key: str, offset: int, size: int) -> None:
        """Register a part of an object under a name.

        Raises UnsupportedError, HandleExistsError, InvalidInputError, LimitExceededError.
        """
        self._check_allowed()
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise InvalidInputError(f"{name!r:.100} cannot be the name of a region")
        descriptor = self._opened(key)
        try:
            held = os.fstat(descriptor).st_size
            if not (offset >= 0 and size > 0 and offset + size <= held):
                raise InvalidInputError(
                    f"bytes {offset:,} to {offset + size:,} of {key!r:.100} are no region: it has {held:,}"
                )
            with self._lock:
                if (tenant, name) in self._regions:
                    raise HandleExistsError(
                        f"the region {name!r:.100} is registered already", advice="unregister it first"
                    )
                if sum(owner == tenant for owner, _ in self._regions) >= MOST_REGIONS:
                    raise LimitExceededError(f"there are {MOST_REGIONS} regions, which is the most")
                self._regions[tenant, name] = Region(name, key, offset, size, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def _opened(self, key: str) -> int:
        """Open an object of the user's. Raises InvalidInputError."""
        name = key.removeprefix("/")
        refused = InvalidInputError(
            f"there is no shared memory {key!r:.100} of the user whose memory may be named",
            advice="create it as that user; its name has no slash but the first",
        )
        if not 0 < len(name) <= MOST_NAME or "/" in name or name in (".", ".."):
            raise refused
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(FOLDER / name, flags)
        except (OSError, ValueError):
            raise refused from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != self._user:
            os.close(descriptor)
            raise refused
        return descriptor

    def unregister(self, tenant: str, name: str = "") -> None:
        """Forget a region, or all of a tenant. An unknown one is none."""
        with self._lock:
            keys = [one for one in self._regions if one[0] == tenant and name in ("", one[1])]
            found = [self._regions.pop(one) for one in keys]
            for one in found:
                os.close(one.descriptor)

    def status(self, tenant: str, name: str = "") -> list[Region]:
        """Return a region, or all of a tenant, by name. Raises UnknownHandleError."""
        with self._lock:
            found = [one for key, one in sorted(self._regions.items()) if key[0] == tenant]
        if name and name not in [one.name for one in found]:
            raise _unknown(name)
        return [one for one in found if name in ("", one.name)]

    def read(self, tenant: str, part: RegionPart) -> bytearray:
        """Return a copy of the bytes of a part. Raises UnknownHandleError, InvalidInputError."""
        with self._opened_part(tenant, part) as (descriptor, start):
            found = bytearray(part.size)
            if os.preadv(descriptor, [found], start) != part.size:
                raise _shrunk(part)
        return found

    def write(self, tenant: str, part: RegionPart, data: memoryview) -> None:
        """Write bytes to the begin of a part. Raises UnknownHandleError, InvalidInputError."""
        if len(data) > part.size:
            raise InvalidInputError(
                f"the output has {len(data):,} bytes, and its part of the region {part.region!r:.100} "
                f"{part.size:,}"
            )
        with self._opened_part(tenant, part) as (descriptor, start):
            # A write beyond the end would make the object larger.
            if os.fstat(descriptor).st_size < start + len(data):
                raise _shrunk(part)
            if os.pwritev(descriptor, [data], start) != len(data):
                raise _shrunk(part)

    @contextmanager
    def _opened_part(self, tenant: str, part: RegionPart) -> Iterator[tuple[int, int]]:
        """A descriptor of the object of a part, and where the part begins in it."""
        with self._lock:
            region = self._region(tenant, part)
            descriptor = os.dup(region.descriptor)
        try:
            yield descriptor, region.offset + part.offset
        finally:
            os.close(descriptor)

    def _region(self, tenant: str, part: RegionPart) -> Region:
        """The region of a part, which lies in it. Lock held."""
        self._check_allowed()
        if (found := self._regions.get((tenant, part.region))) is None:
            raise _unknown(part.region)
        if part.offset + part.size > found.size:
            raise InvalidInputError(
                f"bytes {part.offset:,} to {part.offset + part.size:,} are not in the region "
                f"{part.region!r:.100} of {found.size:,} bytes"
            )
        if part.size > MOST_BYTES:
            raise LimitExceededError(f"a tensor in a region has at most {MOST_BYTES:,} bytes")
        return found

    def close(self) -> None:
        """Forget all regions. Idempotent."""
        for tenant in {owner for owner, _ in tuple(self._regions)}:
            self.unregister(tenant)


def _unknown(name: str) -> UnknownHandleError:
    return UnknownHandleError(f"there is no region {name!r:.100}", advice="register it first")


def _shrunk(part: RegionPart) -> InvalidInputError:
    return InvalidInputError(f"the memory of the region {part.region!r:.100} became smaller")
