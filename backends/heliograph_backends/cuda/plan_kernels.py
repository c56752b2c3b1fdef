"""Kernels of chains with many elements: compiled with the first plan that has the chain, and kept
for later ones.

Compiling is bounded, so that no client can keep a daemon busy with it: by time for each plan, and
by number for each device. A chain without a kernel is interpreted, with the same bits; the plan
reports it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace

from heliograph_backends.cuda.driver.driver import NOT_COMPILED, Driver, DriverError, Kernel
from heliograph_backends.cuda.lowering.launch import Launch

logger = logging.getLogger(__name__)

#: The most kernels of a device. Each takes about 30 KB of its memory and of the cache on disk.
MOST_KERNELS = 1024
#: A plan stops compiling kernels after this time. One takes 0.1 s.
MOST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a program has no kernel."""

    reason: str


class KernelCache:
    """The kernels of one device, by source. Thread-safe."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._found: dict[str, Kernel | Refused] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Kernels of {len(self._found)} chains>"

    def find(self, source: str, *, may_compile: bool) -> Kernel | Refused:
        """Return the kernel of a source, or why there is none. Raises DriverError if the device
        itself failed."""
        with self._lock:
            found = self._found.get(source)
            is_full = len(self._found) >= MOST_KERNELS
        if found is not None:
            return found
        if is_full:
            return Refused(f"{MOST_KERNELS} chains have kernels already")
        if not may_compile:
            return Refused(f"compiling others took {MOST_SECONDS:g} s")
        # Two threads may compile the same kernel; the first result is kept.
        made = self._made(source)
        with self._lock:
            return self._found.setdefault(source, made)

    def _made(self, source: str) -> Kernel | Refused:
        try:
            return self._driver.build(source)
        except DriverError as error:
            if error.status != NOT_COMPILED:
                raise
            logger.warning("a chain is interpreted, since its kernel could not be compiled: %s", error)
            return Refused("the compiler refused it")


@dataclass(slots=True)
class PlanKernels:
    """The kernels of one plan, and the outcome for each of its large chains."""

    kernels: KernelCache
    _seconds: float = 0.0
    _count: int = 0
    _refused: list[str] = field(default_factory=list)

    def built(self, launch: Launch) -> Launch:
        """Return a launch with its kernel, or the launch that replaces it."""
        if not launch.source:
            return launch
        assert launch.instead is not None, "what is compiled with a plan can be interpreted"
        began = time.monotonic()
        found = self.kernels.find(launch.source, may_compile=self._seconds < MOST_SECONDS)
        self._seconds += time.monotonic() - began
        if isinstance(found, Refused):
            self._refused.append(found.reason)
            return launch.instead
        self._count += 1
        return replace(launch, kernel=found)

    @property
    def note(self) -> str:
        """The number of chains with kernels and why others have none; empty if no chain is
        large."""
        parts = []
        if self._count:
            parts.append(f"{self._count} large chain(s) with kernels of their own, in {self._seconds:.2f} s")
        if self._refused:
            reasons = " and ".join(dict.fromkeys(self._refused))
            parts.append(f"{len(self._refused)} large chain(s) interpreted: {reasons}")
        return "; ".join(parts)
