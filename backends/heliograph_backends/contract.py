"""The contract between Heliograph and a backend: ggml's backend model in Python.

    Backend ── devices ──▸ Device ── buffer_type ──▸ BufferType ── allocate ──▸ Buffer
                             │ stream                                            ▲
                             │ event                                           Tensor (a placed view)
                             ▼ compile
                            Plan

Each class stands on one screen. Methods that raise nothing but have a body here are optional; what
they do when left alone is their default. Work is asynchronous by streams: `Stream.submit` queues
host code that issues device work, and reports when that work has been *computed*.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from heliograph_proto.description import Capabilities, DeviceType, Memory
from heliograph_proto.errors import DeadlineExceededError, OutOfRangeError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

#: Raised by one with every change that an older backend or an older server could not live with.
CONTRACT_VERSION = 1

#: Called once when submitted work is done, from any thread, with what it raised or None.
Done: TypeAlias = Callable[[BaseException | None], None]


class Usage(Enum):
    """What a buffer is for; a hint to backends and the scheduler."""

    ANY = "any"
    WEIGHTS = "weights"
    COMPUTE = "compute"


class Backend(ABC):
    """An implementation for one kind of hardware. Constructing it must not fail: see `why_unavailable`."""

    #: "cpu", "cuda", ...
    name: str
    contract_version: int = CONTRACT_VERSION

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

    name: str
    description: str
    type: DeviceType
    backend: str
    capabilities: Capabilities

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

    @abstractmethod
    def stream(self) -> Stream:
        """A new ordered queue of work."""

    @abstractmethod
    def compile(self, graph: Graph, bindings: LeafBindings, options: CompileOptions) -> Plan:
        """A plan for a validated graph whose ops it supports.

        Raises OutOfMemoryError, UnsupportedError.
        """

    @abstractmethod
    def supports_op(self, op: str, operands: Sequence[TensorType], result: TensorType) -> str:
        """Empty if a node like this can run here, else why not, in words."""

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """Whether kernels can read such memory in place. Default: this device's own."""
        return buffer_type.device is self

    def offload_op(self, op: str, operands: Sequence[TensorType], result: TensorType) -> bool:
        """Whether fetching host weights for such a node pays. Default: never."""
        return False

    def buffer_from_host(self, memory: memoryview) -> Buffer:
        """A buffer over memory of this process: kept alive, not copied. Default: UnsupportedError."""
        raise UnsupportedError(f"device {self.name} cannot use host memory in place")

    def event(self) -> Event:
        """A new event. Default: one made of host primitives."""
        return Event()

    def close(self) -> None:
        """Ends threads and frees what the device itself holds. Default: nothing."""


class BufferType(ABC):
    """Where and how memory is made."""

    name: str
    device: Device
    #: Of every tensor's first byte; a power of two.
    alignment: int = 64
    #: The most bytes of one buffer.
    max_size: int = 2**63 - 1
    #: Whether its bytes are plain host memory, row-major, that anybody in this process may touch.
    is_host: bool = False

    @abstractmethod
    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> Buffer:
        """A buffer; size 0 is fine. Contents are undefined. Raises OutOfMemoryError."""

    def alloc_size(self, tensor: TensorType) -> int:
        """Bytes that a tensor takes, padding included. Default: its own."""
        return tensor.nbytes


class Buffer(ABC):
    """A block of memory on a device. Offsets are checked by `Tensor`, not here."""

    buffer_type: BufferType
    size_bytes: int
    usage: Usage

    @abstractmethod
    def set(self, offset_bytes: int, data: memoryview) -> None:
        """Writes bytes."""

    @abstractmethod
    def get(self, offset_bytes: int, out: memoryview) -> None:
        """Reads bytes into `out`."""

    @abstractmethod
    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        """Fills bytes."""

    @abstractmethod
    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
        """A view as the device's array library has it (numpy.ndarray, cupy.ndarray)."""

    @abstractmethod
    def free(self) -> None:
        """Gives the memory back. Idempotent."""

    def clear(self, value: int = 0) -> None:
        """Fills the whole buffer."""
        self.memset(0, self.size_bytes, value)

    def init_tensor(self, tensor: Tensor) -> None:
        """Called when a tensor was placed here. Default: nothing."""

    def free_tensor(self, tensor: Tensor) -> None:
        """Called before a tensor that was placed here goes. Default: nothing."""

    def reset(self) -> None:
        """Drops what init_tensor attached. Default: nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor placed in a buffer: type, offset, byte strides. A view is another Tensor on the same."""

    type: TensorType
    buffer: Buffer
    offset_bytes: int = 0
    strides: tuple[int, ...] = field(default=())

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        pairs = zip(self.type.shape, self.byte_strides, self.type.strides, strict=True)
        return self.type.size == 0 or all(size == 1 or mine == plain for size, mine, plain in pairs)

    @property
    def byte_strides(self) -> tuple[int, ...]:
        return self.strides or self.type.strides

    @property
    def extent_bytes(self) -> int:
        """From its first byte to behind its last one."""
        if self.type.size == 0:
            return 0
        if self.type.dtype.block_size > 1:
            return self.type.nbytes
        reach = sum((n - 1) * step for n, step in zip(self.type.shape, self.byte_strides, strict=True))
        return reach + self.type.dtype.block_bytes

    @property
    def array(self) -> Any:
        """The view as the device's array library has it."""
        return self.buffer.array(self.type, self.offset_bytes, self.byte_strides)

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share bytes, as in a view that repeats with stride 0."""
        if self.is_contiguous:
            return False
        reach = self.type.dtype.block_bytes
        for step, size in sorted(zip(self.byte_strides, self.type.shape, strict=True)):
            if size > 1 and step < reach:
                return True
            reach += (size - 1) * step
        return False

    def view(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...] = ()) -> Tensor:
        """A part of this tensor: byte strides for every dimension, or none at all for contiguous.

        Raises OutOfRangeError if it reaches outside.
        """
        if strides and len(strides) != type.ndim:
            raise OutOfRangeError(f"a view of {type} with {len(strides)} strides for {type.ndim} dimensions")
        made = Tensor(type, self.buffer, self.offset_bytes + offset_bytes, strides)
        inside = offset_bytes >= 0 and all(step >= 0 for step in made.byte_strides)
        if not inside or offset_bytes + made.extent_bytes > self.extent_bytes:
            raise OutOfRangeError(f"a view of {type} at byte {offset_bytes} reaches outside {self.type}")
        return made

    def check_range(self, offset_bytes: int, size_bytes: int) -> None:
        """Raises OutOfRangeError unless the bytes lie inside. Python's integers cannot overflow."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.type.nbytes:
            raise OutOfRangeError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} are not within "
                f"a tensor of {self.type.nbytes} bytes ({self.type})"
            )


