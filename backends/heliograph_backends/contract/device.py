"""Backends and their devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from heliograph_backends.contract.memory import Buffer, BufferType
from heliograph_backends.contract.stream import Event, Stream
from heliograph_proto.devices import Capabilities, DeviceType, Memory, OpPath
from heliograph_proto.errors import DeviceLostError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph_backends.contract.plan import (
        Arena,
        DeviceCompileOptions,
        LeafBindings,
        MemoryEstimate,
        Plan,
    )
    from heliograph_backends.contract.remote import Intake, Site

#: Incremented with every change that is incompatible with older backends or servers.
CONTRACT_VERSION = 2


class ParameterKind(Enum):
    """The kind of a backend's parameter."""

    COUNT = "a whole number"
    SIZE = "bytes, with a unit such as 512MiB or 2GiB"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a device: `NAME:key=value,...`."""

    name: str
    kind: ParameterKind
    #: A description in one line.
    doc: str


class Backend(ABC):
    """An implementation for one kind of hardware, constructed with the parameters of each device to
    create.

    A plugin is such a class, found by an entry point of the group "heliograph.backends" or as
    `BACKEND` in a module or file. The constructor must not raise; see `why_unavailable`.
    """

    #: Its name in specifications, such as "cpu".
    name: ClassVar[str]
    #: CONTRACT_VERSION of the contract that it was written for; a registry refuses other versions.
    contract_version: ClassVar[int]
    #: The parameters that a specification may give.
    parameters: ClassVar[Sequence[Parameter]] = ()

    @abstractmethod
    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        """Take the parameters of each device to create: int for counts and sizes, str for text."""

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Return its devices; empty if it cannot start."""

    def why_unavailable(self) -> str:
        """Return the reason why there are no devices."""
        return ""

    def features(self) -> Mapping[str, str]:
        """Return named facts for people, such as the instruction set."""
        return {}


class Device(ABC):
    """A processor with memory. The first five attributes are required.

    Methods may be called from any thread.
    """

    #: Unique in a registry, such as "cpu0": the backend's name and a number.
    name: str
    #: The hardware in a few words, for people, such as "AMD EPYC, 8 threads".
    description: str
    #: The kind of hardware, which decides the best device: the first GPU, else the first integrated
    #: GPU, else the first CPU. An accelerator takes over nodes from devices whose memory it reads
    #: in place.
    type: DeviceType
    #: The implementation: devices of the same backend understand each other's memory layouts.
    backend: str
    #: The optional parts that it has, such as `buffer_from_host`; they are reported to clients.
    capabilities: Capabilities
    #: The bus address of the hardware, such as "0000:c1:00.0" on PCI; empty if it has none.
    id: str = ""
    #: The host that runs partitions of graphs on it; None: this process does.
    site: Site | None = None

    @property
    def lost(self) -> DeviceLostError | None:
        """The reason why it is lost, with everything in its memory; None unless it is.

        A lost device stays lost: a recovered one is another device. Called often. Default: never
        lost.
        """
        return None

    @property
    def is_draining(self) -> bool:
        """True while its host drains: new plans avoid it. Default: False."""
        return False

    @property
    def site_name(self) -> str:
        """The name of its host; empty for this one.

        Devices of one site reach each other's memory without a network. Default: empty.
        """
        return ""

    @abstractmethod
    def memory(self) -> Memory:
        """Return the current free and total bytes."""

    @property
    @abstractmethod
    def buffer_type(self) -> BufferType:
        """The default buffer type."""

    @property
    def host_buffer_type(self) -> BufferType | None:
        """The type of host memory with fast access (pinned). Default: none."""
        return None

    @property
    def extra_buffer_types(self) -> Sequence[BufferType]:
        """Further buffer types, such as one that repacks weights. Default: none."""
        return ()

    @property
    def intake(self) -> Intake | None:
        """The direct path for contents to another daemon's device. Default: none."""
        return None

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new ordered queue of work."""

    def finish(self) -> None:
        """Wait, inside a stream's work, until all work issued so far is computed.

        Raises the error of that work. Default: returns at once; issued work is computed when its
        call returns.
        """

    @abstractmethod
    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        """Return a plan for a validated graph whose ops it supports.

        Raises OutOfMemoryError, UnsupportedError.
        """

    def arena(self, block_bytes: Sequence[int]) -> Arena:
        """Return memory for plans, in blocks of these sizes; contents are undefined.

        Raises OutOfMemoryError. Default: UnsupportedError; estimates of the device then have no
        arena blocks.
        """
        raise UnsupportedError(f"plans of device {self.name} take memory of their own")

    def compile_in(
        self, arena: Arena, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> Plan:
        """Compile a plan whose intermediate results lie in an arena of this device as far as they
        fit.

        See `Plan.arena_bytes`. Default: `compile`, without the arena.
        """
        return self.compile(graph, bindings, options)

    @abstractmethod
    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        """Return why a node with complete attributes cannot run here; empty if it can."""

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """True if kernels can read this memory in place. Default: only this device's own."""
        return buffer_type.device is self

    def offload_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> bool:
        """True if a node is worth fetching its weights from the host. Default: never."""
        return False

    def op_path(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> OpPath:
        """Return the op path of a node that the device can run. Default: unknown."""
        return OpPath.UNKNOWN

    def estimate(self, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
        """Return the memory that compiling would take. Default: UnsupportedError."""
        raise UnsupportedError(f"device {self.name} cannot estimate the memory of a plan before compiling it")

    def optimize(self, graph: Graph) -> Sequence[int]:
        """Return the best order of a graph's nodes, before it is compiled.

        It has every node once, after its operands, and keeps the order of reads and assignments of
        each variable. Default: unchanged.
        """
        return range(len(graph.nodes))

    def buffer_from_host(self, memory: memoryview) -> Buffer:
        """Return a buffer over memory of this process, not copied. Default: UnsupportedError."""
        raise UnsupportedError(f"device {self.name} cannot use host memory in place")

    def event(self) -> Event:
        """Return a new event. Default: one built from host primitives."""
        return Event()

    def set_threads(self, count: int) -> None:
        """Set the number of compute threads, effective once idle. Default: UnsupportedError."""
        raise UnsupportedError(f"device {self.name} has no configurable number of threads")

    def features(self) -> Mapping[str, str]:
        """Return named facts, such as the instruction set. Default: none."""
        return {}

    def why_missing(self) -> Mapping[str, str]:
        """Return optional parts that this machine lacks, with reasons. Default: none."""
        return {}

    def close(self) -> None:
        """End threads and free the device's own resources. Default: nothing."""
