"""The driver on CuPy 13 and 14: streams, events, NVRTC and CUDA graphs.

CuPy compiles its own kernels at their first use and keeps them in its cache on disk, as it does
Heliograph's. Of this package, only `driver` is imported here; CuPy's errors become `DriverError` in
one place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from heliograph_backends.cuda.driver.cublas import (
    OLD_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    Library,
    Products,
    Workspace,
)
from heliograph_backends.cuda.driver.cupy_gpus import cupy
from heliograph_backends.cuda.driver.cupy_memory import CupyMemory, CupyQueue
from heliograph_backends.cuda.driver.driver import NOT_COMPILED, Driver, DriverError, Gemm, Kernel
from heliograph_backends.cuda.driver.parameters import Parameters
from heliograph_backends.cuda.driver.sources import (
    CHAIN,
    MODULES,
    kernels_of,
    module_of,
    options_of,
    text_of,
    text_of_chain,
)

#: From cudaError_t.
_NOT_READY = 600


def open_gpu(number: int) -> Driver:
    """Return the driver of a GPU."""
    return CupyDriver(number)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """A graph, and the workspace of its products."""

    graph: Any
    workspace: Workspace | None


class CupyDriver(CupyMemory):
    """One GPU through CuPy."""

    def __init__(self, number: int) -> None:
        self._functions: dict[str, Any] = {}
        self._loading = threading.Lock()
        self._default = CupyQueue(cupy.cuda.Stream.null)
        super().__init__(number)

    # Queues

    def queue(self) -> CupyQueue:
        with self._gpu:
            return CupyQueue(cupy.cuda.Stream())

    @property
    def default_queue(self) -> CupyQueue:
        return self._default

    @contextmanager
    def using(self, queue: CupyQueue) -> Iterator[None]:
        with self._gpu, queue.stream, cupy.cuda.using_allocator(self._allocating):
            yield

    def mark(self, queue: CupyQueue) -> Any:
        with self._gpu:
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(queue.stream)
        return event

    def time_mark(self, queue: CupyQueue) -> Any:
        with self._gpu:
            event = cupy.cuda.Event(block=True)
            event.record(queue.stream)
        return event

    def elapsed_us(self, first: Any, second: Any) -> float:
        with self._gpu:
            return 1e3 * float(cupy.cuda.get_elapsed_time(first, second))

    def is_reached(self, mark: Any) -> bool:
        runtime = cupy.cuda.runtime
        with self._gpu:
            # Event.done is False for a failed device as well as for a busy one.
            status = runtime.eventQuery(mark.ptr)
            if status not in (0, _NOT_READY):
                raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def wait(self, mark: Any) -> None:
        with self._gpu:
            mark.synchronize()

    def wait_for(self, queue: CupyQueue, mark: Any) -> None:
        with self._gpu:
            queue.stream.wait_event(mark)

    # Work

    def build(self, source: str) -> Kernel:
        with self._gpu:
            try:
                # CuPy keeps the code in its cache on disk, and the module for the life of the
                # process.
                module = cupy.RawModule(code=text_of_chain(source), options=options_of(CHAIN))
                return module.get_function(CHAIN)
            except cupy.cuda.compiler.CompileException as error:
                raise DriverError(NOT_COMPILED, str(error)) from error

    def launch(
        self,
        kernel: str | Kernel,
        grid: tuple[int, int, int],
        threads: int,
        parameters: Parameters,
        queue: CupyQueue,
        shared_bytes: int = 0,
    ) -> None:
        with self._gpu:
            function = self._function(kernel) if isinstance(kernel, str) else kernel
            # A NumPy array of one element is a parameter by value, whose bytes are copied at the
            # launch. For a struct CuPy would list all fields through the array interface, which
            # takes 20 us.
            plain = parameters.view((np.void, parameters.itemsize))
            function(grid, (threads, 1, 1), (plain,), shared_mem=shared_bytes, stream=queue.stream)

    def _function(self, kernel: str) -> Any:
        if kernel not in self._functions:
            self._load(module_of()[kernel])
        return self._functions[kernel]

    def _load(self, name: str) -> None:
        """Compile a module, or take it from CuPy's cache, and load it."""
        with self._loading:
            module = cupy.RawModule(code=text_of(name), options=options_of(name))
            for kernel in kernels_of(name):
                function = module.get_function(kernel)
                # More than 48 KB must be requested. The maximum is requested once, here, so that
                # two threads that launch a kernel cannot lower each other's limit.
                most = self.properties.shared_bytes - function.shared_size_bytes
                function.max_dynamic_shared_size_bytes = most
                self._functions[kernel] = function

    def warmup(self) -> None:
        with self._gpu:
            for name in MODULES:
                self._load(name)

    def gemm(self, product: Gemm, a: int, b: int, c: int, queue: CupyQueue, *, tf32: bool) -> None:
        with self._gpu:
            self._products.multiply(product, a, b, c, queue, tf32=tf32)

    @cached_property
    def _products(self) -> Products:
        # Loading cuBLAS takes a moment.
        from cupy_backends.cuda.libs import cublas

        modern = self.properties.compute_capability >= (9, 0)
        size_bytes = WORKSPACE_BYTES if modern else OLD_WORKSPACE_BYTES
        return Products(
            Library(cublas.__file__), lambda: self._workspace(size_bytes), size_bytes, self._order
        )

    def _workspace(self, size_bytes: int) -> Workspace:
        # From the memory that is left to others, as cuBLAS's own would be.
        memory = cupy.cuda.Memory(size_bytes)
        return Workspace(int(memory.ptr), memory)

    def _order(self, queue: CupyQueue, other: CupyQueue) -> None:
        self.wait_for(queue, self.mark(other))

    def capture(self, issue: Callable[[CupyQueue], None]) -> _Recording:
        with self._gpu:
            # A capture may not wait for the default queue.
            queue = CupyQueue(cupy.cuda.Stream(non_blocking=True), captures=True)
            with queue.stream:
                queue.stream.begin_capture()
                try:
                    issue(queue)
                except BaseException:
                    self._abandon(queue.stream)
                    raise
                return _Recording(queue.stream.end_capture(), queue.workspace)

    @staticmethod
    def _abandon(stream: Any) -> None:
        """End a failed capture; its own error is already known."""
        try:
            stream.end_capture()
        except cupy.cuda.runtime.CUDARuntimeError:
            pass

    def replay(self, recording: _Recording, queue: CupyQueue) -> None:
        with self._gpu:
            if recording.workspace is None:
                recording.graph.launch(queue.stream)
                return
            with self._products.in_order(recording.workspace, queue):
                recording.graph.launch(queue.stream)

    def close(self) -> None:
        try:
            with self._gpu:
                if "_products" in self.__dict__:
                    self._products.close()
                self._functions.clear()
                self._pool.free_all_blocks()
                self._pinned.free_all_blocks()
        except DriverError:
            pass  # the memory of a lost device is freed at the end of the process
