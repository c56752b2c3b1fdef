"""Of several processes that need kernels, one compiles."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

#: The most seconds to wait for another process that compiles, and the pause between looks.
WAIT_SECONDS = 180.0
LOOK_SECONDS = 0.1
#: How often waiting is logged, in seconds.
TELL_SECONDS = 10.0
#: A file in the cache that is locked while its kernels are compiled.
LOCK = ".compiling"


@contextmanager
def turn(folder: Path, look: Callable[[], None]) -> Iterator[None]:
    """Wait for another process that compiles into the folder, in bounded time.

    `look` is called from time to time during the wait.
    """
    if fcntl is None:
        yield
        return
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.debug("cannot lock the CPU kernels: %s", error)
        yield
        return
    try:
        _wait_for(lock, look)
        yield
    finally:
        # A child of a fork may have the descriptor too.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _wait_for(lock: int, look: Callable[[], None]) -> None:
    begun = told = time.monotonic()
    waits = False
    while not _is_taken(lock):
        now = time.monotonic()
        if now - begun > WAIT_SECONDS:
            logger.warning(
                "another process compiles the CPU kernels for over %.0f seconds; this one does so too",
                WAIT_SECONDS,
            )
            return
        if not waits:
            logger.info("another process compiles the CPU kernels; waiting for it")
        elif now - told >= TELL_SECONDS:
            told = now
            logger.info("still waiting for the CPU kernels, for %.0f seconds", now - begun)
        waits = True
        time.sleep(LOOK_SECONDS)
        look()


def _is_taken(lock: int) -> bool:
    """Take the lock; return whether this process has it now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("this file system has no locks: %s", error)
    return True
