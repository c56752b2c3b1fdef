"""The CPU as a device: memory under a budget, and workers that belong to it."""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from heliograph_backends.contract import (
    CONTRACT_VERSION,
    Backend,
    CompileOptions,
    Device,
    LeafBindings,
    Parameter,
    ParameterKind,
    Plan,
)
from heliograph_backends.cpu import kernels
from heliograph_backends.cpu.memory import Budget, HostBuffer, HostBufferType, machine_memory_bytes
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_backends.cpu.stream import CpuStream
from heliograph_proto.description import Capabilities, DeviceType, Memory
from heliograph_proto.graph import Graph
from heliograph_proto.rules import PLAIN
from heliograph_proto.types import TensorType

logger = logging.getLogger(__name__)


def processor_name() -> str:
    """The processor's model name, as people know it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_threads() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CpuDevice(Device):
    """The host's processor. Its threads are its own: BLAS is held to one thread while it is open."""

    type = DeviceType.CPU
    backend = "cpu"
    capabilities = Capabilities(async_=True, host_buffer=True, buffer_from_host=True, events=True)

    def __init__(
        self, name: str = "cpu0", threads: int = 0, memory_bytes: int = 0, *, native: bool | None = None
    ) -> None:
        self.name = name
        self.threads = threads or usable_threads()
        #: Whether f32 runs on native kernels; the definition runs everything else, and all without numba.
        self.native = kernels.available() if native is None else native
        self.description = f"{processor_name()}, {self.threads} threads"
        self._budget = Budget(name, memory_bytes or machine_memory_bytes())
        self._buffer_type = HostBufferType(self, self._budget)
        self._blas = _BlasHold()
        self._numbers = count()
        # Helpers serve one program at a time; whoever finds them busy computes alone, with the same bits.
        self._helpers_free = threading.Lock()
        if self.native:
            kernels.warmup()
        self._workers = kernels.WorkerPool(self.threads)

    def __repr__(self) -> str:
        return f"<CpuDevice {self.name}: {self.threads} threads, {self._budget.free_bytes:,} bytes free>"

    def memory(self) -> Memory:
        return Memory(max(0, self._budget.free_bytes), self._budget.total_bytes)

    @property
    def buffer_type(self) -> HostBufferType:
        return self._buffer_type

    @property
    def host_buffer_type(self) -> HostBufferType | None:
        return self._buffer_type

    def stream(self) -> CpuStream:
        return CpuStream(self, f"heliograph-{self.name}-stream-{next(self._numbers)}")

    def compile(self, graph: Graph, bindings: LeafBindings, options: CompileOptions) -> Plan:
        return CpuPlan(self, graph, bindings, options)

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        for found in (*operands, result):
            if found.dtype.kind not in PLAIN or found.dtype.name == "bf16":
                return f"the CPU does not compute on {found.dtype}; convert it first"
        return ""

    def supports_buffer_type(self, buffer_type: Any) -> bool:
        return bool(buffer_type.is_host)

    def buffer_from_host(self, memory: memoryview) -> HostBuffer:
        return self._buffer_type.wrap(memory)

    def run_program(self, program: kernels.BoundProgram) -> kernels.Status:
        """Runs a native program on the device's workers, or on this thread alone if they are busy."""
        if not self._helpers_free.acquire(blocking=False):
            return program.run(None)
        try:
            return program.run(self._workers)
        finally:
            self._helpers_free.release()

    def close(self) -> None:
        self._workers.close()
        self._blas.release()


class _BlasHold:
    """Holds BLAS to one thread until the last hold is released: bits must not depend on threads."""

    _lock = threading.Lock()
    _holds = 0
    _limits: ClassVar[Any] = None

    def __init__(self) -> None:
        self._held = True
        with self._lock:
            _BlasHold._holds += 1
            if _BlasHold._holds == 1:
                _BlasHold._limits = _one_blas_thread()

    def release(self) -> None:
        """Idempotent."""
        with self._lock:
            _BlasHold._holds -= self._held
            self._held = False
            if _BlasHold._holds == 0 and _BlasHold._limits is not None:
                _BlasHold._limits.restore_original_limits()
                _BlasHold._limits = None


def _one_blas_thread() -> Any:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        logger.info("threadpoolctl is missing: BLAS keeps its own threads")
        return None
    return threadpool_limits(limits=1, user_api="blas")


class CpuBackend(Backend):
    """The CPU backend: as many devices as were asked for, each with its own threads and memory."""

    name = "cpu"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter("threads", ParameterKind.COUNT, "threads that compute; 0: one for each processor"),
        Parameter("memory", ParameterKind.SIZE, "memory that it may use; 0: the machine's"),
    )

    def __init__(self, parameters: Sequence[Mapping[str, int]] = ({},)) -> None:
        self._devices = tuple(
            CpuDevice(f"cpu{number}", one.get("threads", 0), one.get("memory", 0))
            for number, one in enumerate(parameters)
        )

    def devices(self) -> tuple[CpuDevice, ...]:
        return self._devices

    def features(self) -> Mapping[str, str]:
        return {"native kernels": "numba" if kernels.available() else "none: numba is not installed"}
