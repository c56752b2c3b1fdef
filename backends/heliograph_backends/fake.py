"""A device with scripted delays and failures, for exact and fast tests of scheduling and errors.

It computes real results by the ops' definitions, in host memory with a budget. Before each kind of
work it consults its script, which lets it pass, or makes it wait for a gate that the test opens,
wait for a time, or fail.

    device = FakeDevice()
    gate = device.script.hold("compute")      # the next run waits here
    ...
    gate.entered.wait(5)                      # it has begun
    gate.open()                               # let it continue
    device.script.fail("compute", ComputeFailedError("the fan stopped"))
    device.script.lose("it fell off the bus")   # from now on everything ends with DeviceLostError
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from heliograph_backends.contract import (
    CONTRACT_VERSION,
    Abort,
    Arena,
    Backend,
    BufferType,
    Chunks,
    DeviceCompileOptions,
    LeafBindings,
    Parameter,
    ParameterKind,
    Plan,
    Tensor,
    Turn,
    Usage,
    access,
    host_bytes,
)
from heliograph_backends.cpu.arena import lender_of
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_backends.host_memory.buffers import ALIGNMENT, HostBuffer, HostBufferType, MemoryBudget
from heliograph_proto.devices import Capabilities, DeviceType
from heliograph_proto.errors import CancelledError, DeviceLostError, OutOfMemoryError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

#: Kinds of work in a script. A run passes as "compute", and then once for all its nodes as "nodes",
#: of which each takes its delay.
Work: TypeAlias = Literal["allocate", "set", "get", "memset", "copy", "compile", "compute", "nodes"]

#: The time after which a gate opens by itself, so that a failed test does not hang.
GATE_SECONDS = 30.0

#: The maximum extra buffer types of a device.
MOST_EXTRA = 100


@dataclass(eq=False)
class FakeGate:
    """A gate at which work waits until the test opens it, or the work is aborted."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    #: The time after which it opens by itself.
    seconds: float = GATE_SECONDS

    def open(self) -> None:
        self.opened.set()

    def wait(self, abort: Abort | None) -> None:
        self.entered.set()
        if abort is None:
            self.opened.wait(self.seconds)
            return
        with abort.watch(self.opened.set):
            self.opened.wait(self.seconds)
        if abort.is_set:
            raise CancelledError("the run was cancelled")


class Script:
    """The script for the next pieces of work, by kind, in order; empty by default."""

    def __init__(self, device: str = "fake0") -> None:
        self._device = device
        self._lock = threading.Lock()
        self._next: dict[str, deque[FakeGate | BaseException]] = defaultdict(deque)
        self.always_seconds: dict[str, float] = {}
        #: The bytes of each copy from other devices so far.
        self.copied: list[int] = []
        #: The reason why the device is lost; None unless it is.
        self.lost: DeviceLostError | None = None
        #: The number of successful runs before the device is lost; None: unlimited.
        self.lost_after: int | None = None
        self._held: list[FakeGate] = []

    def hold(self, work: Work) -> FakeGate:
        """Make the next work of a kind wait at a gate, and return the gate."""
        gate = FakeGate()
        with self._lock:
            self._next[work].append(gate)
            self._held.append(gate)
        return gate

    def delay(self, work: Work, seconds: float) -> None:
        """Add a delay to all work of a kind."""
        self.always_seconds[work] = seconds

    def fail(self, work: Work, error: BaseException) -> None:
        """Make the next work of a kind fail with this error."""
        with self._lock:
            self._next[work].append(error)

    def lose(self, why: str = "its script says so") -> None:
        """Lose the device, also for work that waits at a gate."""
        with self._lock:
            self._lose(why)
            held, self._held = self._held, []
        for gate in held:
            gate.open()

    def check(self) -> None:
        """Raise DeviceLostError if the device is lost."""
        if self.lost is not None:
            raise self.lost.at(self.lost.origin)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or DeviceLostError(
            f"device {self._device} is lost: {why}",
            advice="compile the plan for another device; this one is back after a restart of the daemon",
        )

    def pass_(self, work: Work, abort: Abort | None = None, pieces: int = 1) -> None:
        """Return when `pieces` pieces of work may proceed. Called by the device before the work."""
        self.check()
        self._meet(work, abort, pieces)
        self.check()

    def _meet(self, work: Work, abort: Abort | None, pieces: int) -> None:
        with self._lock:
            entry = self._next[work].popleft() if self._next[work] else None
            if work == "compute" and self.lost_after is not None:
                self.lost_after -= 1
                if self.lost_after < 0:
                    self._lose("its script limits the number of runs")
                    return
        if seconds := pieces * self.always_seconds.get(work, 0.0):
            FakeGate(seconds=seconds).wait(abort)
        if isinstance(entry, FakeGate):
            entry.wait(abort)
        elif entry is not None:
            raise entry


