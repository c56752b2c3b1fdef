"""Streams, events, graphs and devices of the module `cupy` whose CUDA is this host."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuda_emulation.cupy_module import Cuda

CAPTURE_INVALID = 901
_numbers = itertools.count(16)


def streams(cuda: Cuda) -> Any:
    class Graph:
        def __init__(self, works: list[Callable[[], Any]]) -> None:
            self._works = works

        def launch(self, stream: Any) -> None:
            for work in self._works:
                cuda.put(stream.ptr, work)

    class Stream:
        null: Any = None

        def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
            self.ptr = 0 if null else next(_numbers)
            self.device_id = -1 if null else getattr(cuda.here, "device", 0)
            self.captured: list[Callable[[], Any]] | None = None
            cuda.streams[self.ptr] = self

        def __enter__(self) -> Any:
            if self.device_id not in (-1, getattr(cuda.here, "device", 0)):
                raise RuntimeError("the stream is of another device")
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            cuda.waited = (self, event)

        def begin_capture(self) -> None:
            self.captured = []

        def end_capture(self) -> Graph:
            works, self.captured = self.captured, None
            if works is None:
                raise cuda.runtime.CUDARuntimeError(CAPTURE_INVALID)
            return Graph(works)

    Stream.null = Stream(null=True)
    return Stream


def events(cuda: Cuda) -> Any:
    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            self.ptr = next(_numbers)
            self.has_time = not disable_timing
            self.reached_at = 0.0

        @property
        def done(self) -> bool:
            return bool(cuda.runtime.eventQuery(self.ptr) == 0)

        def record(self, stream: Any) -> None:
            assert stream.captured is None, "nobody asks for a mark in a capture"
            self.reached_at = time.perf_counter()

        def synchronize(self) -> None:
            cuda.blocked += 1
            cuda.is_busy = False

    return Event


def devices(cuda: Cuda) -> Any:
    class Device:
        def __init__(self, device: int) -> None:
            self.id = device
            self.pci_bus_id = f"0000:C{device}:00.0"
            self._before = threading.local()

        def __enter__(self) -> Any:
            self._before.ids = [*getattr(self._before, "ids", []), getattr(cuda.here, "device", 0)]
            cuda.here.device = self.id
            return self

        def __exit__(self, *_: Any) -> None:
            cuda.here.device = self._before.ids.pop()

    return Device
