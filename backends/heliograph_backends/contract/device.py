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

#: Raised by one with every change that an older backend or an older server could not live with.
CONTRACT_VERSION = 2


class ParameterKind(Enum):
    """What a parameter of a backend can be."""

    COUNT = "a whole number"
    SIZE = "bytes, with a unit such as 512MiB or 2GiB"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter with which a device is made: `NAME:key=value,...`."""

    name: str
    kind: ParameterKind
    #: For people, one line.
    doc: str


class Backend(ABC):
    """An implementation for one kind of hardware, made from the parameters of each device to be.

    A plugin is such a class, found by an entry point of the group "heliograph.backends" or as `BACKEND`
    in a module or file. Constructing it must not fail: see `why_unavailable`.
    """

    #: "cpu", "cuda", ...: what names it in specifications.
    name: ClassVar[str]
    contract_version: ClassVar[int]
    #: What a specification can say.
    parameters: ClassVar[Sequence[Parameter]] = ()

    @abstractmethod
    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        """For each device to be made, its parameters: int for counts and sizes, str for text."""

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Its devices; empty when it cannot start."""

    def why_unavailable(self) -> str:
        """Why there are no devices, in words."""
        return ""

    def features(self) -> Mapping[str, str]:
        """Named facts for people, such as the instruction set."""
        return {}


class Device(ABC):
    """A processor with memory."""

    #: Unique in a registry, such as "cpu0".
    name: str
    description: str
    type: DeviceType
    #: The kind of implementation: two devices of the same kind understand each other's memory layouts.
    backend: str
    capabilities: Capabilities
    #: Where the hardware is, such as "0000:c1:00.0" on PCI; empty where it has no such place.
    id: str = ""
    #: The host that runs partitions of graphs on it by itself; None: this process does.
    site: Site | None = None

    @property
    def lost(self) -> DeviceLostError | None:
        """Why it is gone, with everything in its memory; None as long as it is there. One that is lost stays
        so: what comes back is another device. Asked often. Default: never lost."""
        return None

    @property
    def site_name(self) -> str:
        """The host that it is on, where that is not this one: devices of one site reach each other's memory
        without a network. Default: this one."""
        return ""

    @abstractmethod
    def memory(self) -> Memory:
        """Free and total bytes, now."""

    @property
    @abstractmethod
    def buffer_type(self) -> BufferType:
        """How memory is made unless somebody says otherwise."""

    @property
    def host_buffer_type(self) -> BufferType | None:
        """Host memory that this device reaches fast (pinned). Default: none."""
        return None

    @property
    def extra_buffer_types(self) -> Sequence[BufferType]:
        """Other kinds of memory, such as one that repacks weights. Default: none."""
        return ()

    @property
    def intake(self) -> Intake | None:
        """How contents come to its memory past this process, if it is another daemon's. Default: none."""
        return None

    @abstractmethod
    def stream(self) -> Stream:
        """A new ordered queue of work."""

    def finish(self) -> None:
        """From inside a stream's work: waits until what it issued so far is computed. Raises what that failed
        with. Default: it is when the call that issued it returns."""

    @abstractmethod
    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        """A plan for a validated graph whose ops it supports.

        Raises OutOfMemoryError, UnsupportedError.
        """

    def arena(self, block_bytes: Sequence[int]) -> Arena:
        """Memory in which plans can lie, in blocks of so many bytes; contents are undefined.

        Raises OutOfMemoryError. Default: UnsupportedError; then no estimate of this device names blocks.
        """
        raise UnsupportedError(f"plans of device {self.name} take memory of their own")

    def compile_in(
        self, arena: Arena, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> Plan:
        """As `compile`, for a plan whose intermediate results lie in an arena of this device as far as they
        fit there: see `Plan.arena_bytes`. Default: they do not."""
        return self.compile(graph, bindings, options)

    @abstractmethod
    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        """Empty if a node like this can run here, else why not, in words. Attributes are complete."""

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """Whether kernels can read such memory in place. Default: this device's own."""
        return buffer_type.device is self

    def offload_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> bool:
        """Whether fetching host weights for such a node pays. Default: never."""
        return False

    def op_path(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> OpPath:
        """How it computes such a node, which it can run. Default: it does not tell."""
        return OpPath.UNKNOWN

    def estimate(self, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
        """What compiling would take, without taking it. Default: UnsupportedError."""
        raise UnsupportedError(f"device {self.name} cannot tell what a plan takes before it is compiled")

    def optimize(self, graph: Graph) -> Sequence[int]:
        """The order in which the nodes of a graph had best run, before it is compiled: every node once, each
        behind its operands, reads and assignments of a variable as before. Default: as they are."""
        return range(len(graph.nodes))

    def buffer_from_host(self, memory: memoryview) -> Buffer:
        """A buffer over memory of this process: kept alive, not copied. Default: UnsupportedError."""
        raise UnsupportedError(f"device {self.name} cannot use host memory in place")

    def event(self) -> Event:
        """A new event. Default: one made of host primitives."""
        return Event()

    def set_threads(self, count: int) -> None:
        """How many threads it computes with from now on, once it is idle. Default: UnsupportedError."""
        raise UnsupportedError(f"device {self.name} has no threads that can be counted")

    def features(self) -> Mapping[str, str]:
        """Named facts for people and programs, such as the instruction set. Default: none."""
        return {}

    def why_missing(self) -> Mapping[str, str]:
        """Optional parts that this machine does not offer, by name, and why. Default: none."""
        return {}

    def close(self) -> None:
        """Ends threads and frees what the device itself holds. Default: nothing."""
