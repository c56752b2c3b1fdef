"""The CPU as a device, with a memory budget and worker threads of its own."""

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
    Abort,
    Arena,
    Backend,
    BufferType,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    MemoryEstimate,
    Parameter,
    ParameterKind,
    Plan,
    Usage,
)
from heliograph_backends.cpu import facts, kernels
from heliograph_backends.cpu.arena import HostArena, lender_of
from heliograph_backends.cpu.hbm import hbm_buffer_types, why_no_hbm
from heliograph_backends.cpu.op_paths import op_path_of
from heliograph_backends.cpu.plan import CpuPlan, estimate
from heliograph_backends.cpu.stream import CpuStream
from heliograph_backends.host_memory.buffers import (
    HostBuffer,
    HostBufferType,
    MemoryBudget,
    machine_memory_bytes,
)
from heliograph_backends.host_memory.sealed import why_no_sealed
from heliograph_backends.host_memory.shared import shared_buffer_types
from heliograph_proto.devices import Capabilities, DeviceType, Memory, OpPath
from heliograph_proto.errors import DeadlineExceededError, InvalidArgumentError, LimitExceededError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

logger = logging.getLogger(__name__)

#: More threads than any machine has; larger numbers are typing errors.
MOST_THREADS = 4096

#: The default of the most independent steps that run at the same time.
CONCURRENCY = 8

#: The most seconds that a change of the number of threads waits for the running program.
IDLE_SECONDS = 10.0


def processor_name() -> str:
    """Return the processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_threads() -> int:
    """Return the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_threads(count: int) -> int:
    """Return the count. Raises InvalidArgumentError if it is out of range."""
    if not 0 <= count <= MOST_THREADS:
        raise InvalidArgumentError(f"threads={count} is not from 0 to {MOST_THREADS}")
    return count


class CpuBufferType(HostBufferType):
    """The host's own memory. New zeros are fresh pages of the kernel."""

    def zeros(self, size_bytes: int, usage: Usage = Usage.ANY, abort: Abort | None = None) -> HostBuffer:
        return self.make_plain(size_bytes, usage, zeros=True)


