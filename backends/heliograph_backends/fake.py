"""A device whose delays and failures are scripted, so that tests of scheduling, cancellation and
errors are exact and quick.

It computes for real, on the definition, in host memory with a budget. Before each kind of work it asks
its script, which may let it pass, wait for a gate that the test opens, wait for a time, or fail.

    device = FakeDevice()
    gate = device.script.hold("compute")      # the next run waits here
    ...
    gate.entered.wait(5)                      # it has begun
    gate.open()                               # let it go on
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

#: Kinds of work that a script can hold up. A run is asked for as "compute", and then once for all its nodes
#: as "nodes", of which each takes its delay.
Work: TypeAlias = Literal["allocate", "set", "get", "copy", "compile", "compute", "nodes"]

#: A gate that nobody opens gives way, so that a test that failed does not hang.
GATE_SECONDS = 30.0

#: The most extra buffer types of a device.
MOST_EXTRA = 100


@dataclass(eq=False)
class FakeGate:
    """Where work waits until the test lets it pass, or it is aborted."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    #: How long it stays shut when nobody opens it.
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
    """What is to happen to the next pieces of work, by kind, in order; by default nothing."""

    def __init__(self, device: str = "fake0") -> None:
        self._device = device
        self._lock = threading.Lock()
        self._next: dict[str, deque[FakeGate | BaseException]] = defaultdict(deque)
        self.always_seconds: dict[str, float] = {}
        #: The bytes of each copy to the device from elsewhere, so far.
        self.copied: list[int] = []
        #: Why the device is gone; None as long as it is not.
        self.lost: DeviceLostError | None = None
        #: The runs that end well before the device is lost; None: it never is by itself.
        self.lost_after: int | None = None
        self._held: list[FakeGate] = []

    def hold(self, work: Work) -> FakeGate:
        """The next such work waits at the gate."""
        return self._add(work, FakeGate())

    def delay(self, work: Work, seconds: float) -> None:
        """Every such work takes this much longer."""
        self.always_seconds[work] = seconds

    def fail(self, work: Work, error: BaseException) -> None:
        """The next such work fails with this error."""
        with self._lock:
            self._next[work].append(error)

    def lose(self, why: str = "it was told to") -> None:
        """The device is gone, also for the work that waits at a gate."""
        with self._lock:
            self._lose(why)
            held, self._held = self._held, []
        for gate in held:
            gate.open()

    def check(self) -> None:
        """Raises DeviceLostError where the device is gone."""
        if self.lost is not None:
            raise self.lost.at(self.lost.origin)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or DeviceLostError(
            f"device {self._device} is lost: {why}",
            advice="compile the plan for another device; this one comes back when the daemon starts anew",
        )

    def pass_(self, work: Work, abort: Abort | None = None, pieces: int = 1) -> None:
        """Called by the device before so many pieces of work; returns when it may go on."""
        self.check()
        self._meet(work, abort, pieces)
        self.check()

    def _meet(self, work: Work, abort: Abort | None, pieces: int) -> None:
        with self._lock:
            entry = self._next[work].popleft() if self._next[work] else None
            if work == "compute" and self.lost_after is not None:
                self.lost_after -= 1
                if self.lost_after < 0:
                    self._lose("it was to be lost after so many runs")
                    return
        if seconds := pieces * self.always_seconds.get(work, 0.0):
            FakeGate(seconds=seconds).wait(abort)
        if isinstance(entry, FakeGate):
            entry.wait(abort)
        elif entry is not None:
            raise entry

    def _add(self, work: Work, gate: FakeGate) -> FakeGate:
        with self._lock:
            self._next[work].append(gate)
            self._held.append(gate)
        return gate


class FakeDevice(CpuDevice):
    """One scripted device.

    Its memory is the host's. With `is_host` False nobody else may touch it, as if it were a GPU's: then its
    kernels read their own memory alone, and it brings and fetches bytes itself. With `offloads` it computes
    with weights that lie on the host, which are copied to it for each run. It pretends to be on host `site`.
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
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        assert isinstance(self.device, FakeDevice)
        self.device.script.pass_("compute", abort)
        self.device.script.pass_("nodes", abort, len(self.graph.nodes))
        super().compute(inputs, outputs, abort)


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
                f"a buffer of {size_bytes:,} bytes; {self.name} has {self.max_size:,} at most"
            )
        self.budget.take(size_bytes)
        return _FakeBuffer(self, size_bytes, usage)


class _FakeBuffer(HostBuffer):
    """A host buffer that asks the script before it is written or read. Its bytes were taken already."""

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
        self.script.check()
        super().memset(offset_bytes, size_bytes, value)

    def set_2d(self, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
        self.script.check()
        super().set_2d(offset_bytes, data, chunks)

    def get_2d(self, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
        self.script.check()
        super().get_2d(offset_bytes, out, chunks)

    def copy_from(self, source: Tensor, destination: Tensor) -> bool:
        """From host memory, and from the device's own."""
        self.script.check()
        if source.buffer.buffer_type.device is not self.buffer_type.device:
            self.script.pass_("copy")
            self.script.copied.append(source.type.nbytes)
            return super().copy_from(source, destination)
        self.reset()
        np.copyto(access.elements(destination), access.elements(source))
        return True

    def copy_to(self, source: Tensor, destination: Tensor) -> bool:
        """Where nobody else may touch its memory, it brings the bytes to the host's."""
        self.script.check()
        if self.buffer_type.is_host or not destination.buffer.buffer_type.is_host:
            return False
        access.write(destination, 0, host_bytes(np.ascontiguousarray(access.elements(source))))
        return True


class FakeBackend(Backend):
    """Scripted devices, of the shapes that tests of memory and of copies need."""

    name = "fake"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter("memory", ParameterKind.SIZE, "memory that it may use"),
        Parameter("alignment", ParameterKind.SIZE, "of its tensors: a power of two"),
        Parameter("max_size", ParameterKind.SIZE, "the most bytes of one buffer"),
        Parameter("extra", ParameterKind.COUNT, "how many more buffer types it has"),
        Parameter("host", ParameterKind.COUNT, "1: its memory is host memory to others, 0: it is not"),
        Parameter("offload", ParameterKind.COUNT, "1: it fetches weights from the host for every op"),
        Parameter("compute_ms", ParameterKind.COUNT, "how many milliseconds longer a run of a plan takes"),
        Parameter("site", ParameterKind.TEXT, "the host that it pretends to be on"),
        Parameter("fail", ParameterKind.TEXT, "it cannot start, and gives this reason"),
        Parameter("lost_after", ParameterKind.COUNT, "it is lost with the run that follows so many"),
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
    """Why there can be no such device; empty if there can."""
    if "fail" in parameters:
        return parameters["fail"] or "it was told to fail"
    alignment = parameters.get("alignment", ALIGNMENT)
    if not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        return f"alignment={alignment} is no power of two up to 1MiB"
    if parameters.get("extra", 0) > MOST_EXTRA:
        return f"extra={parameters['extra']}; there can be {MOST_EXTRA} at most"
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