class Abort:
    """Asks work that runs to end early. Set from any thread; polled between nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], None]] = []
        self.is_set = False

    def set(self) -> None:
        """Asks once; later calls do nothing."""
        with self._lock:
            if self.is_set:
                return
            self.is_set = True
            for hook in self._hooks:
                hook()

    @contextmanager
    def watch(self, hook: Callable[[], None]) -> Iterator[None]:
        """Calls `hook` once if set before or during the block, never after it. The hook must not block.

        Several threads may watch at once: the splits of one run share its abort.
        """
        with self._lock:
            self._hooks.append(hook)
            if self.is_set:
                hook()
        try:
            yield
        finally:
            with self._lock:
                self._hooks.remove(hook)


class Stream(ABC):
    """An ordered queue of work on a device."""

    device: Device

    @abstractmethod
    def submit(self, work: Callable[[], None], done: Done) -> None:
        """Queues `work`, which issues device work (a plan, reads, writes) in this stream's order.

        Returns at once. `done` is called exactly once, after what `work` issued has been computed, or
        with what it raised; it must not raise. Work that was queued on a stream that is closed is done
        with CancelledError.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for the running work, ends what is queued with CancelledError, and frees the stream."""

    def synchronize(self, timeout: float) -> None:
        """Waits until everything queued so far is done. Raises DeadlineExceededError."""
        self.device.event().record(self).synchronize(timeout)


class Event:
    """A mark in a stream's order that another stream, or the host, can wait for.

    One that was never recorded counts as reached. Recording again moves the mark. This one is made of
    host primitives; a device with events of its own overrides all four methods.
    """

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()

    def record(self, stream: Stream) -> Event:
        """Marks the present end of the stream's queue."""
        mark = self._reached = threading.Event()
        stream.submit(lambda: None, lambda _error: mark.set())
        return self

    def wait(self, stream: Stream) -> None:
        """Makes the stream's later work wait for the mark, without blocking the host."""
        mark = self._reached

        def wait_for_mark() -> None:
            mark.wait()

        stream.submit(wait_for_mark, lambda _error: None)

    def synchronize(self, timeout: float) -> None:
        """Waits for the mark. Raises DeadlineExceededError."""
        if not self._reached.wait(timeout):
            raise DeadlineExceededError(f"the event was not reached within {timeout} s")

    def is_reached(self) -> bool:
        return self._reached.is_set()


@dataclass(frozen=True, slots=True)
class LeafBindings:
    """Where a graph's constant and lasting leaves lie, by value number. Inputs come with each run."""

    weights: Mapping[int, Tensor]
    variables: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How to compile; none of these changes a result."""

    fusion: bool = True


class Plan(ABC):
    """A graph compiled for a device, ready to run many times. Runs of one plan are serial."""

    graph: Graph
    #: Bytes taken for intermediate results.
    compute_bytes: int
    #: What the nodes became.
    steps: int

    @abstractmethod
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        """Runs once, from inside a stream's work. Tensors in the graph's order; None: not wanted.

        Outputs overlap neither inputs nor variables nor each other. An output that is a variable itself
        has the value that the run leaves in it. Raises CancelledError after an abort, OutOfRangeError for
        an index outside, and ComputeFailedError, with the node as origin; InvalidInputError for tensors
        of other types than the graph's; UnknownHandleError once the plan was freed.
        """

    @abstractmethod
    def free(self) -> None:
        """Gives its memory back. Idempotent; never during `compute`."""


def host_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a contiguous array, without a copy, also of an empty or zero-dimensional one."""
    return array.reshape(-1).view("u1").data
