"""A GPU as a device: memory under a limit, queues, and the lost state."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from heliograph_backends.contract import (
    BufferType,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    MemoryEstimate,
    Plan,
)
from heliograph_backends.cuda.driver import polling
from heliograph_backends.cuda.driver.driver import Driver, DriverError, Mark, Queue
from heliograph_backends.cuda.driver.failures import is_sticky, typed
from heliograph_backends.cuda.lowering.target import LEAST_GENERATED, CudaTarget
from heliograph_backends.cuda.memory import CudaBufferType, CudaSharedBufferType, PinnedBufferType
from heliograph_backends.cuda.plan import CudaPlan, estimate
from heliograph_backends.cuda.plan_kernels import KernelCache
from heliograph_backends.cuda.staging import PinnedStaging
from heliograph_backends.cuda.stream import CudaEvent, CudaStream
from heliograph_backends.host_memory.buffers import HostBuffer, MemoryBudget, machine_memory_bytes
from heliograph_backends.host_memory.sealed import why_no_sealed
from heliograph_proto.devices import Capabilities, DeviceType, Memory
from heliograph_proto.errors import DeviceLostError, HeliographError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

logger = logging.getLogger(__name__)

#: The share of the card's free memory that is left to CUDA, cuBLAS and others if no limit is given.
LEFT_TO_OTHERS = 0.05


class CudaDevice(Device):
    """One GPU."""

    backend = "cuda"
    capabilities = Capabilities(async_=True, host_buffer=True, buffer_from_host=True, events=True)

    def __init__(
        self,
        name: str,
        driver: Driver,
        memory_bytes: int = 0,
        *,
        tf32: bool = False,
        least_generated: int = LEAST_GENERATED,
    ) -> None:
        """Open a GPU. Chains of at least `least_generated` elements have their own kernels."""
        self.name = name
        self.driver = driver
        #: True if f32 products may round their operands to tf32.
        self.tf32 = tf32
        facts = driver.properties
        #: The properties by which kernels are chosen.
        self.target = CudaTarget(facts.shared_bytes, facts.multiprocessors, least_generated)
        self.kernels = KernelCache(driver)
        self.description = facts.name
        self.type = DeviceType.INTEGRATED_GPU if facts.integrated else DeviceType.GPU
        self.id = facts.pci_id
        self._lost: DeviceLostError | None = None
        self._here = threading.local()
        self._numbers = count()
        #: Held while a plan is captured, when nothing else may use the device's default queue.
        self.capturing = threading.RLock()
        with self.guarded():
            total = memory_bytes or int(driver.memory()[0] * (1 - LEFT_TO_OTHERS))
            driver.set_limit(total)
            self._budget = MemoryBudget(name, total, "cuda")
            self._host_budget = MemoryBudget(f"{name}_host", machine_memory_bytes())
            self._buffer_type = CudaBufferType(self, self._budget)
            self._pinned_type = PinnedBufferType(self, self._host_budget)
            self._shared_types = () if why_no_sealed() else (CudaSharedBufferType(self, self._host_budget),)
            self.staging = PinnedStaging(driver, self.wait)
            driver.warmup()

    def __repr__(self) -> str:
        state = "lost" if self._lost else f"{self._budget.free_bytes:,} bytes free"
        return f"<CudaDevice {self.name}: {self.description}, {state}>"

    def memory(self) -> Memory:
        return Memory(max(0, self._budget.free_bytes), self._budget.total_bytes)

    @property
    def buffer_type(self) -> CudaBufferType:
        return self._buffer_type

    @property
    def host_buffer_type(self) -> PinnedBufferType:
        return self._pinned_type

    @property
    def extra_buffer_types(self) -> Sequence[BufferType]:
        return self._shared_types

    def supports_buffer_type(self, buffer_type: Any) -> bool:
        return buffer_type is self._buffer_type or buffer_type is self._pinned_type

    def why_missing(self) -> Mapping[str, str]:
        return {} if self._shared_types else {"shared_memory": why_no_sealed()}

    def features(self) -> Mapping[str, str]:
        facts = self.driver.properties
        return {
            "compute_capability": ".".join(map(str, facts.compute_capability)),
            "multiprocessors": str(facts.multiprocessors),
            "l2_bytes": str(facts.l2_bytes),
            "f32_products": "tf32" if self.tf32 else "f32",
        }

    def stream(self) -> CudaStream:
        return CudaStream(self, f"heliograph-{self.name}-stream-{next(self._numbers)}")

    def finish(self) -> None:
        if (queue := getattr(self._here, "queue", None)) is not None:
            with self.guarded():
                self.settle(queue)

    def event(self) -> CudaEvent:
        return CudaEvent(self)

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        with self.guarded():
            return CudaPlan(self, graph, bindings, options)

    def estimate(self, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
        return estimate(self, graph, options)

    def supports_op(self, op: str, attributes: Mapping[str, Any], operands: Any, result: TensorType) -> str:
        return ""

    def buffer_from_host(self, memory: memoryview) -> HostBuffer:
        return self._pinned_type.wrap(memory)

    @property
    def lost(self) -> DeviceLostError | None:
        return self._lost

    def close(self) -> None:
        self.driver.close()

    # Queues

    @contextmanager
    def guarded(self, *, alive: bool = True) -> Iterator[None]:
        """Translate CUDA's errors; a sticky failure marks the device lost. With `alive`, raise at
        once if it is lost.

        Raises DeviceLostError, OutOfMemoryError, ComputeFailedError, UnsupportedError.
        """
        if self._lost is not None and alive:
            raise self._lost.at(self._lost.origin)
        try:
            yield
        except DriverError as error:
            found: HeliographError = self._lost or typed(error, self.name)
            if is_sticky(error) and isinstance(found, DeviceLostError) and self._lost is None:
                self._lost = found
                logger.error("%s", found.message)
            raise found from error

    @contextmanager
    def on(self, queue: Queue) -> Iterator[None]:
        """Make a queue this thread's: work issued inside goes there."""
        before = getattr(self._here, "queue", None)
        self._here.queue = queue
        try:
            with self.driver.using(queue):
                yield
        finally:
            self._here.queue = before

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make the GPU this thread's, for work that uses no queue. No other thread waits for it."""
        with self.guarded(), self.driver.using(self.driver.default_queue):
            yield

    @contextmanager
    def queue(self) -> Iterator[Queue]:
        """Yield this thread's queue; without one, the default queue, and wait for it at the end."""
        queue = getattr(self._here, "queue", None)
        with self.guarded():
            if queue is not None:
                yield queue
                return
            with self.capturing, self.on(self.driver.default_queue):
                yield self.driver.default_queue
                self.settle(self.driver.default_queue)

    def settle(self, queue: Queue) -> None:
        """Wait until the device has computed all work on a queue. Raises DriverError."""
        self.wait(self.driver.mark(queue))

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached a mark. Raises DriverError."""
        # Streams have their own threads, which are not an event loop's.
        if getattr(self._here, "queue", None) in (None, self.driver.default_queue):
            self.driver.wait(mark)
        else:
            polling.wait(self.driver, mark)

    # Bytes

    def to_device(self, address: int, data: memoryview, queue: Queue) -> None:
        """Copy bytes from the host. `data` may change when this returns."""
        try:
            self.staging.to_device(address, data, queue)
        except TimeoutError as error:
            raise DriverError(-1, str(error)) from None

    def to_host(self, out: memoryview, address: int, queue: Queue) -> None:
        """Copy bytes to the host and wait for them."""
        try:
            self.staging.to_host(out, address, queue)
        except TimeoutError as error:
            raise DriverError(-1, str(error)) from None

    def array(self, type: TensorType, address: int, strides: tuple[int, ...], owner: Any) -> Any:
        """Return the elements at an address as an array of the device's library."""
        if type.size == 0:
            return self.driver.xp.empty(type.storage_shape, type.dtype.storage)
        steps = strides if type.dtype.block_size == 1 else (*strides[:-1], 1)
        return self.driver.array(address, type.storage_shape, np.dtype(type.dtype.storage), steps, owner)
