"""Loading of the kernels when a device starts: of several processes on a machine, one compiles."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from heliograph_backends.cpu import kernels

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

#: The most seconds to wait for another process that compiles, and the pause between looks.
WAIT_SECONDS = 180.0
LOOK_SECONDS = 0.1
#: How often progress is logged, in seconds.
TELL_SECONDS = 10.0
#: Files in the cache: locked while its kernels are compiled; there once all of them are.
LOCK, DONE = ".compiling", ".complete"


def load_kernels(
    cache: kernels.CacheState | None = None,
    warmup: Callable[..., object] = kernels.warmup,
) -> None:
    """Load the kernels, and compile those that the cache lacks, unless another process does."""
    if cache is None:
        if kernels.cache_state().folder is not None:
            return
        cache = kernels.find_cache()
    with _turn(cache):
        warmup(progress=_Told())


class _Told:
    """Logs the progress of compiling, at first and from time to time."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, of_all: int, name: str) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + TELL_SECONDS
            logger.info("compiling the CPU kernels: %d of %d functions are done", done, of_all)


@contextmanager
def _turn(cache: kernels.CacheState) -> Iterator[None]:
    """Wait for another process that compiles into the cache, in bounded time."""
    folder = cache.folder
    if folder is None or cache.read_only or fcntl is None or (folder / DONE).exists():
        yield
        return
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.debug("cannot lock the CPU kernels: %s", error)
        yield
        return
    try:
        _wait_for(lock)
        yield
        with suppress(OSError):
            Path(folder, DONE).touch()
    finally:
        os.close(lock)


def _wait_for(lock: int) -> None:
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


def _is_taken(lock: int) -> bool:
    """Take the lock; return whether this process has it now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("this file system has no locks: %s", error)
    return True
