"""The plans of a model or function that are kept, one for each combination of shapes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

#: The most plans of a model that are kept.
MOST_PLANS = 16
_Made = TypeVar("_Made")


class KeptPlans(Generic[_Made]):
    """The last used of what was made for each key, at most so many; thread-safe.

    A plan that a run still uses lives until that ends: the last reference frees it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, _Made] = OrderedDict()

    def __len__(self) -> int:
        return len(self._made)

    def find(self, key: Hashable) -> _Made | None:
        """Return what was made for a key, which becomes the last used one, or None."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
            return self._made.get(key)

    def keep(self, key: Hashable, made: _Made) -> _Made:
        """Keep what was made for a key, unless another thread was first. Returns what is kept."""
        with self._lock:
            found = self._made.setdefault(key, made)
            self._made.move_to_end(key)
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        return found

    def clear(self) -> None:
        """Keep nothing of what was made."""
        with self._lock:
            self._made.clear()

    def all(self) -> tuple[_Made, ...]:
        """Return everything that is kept, the last used one at the end."""
        with self._lock:
            return tuple(self._made.values())
