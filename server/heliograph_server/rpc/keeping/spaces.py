"""Memory for the files of a keeper, which is used again.

Memory that a process gets from the system for the first time is slow: a page at a time, and in a
virtual machine the host may have to find each. So files lie in spaces of a few huge pages, which
threads make, and which wait for the next file once theirs is gone: a snapshot takes the place of
the one before the last. After each burst of files as many wait as it took, for the next one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from heliograph_proto.errors import LimitExceededError
from heliograph_server.state.files import lent

#: The size of a space: that of the pieces in which snapshots hold a storage.
SPACE_BYTES = 4 * 2**20
#: The most spaces that are made before they are asked for.
MOST_AHEAD = 256
_PAGE_BYTES = 4096
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class Spaces:
    """Spaces of the event loop's thread. Those that wait are no more than those that are used."""

    def __init__(self, room_bytes: Callable[[], int]) -> None:
        """`room_bytes` returns how much more memory may be taken, with the spaces that wait."""
        self._room_bytes = room_bytes
        self._free: list[mmap.mmap] = []
        self._used = 0
        #: Those that the burst of files has taken, and the one before.
        self._taken = self._taken_before = 0

    def __repr__(self) -> str:
        return f"<Spaces {self._used} used, {len(self._free)} free>"

    @property
    def waiting(self) -> int:
        """The spaces that wait."""
        return len(self._free)

    def make_room(self, size_bytes: int) -> None:
        """Give memory back to the system, except that for a file that the room does not count."""
        del self._free[max(0, self._room_bytes() + size_bytes) // SPACE_BYTES :]

    def take(self) -> memoryview | None:
        """Return a space that waits; None if there is none."""
        return self.lend(self._free.pop()) if self._free else None

    def lend(self, pages: mmap.mmap) -> memoryview:
        """Return a space in these pages. They wait for another one when nothing has its bytes any
        more."""
        self._used += 1
        self._taken += 1
        return lent(np.frombuffer(pages, np.uint8), partial(self._give, pages))

    def end_burst(self) -> int:
        """Note the end of a burst of files. Return how many spaces are to be made for the next."""
        if not self._taken:
            return 0
        taken, before = self._taken, self._taken_before
        self._taken, self._taken_before = 0, taken
        del self._free[max(taken, before) :]
        # As many as may wait, and no more.
        room = max(0, self._room_bytes()) // SPACE_BYTES
        return min(taken, self._used, room, MOST_AHEAD) - len(self._free)

    def add(self, pages: mmap.mmap) -> None:
        """Have pages wait, if there is room."""
        self._free.append(pages)
        del self._free[self._used :]
        self.make_room(0)

    def _give(self, pages: mmap.mmap) -> None:
        self._used -= 1
        self.add(pages)


def new_pages() -> mmap.mmap:
    """Return the pages of a new space, which the system has provided. Any thread.

    Raises LimitExceededError."""
    try:
        made = mmap.mmap(-1, SPACE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise LimitExceededError(
            f"the host has no memory for states of other daemons: {error.strerror}",
            advice="lower --kept-state-size there",
        ) from None
    if _HUGE_PAGES is not None:
        # A kernel may have none.
        with suppress(OSError):
            made.madvise(_HUGE_PAGES)
    # NumPy lets other threads run meanwhile.
    np.frombuffer(made, np.uint8)[::_PAGE_BYTES] = 0
    return made
