"""The other side of peer_process: what a script that is a peer answers lines with.

It needs NumPy alone, since it also runs under the peers' own interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def answer(measure: Callable[..., object]) -> None:
    """Answers lines "NAME NUMBER ..." until there are no more."""
    say("ready")
    for line in sys.stdin:
        name, *numbers = line.split()
        say(measure(name, *map(int, numbers)))


def end_with_parent() -> None:
    """Ends this process, whatever else it does, when its standard input ends."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def warm(nbytes: int) -> Bytes:
    """Memory whose pages are there."""
    return np.ones(nbytes, np.uint8)


class Warm:
    """A warm array of the size that was asked for last, so that one large one is kept and not several."""

    def __init__(self) -> None:
        self._array = warm(0)

    def of(self, nbytes: int) -> Bytes:
        if self._array.nbytes != nbytes:
            self._array = warm(0)  # the old one goes first
            self._array = warm(nbytes)
        return self._array


class Transfers(Protocol):
    """A client's way to a server that keeps the bytes: a call returns when they are on the other side."""

    def prepare(self, nbytes: int) -> None:
        """Called before the first transfer of a size."""

    def upload(self, array: Bytes, *options: int) -> None: ...

    def download(self, array: Bytes, *options: int) -> None: ...


class Timed:
    """Measures transfers of one warm array: `upload` or `download`, bytes, runs, options.

    The array is of `memory`, which several may share.
    """

    def __init__(self, transfers: Transfers, memory: Warm | None = None) -> None:
        self._transfers = transfers
        self._memory, self._prepared = memory or Warm(), 0
        self._warm: set[tuple[object, ...]] = set()

    def __call__(self, direction: str, nbytes: int, runs: int, *options: int) -> list[float]:
        """Seconds of each run. The first one of its kind, which warms both sides up, is not among them."""
        array = self._memory.of(nbytes)
        if self._prepared != nbytes:
            self._transfers.prepare(nbytes)
            self._prepared = nbytes
            self._warm.clear()
        call = getattr(self._transfers, direction)
        if (direction, *options) not in self._warm:
            call(array, *options)
            self._warm.add((direction, *options))
        return [_seconds(call, array, *options) for _ in range(runs)]


def _seconds(call: Callable[..., None], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start
