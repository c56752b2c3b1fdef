"""A backend from scratch: a device that computes some ops with NumPy in host memory.

heliograph conformance --backend examples/backend.py --device numpy
heliograph serve --backend examples/backend.py --device numpy --device cpu:threads=1,memory=1GiB
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.contract import (
    CONTRACT_VERSION,
    Abort,
    Backend,
    Buffer,
    BufferType,
    Device,
    DeviceCompileOptions,
    Done,
    LeafBindings,
    MemoryEstimate,
    Parameter,
    ParameterKind,
    Plan,
    Stream,
    Tensor,
    Usage,
)
from heliograph_backends.contract.stream import report_done
from heliograph_backends.host_memory.buffers import MemoryBudget, aligned_bytes
from heliograph_proto.devices import Capabilities, DeviceType, Memory
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HeliographError,
    InvalidInputError,
    OutOfRangeError,
    UnknownHandleError,
)
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.types import TensorType

Array: TypeAlias = Any  # numpy.ndarray

# Memory


class NumpyBuffer(Buffer):
    """A block of host memory. A buffer reads and writes bytes; tensors know types and offsets."""

    buffer_type: NumpyBufferType

    def __init__(self, buffer_type: NumpyBufferType, size_bytes: int, usage: Usage) -> None:
        self.buffer_type, self.size_bytes, self.usage = buffer_type, size_bytes, usage
        self._bytes: Array = aligned_bytes(size_bytes)
        self._freed = False

    def set(self, offset_bytes: int, data: memoryview) -> None:
        if data.nbytes:
            self._bytes[offset_bytes : offset_bytes + data.nbytes] = np.frombuffer(data, np.uint8)

    def get(self, offset_bytes: int, out: memoryview) -> None:
        if out.nbytes:
            np.frombuffer(out, np.uint8)[:] = self._bytes[offset_bytes : offset_bytes + out.nbytes]

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        self._bytes[offset_bytes : offset_bytes + size_bytes] = value

    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Array:
        # A row of a block type such as q4_0 is an array of bytes, its last axis.
        steps = strides if type.dtype.block_size == 1 else (*strides[:-1], 1)
        return np.ndarray(type.storage_shape, type.dtype.storage, self._bytes, offset_bytes, steps)

    def free(self) -> None:
        if not self._freed:  # may be called again
            self._freed, self._bytes = True, aligned_bytes(0)
            self.buffer_type.budget.give(self.size_bytes)


class NumpyBufferType(BufferType):
    """Host memory, counted against the device's budget."""

    is_host = True

    def __init__(self, device: Device, budget: MemoryBudget) -> None:
        self.name, self.device, self.budget = device.name, device, budget

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> NumpyBuffer:
        self.budget.take(size_bytes)  # raises OutOfMemoryError
        try:
            return NumpyBuffer(self, size_bytes, usage)
        except BaseException:
            self.budget.give(size_bytes)
            raise


# Streams


class NumpyStream(Stream):
    """A thread that does its work in order. NumPy has computed a result when its call returns, so
    `done` is called right after the work."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._queue: deque[tuple[Callable[[], None], Done]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=f"{device.name}-stream", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None], done: Done) -> None:
        with self._changed:
            if not self._closed:
                self._queue.append((work, done))
                self._changed.notify()
                return
        report_done(done, CancelledError("the stream is closed"))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            queued, self._queue = self._queue, deque()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for _, done in queued:
            report_done(done, CancelledError("the stream was closed"))

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                work, done = self._queue.popleft()
            failure: BaseException | None = None
            try:
                work()
            except BaseException as error:  # any error belongs to the submitter of the work
                failure = error
            report_done(done, failure)
            del work, done, failure  # an idle stream keeps nothing alive


# Ops: functions of the attributes and the operands. `heliograph_backends.reference` defines all.


def get_rows(_: Mapping[str, Any], rows: Array, indices: Array) -> Array:
    if indices.size and not 0 <= indices.min() <= indices.max() < len(rows):
        raise OutOfRangeError(f"an index is not in the range of {len(rows)} rows")
    return rows[indices]


def soft_max(attributes: Mapping[str, Any], x: Array) -> Array:
    scaled = x * x.dtype.type(attributes["scale"])
    powers = np.exp(scaled - scaled.max(-1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(-1, keepdims=True)


FLOATS = frozenset({"f32", "f64"})
NUMBERS = FLOATS | {"i32", "i64"}
#: Each op's function, and the data types of its operands and result.
OPS: dict[str, tuple[Callable[..., Array], frozenset[str]]] = {
    "fill": (lambda a: np.full(a["shape"], a["value"]), NUMBERS),
    "neg": (lambda _, x: -x, NUMBERS),
    "sgn": (lambda _, x: np.sign(x), NUMBERS),
    "exp": (lambda _, x: np.exp(x), FLOATS),
    "sin": (lambda _, x: np.sin(x), FLOATS),
    "relu": (lambda _, x: np.maximum(x, 0), FLOATS),
    "scale": (lambda a, x: x * x.dtype.type(a["scale"]) + x.dtype.type(a["bias"]), FLOATS),
    "add": (lambda _, x, y: x + y, NUMBERS),
    "sub": (lambda _, x, y: x - y, NUMBERS),
    "mul": (lambda _, x, y: x * y, NUMBERS),
    "div": (lambda _, x, y: x / y, FLOATS),
    "matmul": (lambda _, x, y: np.matmul(x, y), FLOATS),
    "soft_max": (soft_max, FLOATS),
    "reduce_sum": (lambda a, x: x.sum(a["axes"] or None, keepdims=a["keepdims"]), NUMBERS),
    "get_rows": (get_rows, NUMBERS),
    "assign": (lambda _, variable, value: value, NUMBERS),
    "cont": (lambda _, x: x, NUMBERS),
    "reshape": (lambda a, x: x.reshape(a["shape"]), NUMBERS),
    "permute": (lambda a, x: x.transpose(a["axes"]), NUMBERS),
    "broadcast_to": (lambda a, x: np.broadcast_to(x, a["shape"]), NUMBERS),
    "slice": (lambda a, x: x[tuple(map(slice, a["start"], a["stop"], a["step"]))], NUMBERS),
}
#: Ops whose result NumPy gives as a view of the operand's memory, always.
VIEWS = frozenset({"permute", "broadcast_to", "slice"})

# Plans


def stored_values(graph: Graph) -> list[int]:
    """Return the numbers of the values that take memory: the nodes' except views."""
    # A view sees a later assignment to its variable, but must keep the old value: it is copied.
    assigns = any(node.op == "assign" for node in graph.nodes)
    nodes = enumerate(graph.nodes, start=len(graph.leaves))  # values: the leaves, then the nodes
    return [value for value, node in nodes if assigns or node.op not in VIEWS]


