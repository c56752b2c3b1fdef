"""Reclaiming of device memory: idle memory is freed when an allocation needs it.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from heliograph_proto.errors import OutOfMemoryError

T = TypeVar("T")


class BeyondReclaimError(OutOfMemoryError):
    """A lack of memory that no reclaiming mends: a tenant's quota, or a limit of a plan."""


class Reclaimable(Protocol):
    """An owner of memory that others may need."""

    def make_room(self) -> bool:
        """Free idle memory. Return True if there was any. Takes no lock of a session."""

    def idle_on(self, device: str) -> int:
        """The bytes on a device that `make_room` would free."""


#: How often all owners are asked: what one frees may be what another's memory was kept for, as a plan
#: and its weights.
PASSES = 2


def reclaimed(owners: Sequence[Reclaimable]) -> bool:
    """Free the idle memory of all owners. Return True if there was any."""
    made = [owner.make_room() for _ in range(PASSES) for owner in owners]
    return any(made)


class MemoryReclaim:
    """The idle memory of all sessions of a host, which must not make an allocation fail.
    Thread-safe."""

    def __init__(self, *owners: Reclaimable | None) -> None:
        self._lock = threading.Lock()
        self._owners: dict[Reclaimable, None] = {one: None for one in owners if one is not None}
        #: Held until reclaimed memory is free. Reclaiming may itself need memory, hence reentrant.
        self._making = threading.RLock()
        #: The number of times that memory was reclaimed.
        self._made = 0

    def __repr__(self) -> str:
        return f"<MemoryReclaim of {len(self._owners)}>"

    def join(self, owner: Reclaimable) -> None:
        """Register an owner of memory."""
        with self._lock:
            self._owners[owner] = None

    def leave(self, owner: Reclaimable) -> None:
        """Undo `join`. Idempotent."""
        with self._lock:
            self._owners.pop(owner, None)

    def make(self) -> bool:
        """Free all idle memory. Return True if there was any."""
        with self._making:
            with self._lock:
                owners = list(self._owners)
            made = reclaimed(owners)
            self._made += made
            return made

    def idle_on(self, device: str) -> int:
        """The idle bytes on a device; they count as free."""
        with self._lock:
            owners = list(self._owners)
        return sum(owner.idle_on(device) for owner in owners)

    def for_work(self, work: Callable[[], T]) -> T:
        """Call `work`, which allocates memory; if it raises OutOfMemoryError, reclaim memory and
        retry once.

        A failed first call must have no effect. Raises the errors of `work`.
        """
        before = self._made
        try:
            return work()
        except BeyondReclaimError:
            raise
        except OutOfMemoryError:
            # Another thread may have reclaimed memory meanwhile; then there is nothing left to
            # reclaim here.
            if not self.make() and self._made == before:
                raise
        return work()
