"""Memory given back: full garbage collections while the daemon is idle or after a while, and free
pages.

A full collection holds the interpreter for its whole duration, a tenth of a second for a graph of
20,000 nodes. Python begins one whenever there are a quarter more objects, which is in the middle of
a compile and several times. Sessions and streams drop what is large without a collection, so only
small remains wait for one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

from heliograph.transport.allocator import KEPT_BYTES, give_back
from heliograph_proto.types import size_text

logger = logging.getLogger(__name__)

#: How often the daemon looks whether it is idle, and how long a busy one goes without a full
#: collection.
LOOK_SECONDS, BUSY_SECONDS = 5.0, 60.0
#: The collections of younger objects after which a full one is due.
YOUNG_COLLECTIONS = 10
#: A threshold that no process reaches.
NEVER = 2**30
#: How often free memory is returned to the system, and how often by an idle daemon.
TRIM_SECONDS, IDLE_TRIM_SECONDS = 10.0, 2.0
#: The free memory that an idle daemon keeps.
IDLE_KEPT_BYTES = 16 * 2**20


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


async def trim_memory(is_busy: Callable[[], bool]) -> None:
    """Return free memory to the system from time to time; of an idle daemon nearly all of it.

    After thousands of connections or large messages, the C library keeps free pieces between used
    ones. While work is under way, some stays for the messages of transfers.
    """
    passed_seconds = 0.0
    while True:
        await asyncio.sleep(IDLE_TRIM_SECONDS)
        passed_seconds += IDLE_TRIM_SECONDS
        is_idle = not is_busy()
        if not is_idle and passed_seconds < TRIM_SECONDS:
            continue
        passed_seconds = 0.0
        kept_bytes = IDLE_KEPT_BYTES if is_idle else KEPT_BYTES
        if returned := await asyncio.to_thread(give_back, kept_bytes):
            logger.debug("returned %s of free memory", size_text(returned))
