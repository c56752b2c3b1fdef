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
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from heliograph_backends.contract import (
    CONTRACT_VERSION,
    Abort,
    Backend,
    CompileOptions,
    LeafBindings,
    Parameter,
    ParameterKind,
    Plan,
    Tensor,
    Usage,
)
from heliograph_backends.cpu.device import CpuDevice
from heliograph_backends.cpu.memory import Budget, HostBuffer, HostBufferType
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.description import Capabilities, DeviceType
from heliograph_proto.errors import CancelledError, UnsupportedError
from heliograph_proto.graph import Graph

#: Kinds of work that a script can hold up.
Work: TypeAlias = Literal["allocate", "set", "get", "compile", "compute"]

#: A gate that nobody opens gives way, so that a test that failed does not hang.
GATE_SECONDS = 30.0


@dataclass(eq=False)
class Gate:
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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, deque[Gate | BaseException]] = defaultdict(deque)
        self.always_seconds: dict[str, float] = {}

    def hold(self, work: Work) -> Gate:
        """The next such work waits at the gate."""
        return self._add(work, Gate())

    def delay(self, work: Work, seconds: float) -> None:
        """Every such work takes this much longer."""
        self.always_seconds[work] = seconds

    def fail(self, work: Work, error: BaseException) -> None:
        """The next such work fails with this error."""
        with self._lock:
            self._next[work].append(error)

    def pass_(self, work: Work, abort: Abort | None = None) -> None:
        """Called by the device before the work; returns when it may go on."""
        with self._lock:
            entry = self._next[work].popleft() if self._next[work] else None
        if seconds := self.always_seconds.get(work, 0.0):
            Gate(seconds=seconds).wait(abort)
        if isinstance(entry, Gate):
            entry.wait(abort)
        elif entry is not None:
            raise entry

    def _add(self, work: Work, gate: Gate) -> Gate:
        with self._lock:
            self._next[work].append(gate)
        return gate


class FakeDevice(CpuDevice):
    """One scripted device."""

    backend = "fake"
    type = DeviceType.ACCELERATOR
    capabilities = Capabilities(async_=True, buffer_from_host=False, events=True)

    def __init__(self, name: str = "fake0", memory_bytes: int = 2**30) -> None:
        super().__init__(name, threads=1, memory_bytes=memory_bytes, native=False)
        self.script = Script()
        self.description = "scripted delays and failures"
        self._buffer_type = _FakeBufferType(self, self._budget)

    @property
    def host_buffer_type(self) -> None:
        return None

    def buffer_from_host(self, memory: memoryview) -> HostBuffer:
        raise UnsupportedError(f"device {self.name} cannot use host memory in place")

    def compile(self, graph: Graph, bindings: LeafBindings, options: CompileOptions) -> Plan:
        self.script.pass_("compile")
        return _FakePlan(self, graph, bindings, options)


class _FakePlan(CpuPlan):
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        assert isinstance(self.device, FakeDevice)
        self.device.script.pass_("compute", abort)
        super().compute(inputs, outputs, abort)


class _FakeBufferType(HostBufferType):
    def __init__(self, device: FakeDevice, budget: Budget) -> None:
        super().__init__(device, budget)
        self.script = device.script

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        self.script.pass_("allocate")
        made = super().allocate(size_bytes, usage)
        return _FakeBuffer(self, made)


class _FakeBuffer(HostBuffer):
    """A host buffer that asks the script before it is written or read."""

    def __init__(self, buffer_type: _FakeBufferType, made: HostBuffer) -> None:
        super().__init__(buffer_type, made.memory, made.usage, on_free=made.free)
        self.script = buffer_type.script

    def set(self, offset_bytes: int, data: memoryview) -> None:
        self.script.pass_("set")
        super().set(offset_bytes, data)

    def get(self, offset_bytes: int, out: memoryview) -> None:
        self.script.pass_("get")
        super().get(offset_bytes, out)


class FakeBackend(Backend):
    """Scripted devices."""

    name = "fake"
    contract_version = CONTRACT_VERSION
    parameters = (Parameter("memory", ParameterKind.SIZE, "memory that it may use"),)

    def __init__(self, parameters: Sequence[Mapping[str, int]] = ({},)) -> None:
        self._devices = tuple(
            FakeDevice(f"fake{number}", one.get("memory", 2**30)) for number, one in enumerate(parameters)
        )

    def devices(self) -> tuple[FakeDevice, ...]:
        return self._devices