class NumpyPlan(Plan):
    """The nodes in their order, each with a place for its result."""

    def __init__(self, device: NumpyDevice, graph: Graph, bindings: LeafBindings) -> None:
        self.device, self.graph = device, graph
        self._bound = {**bindings.weights, **bindings.variables}
        leaves = enumerate(graph.leaves)
        self._inputs = [value for value, leaf in leaves if leaf.kind is LeafKind.INPUT]
        stored = stored_values(graph)
        types = [graph.type_of(value) for value in stored]
        self._memory, places = device.buffer_type.allocate_tensors(types, Usage.COMPUTE)
        self._places = dict(zip(stored, places, strict=True))
        self.compute_bytes, self.steps = self._memory.size_bytes, len(graph.nodes)
        self._freed = False
        # Streams may run one plan at once, but its intermediate results have one place each.
        self._running = threading.Lock()

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        with self._running:
            if self._freed:
                raise UnknownHandleError("the plan was freed")
            self._check(inputs, self._inputs)
            self._check(outputs, [output.value for output in self.graph.outputs])
            values = {value: tensor.array for value, tensor in self._bound.items()}
            values |= {value: one.array for value, one in zip(self._inputs, inputs, strict=True)}
            for number in range(len(self.graph.nodes)):
                if abort.is_set:
                    raise CancelledError("the run was cancelled")
                self._compute_node(number, values)
            for output, tensor in zip(self.graph.outputs, outputs, strict=True):
                if tensor is not None:
                    tensor.array[...] = values[output.value]

    def _check(self, tensors: Sequence[Tensor | None], values: Sequence[int]) -> None:
        types = [self.graph.type_of(value) for value in values]
        given = [due if one is None else one.type for one, due in zip(tensors, types, strict=True)]
        if given != types:
            raise InvalidInputError(f"tensors of {given} for a graph of {types}")

    def _compute_node(self, number: int, values: dict[int, Array]) -> None:
        node, value = self.graph.nodes[number], len(self.graph.leaves) + number
        function, _ = OPS[node.op]
        try:
            with np.errstate(all="ignore"):  # infinities and NaN are results
                found = function(node.attributes, *(values[one] for one in node.operands))
                if value in self._places:
                    place = self._places[value].array
                    place[...] = found
                    found = place
            if node.op == "assign":
                values[node.operands[0]][...] = found
        except HeliographError as error:
            raise error.at(self.graph.origin(number)) from None
        except Exception as error:
            raise ComputeFailedError(str(error), origin=self.graph.origin(number)) from error
        values[value] = found

    def free(self) -> None:
        self._freed = True
        self._places = {}
        self._memory.free()


# The device and its backend


class NumpyDevice(Device):
    backend = "numpy"
    description = "NumPy in host memory"
    type = DeviceType.ACCELERATOR
    capabilities = Capabilities()  # nothing special

    def __init__(self, name: str = "numpy0", memory_bytes: int = 2**30) -> None:
        self.name = name
        self._budget = MemoryBudget(name, memory_bytes, self.backend)
        self._buffer_type = NumpyBufferType(self, self._budget)

    @property
    def buffer_type(self) -> BufferType:
        return self._buffer_type

    def memory(self) -> Memory:
        return Memory(self._budget.free_bytes, self._budget.total_bytes)

    def stream(self) -> Stream:
        return NumpyStream(self)

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        return buffer_type.is_host  # NumPy reads any of it in place

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        if op not in OPS:
            return f"numpy has no {op}"
        given = {one.dtype.name for one in (*operands, result)}
        if not given <= OPS[op][1]:
            return f"numpy has no {op} of {', '.join(sorted(given))}"
        if op == "get_rows" and operands[0].ndim != 2:
            return "numpy has get_rows of matrices only"
        if op == "soft_max" and (len(operands) > 1 or attributes["max_bias"]):
            return "numpy has no masks in soft_max"
        return ""

    def estimate(self, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
        types = [graph.type_of(value) for value in stored_values(graph)]
        return MemoryEstimate(self.buffer_type.place(types).buffer_bytes)

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        return NumpyPlan(self, graph, bindings)  # every op is supported: the caller has checked


class NumpyBackend(Backend):
    name = "numpy"
    contract_version = CONTRACT_VERSION
    parameters = (Parameter("memory", ParameterKind.SIZE, "memory of the device"),)

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        # One mapping for each `--device numpy:memory=...`.
        self._devices = [
            NumpyDevice(f"numpy{number}", given.get("memory", 2**30))
            for number, given in enumerate(parameters)
        ]

    def devices(self) -> Sequence[Device]:
        return self._devices


BACKEND = NumpyBackend  # the name that a plugin must define
