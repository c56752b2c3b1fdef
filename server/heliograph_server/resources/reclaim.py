"""Room on devices: what is kept only because nobody wanted its memory yet, given back when somebody does.

Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from heliograph_proto.errors import OutOfMemoryError

T = TypeVar("T")


class Reclaimable(Protocol):
    """Whoever keeps memory that others may want."""

    def make_room(self) -> bool:
        """Gives back what nobody uses. Whether there was anything. Takes no lock of a session."""

    def idle_on(self, device: str) -> int:
        """The bytes that it would give back on a device."""


class MemoryReclaim:
    """Of all sessions of a host: one's idle memory is never why another has none. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._givers: dict[Reclaimable, None] = {}
        #: Held until what is given back is free; one who gives may want room in turn.
        self._making = threading.RLock()
        #: How often there was something.
        self._made = 0

    def __repr__(self) -> str:
        return f"<Room of {len(self._givers)}>"

    def join(self, giver: Reclaimable) -> None:
        """From now on it is asked."""
        with self._lock:
            self._givers[giver] = None

    def leave(self, giver: Reclaimable) -> None:
        """Undoes `join`. Idempotent."""
        with self._lock:
            self._givers.pop(giver, None)

    def make(self) -> bool:
        """Has everybody give back what nobody uses. Whether there was anything."""
        with self._making:
            with self._lock:
                givers = list(self._givers)
            made = [giver.make_room() for giver in givers]
            self._made += any(made)
            return any(made)

    def idle_on(self, device: str) -> int:
        """Bytes of a device that nobody uses: they are as good as free."""
        with self._lock:
            givers = list(self._givers)
        return sum(giver.idle_on(device) for giver in givers)

    def for_work(self, work: Callable[[], T]) -> T:
        """Does what takes memory; where there is none, once more when room was made. It must be such that a
        first try leaves nothing behind. Raises what the work does."""
        before = self._made
        try:
            return work()
        except OutOfMemoryError:
            # Somebody else may have made room meanwhile, which leaves nothing to give back.
            if not self.make() and self._made == before:
                raise
        return work()