class FakeDevice(CpuDevice):
    """A scripted device in host memory.

    With `is_host` False, other code cannot access its memory, as with a GPU: its kernels read only
    their own memory, and it copies bytes itself. With `offloads`, it computes with weights on the
    host, which are copied to it for each run. `site` is the host that it claims to be on.
    """

    backend = "fake"
    type = DeviceType.ACCELERATOR
    capabilities = Capabilities(async_=True, buffer_from_host=False, events=True)

    def __init__(
        self,
        name: str = "fake0",
        memory_bytes: int = 2**30,
        *,
        alignment: int = ALIGNMENT,
        max_size: int = 2**63 - 1,
        extra: int = 0,
        is_host: bool = True,
        offloads: bool = False,
        site: str = "",
    ) -> None:
        super().__init__(name, threads=1, memory_bytes=memory_bytes, native=False)
        self.script = Script(name)
        self.description = "scripted delays and failures"
        self._is_host = is_host
        self._offloads = offloads
        self._site = site
        names = (name, *(f"{name}_extra{number}" for number in range(extra)))
        self._buffer_type, *self._extra_types = (
            _FakeBufferType(self, self._budget, one, alignment, max_size, is_host) for one in names
        )

    @property
    def site_name(self) -> str:
        return self._site

    @property
    def host_buffer_type(self) -> None:
        return None

    @property
    def extra_buffer_types(self) -> Sequence[BufferType]:
        return tuple(self._extra_types)

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        own = buffer_type.device is self
        return own or (self._is_host and buffer_type.is_host and not buffer_type.is_mappable)

    def offload_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> bool:
        return self._offloads

    def features(self) -> Mapping[str, str]:
        return {"threads": "1"}

    def why_missing(self) -> Mapping[str, str]:
        return {}

    @property
    def lost(self) -> DeviceLostError | None:
        return self.script.lost

    def buffer_from_host(self, memory: memoryview) -> HostBuffer:
        raise UnsupportedError(f"device {self.name} cannot use host memory in place")

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        self.script.pass_("compile")
        return _FakePlan(self, graph, bindings, options)

    def compile_in(
        self, arena: Arena, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> Plan:
        self.script.pass_("compile")
        return _FakePlan(self, graph, bindings, options, lender_of(arena))


class _FakePlan(CpuPlan):
    def _compute(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        abort: Abort,
        turn: Turn | None,
    ) -> None:
        assert isinstance(self.device, FakeDevice)
        self.device.script.pass_("compute", abort)
        self.device.script.pass_("nodes", abort, len(self.graph.nodes))
        # A script says when runs go on; none gives its turn away by itself.
        super()._compute(inputs, outputs, abort, None)


class _FakeBufferType(HostBufferType):
    def __init__(
        self,
        device: FakeDevice,
        budget: MemoryBudget,
        name: str,
        alignment: int,
        max_size: int,
        is_host: bool,
    ) -> None:
        super().__init__(device, budget)
        self.script = device.script
        self.name, self.alignment, self.max_size, self.is_host = name, alignment, max_size, is_host

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        self.script.pass_("allocate")
        if size_bytes > self.max_size:
            raise OutOfMemoryError(
                f"a buffer of {size_bytes:,} bytes; {self.name} has at most {self.max_size:,}"
            )
        self.budget.take(size_bytes)
        return _FakeBuffer(self, size_bytes, usage)


class _FakeBuffer(HostBuffer):
    """A scripted host buffer. Its bytes are already counted."""

    buffer_type: _FakeBufferType

    def __init__(self, buffer_type: _FakeBufferType, size_bytes: int, usage: Usage) -> None:
        try:
            raw = np.empty(size_bytes + buffer_type.alignment, np.uint8)
        except (MemoryError, ValueError):
            buffer_type.budget.give(size_bytes)
            raise OutOfMemoryError(f"the host refused {size_bytes:,} bytes") from None
        memory = raw[-raw.ctypes.data % buffer_type.alignment :][:size_bytes]
        super().__init__(buffer_type, memory, usage, on_free=lambda: buffer_type.budget.give(size_bytes))
        self.script = buffer_type.script

    def set(self, offset_bytes: int, data: memoryview) -> None:
        self.script.pass_("set")
        super().set(offset_bytes, data)

    def get(self, offset_bytes: int, out: memoryview) -> None:
        self.script.pass_("get")
        super().get(offset_bytes, out)

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        self.script.pass_("memset")
        super().memset(offset_bytes, size_bytes, value)

    def set_2d(self, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
        self.script.check()
        super().set_2d(offset_bytes, data, chunks)

    def get_2d(self, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
        self.script.check()
        super().get_2d(offset_bytes, out, chunks)

    def copy_from(self, source: Tensor, destination: Tensor) -> bool:
        """Copy from host memory or from the device's own."""
        self.script.check()
        if source.buffer.buffer_type.device is not self.buffer_type.device:
            self.script.pass_("copy")
            self.script.copied.append(source.type.nbytes)
            return super().copy_from(source, destination)
        np.copyto(access.elements(destination), access.elements(source))
        return True

    def copy_to(self, source: Tensor, destination: Tensor) -> bool:
        """Copy to host memory, if other code cannot access this buffer."""
        self.script.check()
        if self.buffer_type.is_host or not destination.buffer.buffer_type.is_host:
            return False
        access.write(destination, 0, host_bytes(np.ascontiguousarray(access.elements(source))))
        return True


class FakeBackend(Backend):
    """Scripted devices with configurable memory, for tests of memory and copies."""

    name = "fake"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter("memory", ParameterKind.SIZE, "the memory that it may use"),
        Parameter("alignment", ParameterKind.SIZE, "the alignment of its tensors: a power of two"),
        Parameter("max_size", ParameterKind.SIZE, "the maximum size of one buffer"),
        Parameter("extra", ParameterKind.COUNT, "the number of further buffer types"),
        Parameter("host", ParameterKind.COUNT, "1: other devices may access its memory, 0: they may not"),
        Parameter("offload", ParameterKind.COUNT, "1: it fetches weights from the host for every op"),
        Parameter("compute_ms", ParameterKind.COUNT, "the delay of each run, in milliseconds"),
        Parameter("site", ParameterKind.TEXT, "the host that it claims to be on"),
        Parameter("fail", ParameterKind.TEXT, "it cannot start, for this reason"),
        Parameter("lost_after", ParameterKind.COUNT, "it is lost after this many runs"),
    )

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._why = next(filter(None, map(_why_not, parameters)), "")
        self._devices = tuple(
            _device(number, one) for number, one in enumerate(parameters if not self._why else ())
        )

    def devices(self) -> tuple[FakeDevice, ...]:
        return self._devices

    def why_unavailable(self) -> str:
        return self._why


def _why_not(parameters: Mapping[str, Any]) -> str:
    """Return the reason why a device cannot have these parameters; empty if it can."""
    if "fail" in parameters:
        return parameters["fail"] or "the parameter 'fail' is set"
    alignment = parameters.get("alignment", ALIGNMENT)
    if not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        return f"alignment={alignment} is not a power of two up to 1MiB"
    if parameters.get("extra", 0) > MOST_EXTRA:
        return f"extra={parameters['extra']}; the maximum is {MOST_EXTRA}"
    for name in ("host", "offload"):
        if parameters.get(name, 1) > 1:
            return f"{name}={parameters[name]} is neither 0 nor 1"
    return ""


def _device(number: int, parameters: Mapping[str, Any]) -> FakeDevice:
    device = FakeDevice(
        f"fake{number}",
        parameters.get("memory", 2**30),
        alignment=parameters.get("alignment", ALIGNMENT),
        max_size=parameters.get("max_size", 2**63 - 1),
        extra=parameters.get("extra", 0),
        is_host=bool(parameters.get("host", 1)),
        offloads=bool(parameters.get("offload", 0)),
        site=parameters.get("site", ""),
    )
    device.script.delay("compute", parameters.get("compute_ms", 0) / 1e3)
    device.script.lost_after = parameters.get("lost_after")
    return device
