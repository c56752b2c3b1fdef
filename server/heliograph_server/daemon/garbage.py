"""Full garbage collections: while the daemon is idle, or after a while.

A full collection holds the interpreter for its whole duration, a tenth of a second for a graph of
20,000 nodes. Python begins one whenever there are a quarter more objects, which is in the middle of
a compile and several times. Sessions and streams drop what is large without a collection, so only
small remains wait for one.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

#: How often the daemon looks whether it is idle, and how long a busy one goes without a full
#: collection.
LOOK_SECONDS, BUSY_SECONDS = 5.0, 60.0
#: The collections of younger objects after which a full one is due.
YOUNG_COLLECTIONS = 10
#: A threshold that no process reaches.
NEVER = 2**30


def take_over() -> None:
    """Exclude the current objects from collection, as they stay to the end, and let Python collect
    young objects only.

    With half a million objects of a compiler, a collection takes a twentieth of a second, in the
    middle of a command.
    """
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, NEVER)


async def collect_garbage(is_busy: Callable[[], bool]) -> None:
    """Make full collections from time to time, after `take_over`."""
    passed_seconds = 0.0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        passed_seconds += LOOK_SECONDS
        is_due = gc.get_count()[2] >= YOUNG_COLLECTIONS
        if is_due and (passed_seconds >= BUSY_SECONDS or not is_busy()):
            passed_seconds = 0.0
            await asyncio.to_thread(gc.collect)