class CpuDevice(Device):
    """The host's processor. It has threads of its own; BLAS is limited to one thread while it is
    open."""

    type = DeviceType.CPU
    backend = "cpu"
    capabilities = Capabilities(async_=True, host_buffer=True, buffer_from_host=True, events=True)

    def __init__(
        self,
        name: str = "cpu0",
        threads: int = 0,
        memory_bytes: int = 0,
        *,
        native: bool | None = None,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self.name = name
        self.threads = threads or usable_threads()
        #: The most independent steps of a plan that run at the same time.
        self.concurrency = concurrency
        #: True if native kernels run the ops that they support; the definition runs all others.
        self.native = kernels.available() if native is None else native
        self.description = self._described()
        self._budget = MemoryBudget(name, memory_bytes or machine_memory_bytes())
        self._buffer_type: HostBufferType = CpuBufferType(self, self._budget)
        self._other_types = (
            *hbm_buffer_types(self, self._budget),
            *shared_buffer_types(self, self._budget),
        )
        self._blas = _BlasHold()
        self._numbers = count()
        # Helpers serve one program at a time. Other programs then run without them, with the same
        # bits.
        self._helpers_free = threading.Lock()
        if self.native:
            kernels.start()
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

    @property
    def extra_buffer_types(self) -> Sequence[BufferType]:
        return self._other_types

    def features(self) -> Mapping[str, str]:
        found = {
            "threads": str(self.threads),
            "native_kernels": facts.native_compiler() if self.native else "",
            "instruction_set": facts.instruction_set(),
            "blas": facts.blas_library(),
        }
        return {name: value for name, value in found.items() if value}

    def why_missing(self) -> Mapping[str, str]:
        asked_for = "the definition of the ops alone was asked for"
        why_definition = asked_for if kernels.available() else "numba is not installed"
        found = {
            "native_kernels": "" if self.native else why_definition,
            "hbm": why_no_hbm(),
            "shared_memory": why_no_sealed(),
        }
        return {name: why for name, why in found.items() if why}

    def stream(self) -> CpuStream:
        return CpuStream(self, f"heliograph-{self.name}-stream-{next(self._numbers)}")

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        return CpuPlan(self, graph, bindings, options)

    def arena(self, block_bytes: Sequence[int]) -> HostArena:
        return HostArena(self.buffer_type, block_bytes)

    def compile_in(
        self, arena: Arena, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> Plan:
        return CpuPlan(self, graph, bindings, options, lender_of(arena))

    def estimate(self, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
        return estimate(self, graph, options)

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return ""

    def op_path(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> OpPath:
        return op_path_of(op, attributes, operands, result, native=self.native)

    def supports_buffer_type(self, buffer_type: Any) -> bool:
        return bool(buffer_type.is_host and not buffer_type.is_mappable)

    def buffer_from_host(self, memory: memoryview) -> HostBuffer:
        return self._buffer_type.wrap(memory)

    def run_program(self, program: kernels.BoundProgram, threads: int = 0) -> kernels.Status:
        """Run a native program on the device's workers, at most `threads` of them (0: all), or on
        this thread alone if they are busy.
        """
        if threads == 1 or not self._helpers_free.acquire(blocking=False):
            return program.run(None)
        try:
            return program.run(self._workers, threads)
        finally:
            self._helpers_free.release()

    def set_threads(self, count: int) -> None:
        """Set the number of threads that compute, also in existing plans; 0: one for each
        processor.

        Waits for the running native program. Raises InvalidArgumentError, DeadlineExceededError if
        the wait takes too long, or LimitExceededError if the system refuses more threads.
        """
        wanted = checked_threads(count) or usable_threads()
        if not self._helpers_free.acquire(timeout=IDLE_SECONDS):
            message = f"device {self.name} was not idle within {IDLE_SECONDS:.0f} s"
            raise DeadlineExceededError(message, advice="try again between two runs")
        try:
            self._workers.resize(wanted)
        except RuntimeError as error:
            raise LimitExceededError(f"the system refused {wanted} threads: {error}") from error
        finally:
            self.threads = self._workers.helpers + 1
            self.description = self._described()
            self._helpers_free.release()

    def _described(self) -> str:
        alone = "" if self.native else ", the definition alone"
        return f"{processor_name()}, {self.threads} thread{'s' if self.threads > 1 else ''}{alone}"

    def close(self) -> None:
        self._workers.close()
        self._blas.release()


class _BlasHold:
    """A limit of BLAS to one thread, so that bits do not depend on threads. The last release ends
    it."""

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
        """End this hold. Idempotent."""
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
        logger.info("threadpoolctl is not installed: BLAS keeps its own threads")
        return None
    return threadpool_limits(limits=1, user_api="blas")


class CpuBackend(Backend):
    """The CPU backend: one device for each set of parameters, with its own threads and memory."""

    name = "cpu"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter("threads", ParameterKind.COUNT, "threads that compute; 0: one for each processor"),
        Parameter("memory", ParameterKind.SIZE, "memory that the device may use; 0: the machine's"),
        Parameter(
            "concurrency", ParameterKind.COUNT, "steps that may run at the same time; 1: no concurrency"
        ),
        Parameter("reference", ParameterKind.COUNT, "1: use only the definition of the ops, no kernels"),
    )

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._devices: tuple[CpuDevice, ...] = ()
        self._why = ""
        try:
            for number, one in enumerate(parameters):
                threads = checked_threads(one.get("threads", 0))
                native = False if one.get("reference", 0) else None
                self._devices += (
                    CpuDevice(
                        f"cpu{number}",
                        threads,
                        one.get("memory", 0),
                        native=native,
                        concurrency=one.get("concurrency") or CONCURRENCY,
                    ),
                )
        except Exception as error:
            for device in self._devices:
                device.close()
            self._devices, self._why = (), str(error) or type(error).__name__

    def devices(self) -> tuple[CpuDevice, ...]:
        return self._devices

    def why_unavailable(self) -> str:
        return self._why

    def features(self) -> Mapping[str, str]:
        return {"native_kernels": facts.native_compiler() or "none: numba is not installed"}
