"""The driver's interface over this host's memory."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cuda_emulation.compiling import compiled, kernel
from heliograph_backends.cuda.driver import Block, Bytes, Driver, DriverError, Gemm, Properties
from heliograph_backends.cuda.parameters import Parameters
from heliograph_proto import bfloat16

_ITEMS = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": np.uint16}
_FAILURES = ("", "a deadlock", "too many threads", "a write behind its shared memory")
#: One launch at a time: the fibres are the process's.
_LAUNCHING = threading.Lock()


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

    xp = np

    def __init__(self, number: int = 0, *, memory_bytes: int = 2**30, lazy: bool = False) -> None:
        self.number = number
        self.lazy = lazy
        self.properties = Properties(f"emulated {number}", f"0000:0{number}:00.0", (9, 0), 4, 2**20, 2**20)
        self.failures: dict[str, deque[int]] = {}
        self.dead = 0
        self.launched: list[str] = []
        self.captures = self.replays = 0
        #: While False, a lazy device comes to no mark by itself.
        self.goes_on = True
        self._memory_bytes = memory_bytes
        self._limit = memory_bytes
        self._default = Queue()
        self._queues: list[Queue] = [self._default]
        self._recording = threading.local()
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

    def warmup(self) -> None:
        compiled()

    # Memory

    def memory(self) -> tuple[int, int]:
        return self._memory_bytes, self._memory_bytes

    def set_limit(self, size_bytes: int) -> None:
        self._limit = size_bytes

    def allocate(self, size_bytes: int) -> Block:
        self._pass("allocate")
        memory = self._aligned(size_bytes, 256)
        return Block(int(memory.ctypes.data), size_bytes, memory)

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
        yield

    def _put(self, queue: Queue, work: Callable[[], None], call: str) -> None:
        self._pass(call)
        if queue is self._default:
            for one in self._queues:
                one.run_to(one.put_so_far)
        with queue.lock:
            queue.work.append(work)
            queue.put_so_far += 1
        if not self.lazy and queue in self._queues:
            queue.run_to(queue.put_so_far)

    def mark(self, queue: Queue) -> Any:
        self._pass("mark")
        return queue, queue.put_so_far

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
        # The extent is not known here; the caller checked it.
        extent = (
            sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            + np.dtype(dtype).itemsize
        )
        memory = (ctypes.c_uint8 * extent).from_address(address)
        made = np.ndarray(shape, dtype, memory, 0, strides)
        memory._owner = owner
        return made

    # Work

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        parameters: Parameters,
        queue: Queue,
        shared_bytes: int = 0,
    ) -> None:
        copied, function = parameters.copy(), kernel(name)
        self.launched.append(name)

        def work() -> None:
            sizes = np.array([*grid], np.uint32), np.array([threads, 1, 1], np.uint32)
            with _LAUNCHING:
                status = function(
                    copied.ctypes.data, sizes[0].ctypes.data, sizes[1].ctypes.data, shared_bytes
                )
            if status:
                raise DriverError(719, f"{name}: {_FAILURES[status]}")

        self._put(queue, work, "launch")

    def gemm(self, product: Gemm, a: int, b: int, c: int, queue: Queue, *, tf32: bool) -> None:
        self._put(queue, lambda: self._multiply(product, a, b, c), "gemm")

    def _multiply(self, product: Gemm, a: int, b: int, c: int) -> None:
        m, n, k = product.sizes
        for number in range(product.batch):
            shapes = (m, k), (k, n), (m, n)
            views = [
                self._columns(base, name, number * stride, shape, leading, flipped)
                for base, name, stride, shape, leading, flipped in zip(
                    (a, b, c), product.types, product.strides, shapes, product.leading,
                    (*product.transposed, False), strict=True,
                )
            ]  # fmt: skip
            left, right, result = views
            wide = np.float64 if product.types[2] == "f64" else np.float32
            found = _wide(left, product.types[0], wide) @ _wide(right, product.types[1], wide)
            result[...] = bfloat16.to_bits(found) if product.types[2] == "bf16" else found

    def _columns(
        self, base: int, name: str, offset: int, shape: tuple[int, int], leading: int, flipped: bool
    ) -> Any:
        """A matrix [rows, columns] whose columns, or rows if flipped, lie `leading` elements apart."""
        item = np.dtype(_ITEMS[name]).itemsize
        strides = (leading * item, item) if flipped else (item, leading * item)
        return self.array(base + offset * item, shape, _ITEMS[name], strides, None)

    def failure(self, error: Exception) -> DriverError | None:
        return error if isinstance(error, DriverError) else None

    def capture(self, issue: Callable[[Any], None]) -> Any:
        self._pass("capture")
        recorded = Queue()
        issue(recorded)
        self.captures += 1
        return tuple(recorded.work)

    def replay(self, recording: Any, queue: Queue) -> None:
        self.replays += 1

        def work() -> None:
            for one in recording:
                one()

        self._put(queue, work, "replay")


def _wide(array: Any, name: str, wide: Any) -> Any:
    return bfloat16.from_bits(array) if name == "bf16" else array.astype(wide)
