"""The driver's interface over this host's memory."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cuda_emulation.array import DeviceArray
from cuda_emulation.compiling import LAUNCHING, compile_all, compiled_chain, entry
from cuda_emulation.gemm import multiply, view
from cuda_emulation.library import Library
from heliograph_backends.cuda.driver.driver import (
    Bytes,
    DeviceBlock,
    Driver,
    DriverError,
    Gemm,
    Kernel,
    Properties,
)
from heliograph_backends.cuda.driver.parameters import Parameters

#: What a launch can end with.
_FAULTS = {
    1: "a deadlock", 2: "too many threads", 3: "a misaligned access", 4: "a write past shared memory"
}  # fmt: skip


class Queue:
    """Work in order. A lazy one runs it when somebody waits for it, and no sooner."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.put_so_far = 0
        self.done_so_far = 0
        self.lock = threading.RLock()

    def run_to(self, count: int) -> None:
        with self.lock:
            while self.done_so_far < count:
                self.done_so_far += 1
                self.work.popleft()()


class EmulatedDriver(Driver):
    """One GPU. With `lazy`, what is on a queue happens when it is waited for, so that nobody can count on it
    before.

    `failures` are statuses by the name of a call, each for its next one.
    """

    def __init__(
        self, number: int = 0, *, memory_bytes: int = 2**30, lazy: bool = False, shared_bytes: int = 2**20
    ) -> None:
        self.number = number
        self.lazy = lazy
        self.properties = Properties(
            f"emulated {number}", f"0000:0{number}:00.0", (9, 0), 4, 2**20, shared_bytes
        )
        self.failures: dict[str, deque[int]] = {}
        self.dead = 0
        self.launched: list[str] = []
        self.multiplied: list[Gemm] = []
        self.built: list[str] = []
        self.captures = self.replays = 0
        #: While False, a lazy device comes to no mark by itself.
        self.goes_on = True
        self._memory_bytes = memory_bytes
        self._limit = memory_bytes
        self._default = Queue()
        self._queues: list[Queue] = [self._default]
        self._here = threading.local()
        self.xp = Library(self._arrive, self._wait_for_value)
        self.registered = 0

    def fail(self, call: str, status: int) -> None:
        """The next such call fails; after a sticky status every later one does."""
        self.failures.setdefault(call, deque()).append(status)

    def _pass(self, call: str) -> None:
        if self.dead:
            raise DriverError(self.dead, f"as before, in {call}")
        if self.failures.get(call):
            status = self.failures[call].popleft()
            self.dead = status if status >= 700 and status < 720 else 0
            raise DriverError(status, f"scripted, in {call}")

    # Memory

    def memory(self) -> tuple[int, int]:
        return self._memory_bytes, self._memory_bytes

    def set_limit(self, size_bytes: int) -> None:
        self._limit = size_bytes

    def allocate(self, size_bytes: int) -> DeviceBlock:
        self._pass("allocate")
        memory = self._aligned(size_bytes, 256)
        return DeviceBlock(int(memory.ctypes.data), size_bytes, memory)

    def allocate_pinned(self, size_bytes: int) -> Bytes:
        self._pass("allocate_pinned")
        return self._aligned(size_bytes, 64)

    @staticmethod
    def _aligned(size_bytes: int, alignment: int) -> Bytes:
        """Memory whose contents are no numbers."""
        raw = np.full(size_bytes + alignment, 0xFF, np.uint8)
        return raw[-raw.ctypes.data % alignment :][:size_bytes]

    def register(self, memory: Bytes) -> Callable[[], None]:
        self._pass("register")
        self.registered += 1

        def release() -> None:
            self._pass("unregister")
            self.registered -= 1

        return release

    # Queues

    def queue(self) -> Queue:
        self._pass("queue")
        self._queues.append(Queue())
        return self._queues[-1]

    @property
    def default_queue(self) -> Queue:
        return self._default

    @contextmanager
    def using(self, queue: Queue) -> Iterator[None]:
        before = getattr(self._here, "queue", None)
        self._here.queue = queue
        try:
            yield
        finally:
            self._here.queue = before

    def _arrive(self) -> None:
        """What the array library does comes behind what is on the thread's queue."""
        queue = getattr(self._here, "queue", None)
        if queue is not None:
            queue.run_to(queue.put_so_far)

    def _wait_for_value(self) -> None:
        if getattr(self._here, "captures", False):
            raise DriverError(900, "a capture waits for no value")
        self._pass("wait")

    def _put(self, queue: Queue, work: Callable[[], None], call: str) -> None:
        self._pass(call)
        self._run_others(queue)
        with queue.lock:
            queue.work.append(work)
            queue.put_so_far += 1
        if not self.lazy and queue in self._queues:
            queue.run_to(queue.put_so_far)

    def _run_others(self, queue: Queue) -> None:
        """What comes on the default queue is behind all that is on the others."""
        if queue is self._default:
            for one in self._queues:
                one.run_to(one.put_so_far)

    def mark(self, queue: Queue) -> Any:
        self._pass("mark")
        self._run_others(queue)
        return queue, queue.put_so_far

    def time_mark(self, queue: Queue) -> Any:
        times: list[float] = []
        self._put(queue, lambda: times.append(time.perf_counter()), "time_mark")
        return queue, queue.put_so_far, times

    def elapsed_us(self, first: Any, second: Any) -> float:
        self._pass("elapsed_us")
        return float(second[2][0] - first[2][0]) * 1e6

    def is_reached(self, mark: Any) -> bool:
        self._pass("is_reached")
        queue, count = mark
        if self.goes_on:
            queue.run_to(count)
        return bool(queue.done_so_far >= count)

    def wait(self, mark: Any) -> None:
        self._pass("wait")
        queue, count = mark
        queue.run_to(count)

    def wait_for(self, queue: Queue, mark: Any) -> None:
        other, count = mark
        self._put(queue, lambda: other.run_to(count), "wait_for")

    # Bytes

    def copy(self, target: int, source: int, size_bytes: int, queue: Queue) -> None:
        self._put(queue, lambda: ctypes.memmove(target, source, size_bytes) and None, "copy")

    def copy_2d(
        self,
        target: int,
        target_step: int,
        source: int,
        source_step: int,
        width: int,
        count: int,
        queue: Queue,
    ) -> None:
        def work() -> None:
            for row in range(count):
                ctypes.memmove(target + row * target_step, source + row * source_step, width)

        self._put(queue, work, "copy_2d")

    def copy_from_peer(self, target: int, source: int, peer: int, size_bytes: int, queue: Queue) -> None:
        self._put(queue, lambda: ctypes.memmove(target, source, size_bytes) and None, "copy_from_peer")

    def fill(self, address: int, value: int, size_bytes: int, queue: Queue) -> None:
        self._put(queue, lambda: ctypes.memset(address, value, size_bytes) and None, "fill")

    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any
    ) -> Any:
        return DeviceArray(view(address, shape, dtype, strides, owner), self.xp)

    # Work

    def build(self, source: str) -> Kernel:
        self._pass("build")
        self.built.append(source)
        function = compiled_chain(source).chain
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint]
        return function

    def launch(
        self,
        kernel: str | Kernel,
        grid: tuple[int, int, int],
        threads: int,
        parameters: Parameters,
        queue: Queue,
        shared_bytes: int = 0,
    ) -> None:
        copied = parameters.copy()
        name, function = (kernel, entry(kernel)) if isinstance(kernel, str) else ("chain", kernel)
        if shared_bytes > self.properties.shared_bytes:
            raise DriverError(1, f"{name}: {shared_bytes} bytes of shared memory for a block")
        if grid[0] >= 2**31 or max(grid[1:]) > 65535 or threads > 1024:
            raise DriverError(9, f"{name}: blocks {grid} of {threads} threads")
        self.launched.append(name)

        def work() -> None:
            sizes = np.array([*grid], np.uint32), np.array([threads, 1, 1], np.uint32)
            with LAUNCHING:
                status = function(
                    copied.ctypes.data, sizes[0].ctypes.data, sizes[1].ctypes.data, shared_bytes
                )
            if status:
                raise DriverError(719, f"{name}: {_FAULTS[status]}")

        self._put(queue, work, "launch")

    def gemm(self, product: Gemm, a: int, b: int, c: int, queue: Queue, *, tf32: bool) -> None:
        self.multiplied.append(product)
        self._put(queue, lambda: multiply(product, a, b, c), "gemm")

    def failure(self, error: Exception) -> DriverError | None:
        return error if isinstance(error, DriverError) else None

    def warmup(self) -> None:
        compile_all()

    def capture(self, issue: Callable[[Any], None]) -> Any:
        self._pass("capture")
        recorded = Queue()
        self._here.captures = True
        try:
            issue(recorded)
        finally:
            self._here.captures = False
        self.captures += 1
        return tuple(recorded.work)

    def replay(self, recording: Any, queue: Queue) -> None:
        self.replays += 1

        def work() -> None:
            for one in recording:
                one()

        self._put(queue, work, "replay")
