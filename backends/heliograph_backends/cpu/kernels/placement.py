"""Which helpers are to go to another processor, and to which. Pure.

A helper that wakes on the leader's processor waits until the leader gives way, and nothing of the run is
shared. Linux wakes it there, with others idle: it leaves a thread where it slept unless it finds an idle
processor, and among few that share a cache it does not look for one while they have been busy for half of
the time (`SIS_UTIL` in its kernel/sched/fair.c); the leader may have woken on that processor meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

#: Of a thread that has not said where it is, and where the system does not tell.
UNKNOWN: Final = -1


def colliding(leader: int, helpers: Sequence[int]) -> list[int]:
    """Return the helpers, by their place in the list of their processors, that are where the leader or a
    helper before them is.
    """
    used, found = {leader}, []
    for number, processor in enumerate(helpers):
        if processor in used and processor != UNKNOWN:
            found.append(number)
        used.add(processor)
    return found


def choices(allowed: AbstractSet[int], leader: int, helpers: Sequence[int]) -> set[int]:
    """Return the processors to which a helper should go that may use those of `allowed`: where no worker is.
    Where there is none it stays.
    """
    return set(allowed) - {leader, *helpers}
