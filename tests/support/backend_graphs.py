"""Graphs in a few words, and runs of them on a device, for the tests of the backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.contract import (
    Abort,
    Arena,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    Plan,
    Tensor,
    Usage,
    access,
    host_bytes,
)
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.devices import OpPath
from heliograph_proto.digests import DIGEST_BYTES
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output, validate
from heliograph_proto.ops.table import infer
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, dtype

Array: TypeAlias = np.ndarray[Any, Any]

GUARD_BYTES = 64
GUARD = 0xA5


def type_of(array: Array, stored: str = "") -> TensorType:
    """The tensor type of an array; `stored`: the data type whose bits or blocks the array holds."""
    found = dtype(stored or array.dtype)
    if found.kind != "quantized":
        return TensorType(found, array.shape)
    return TensorType(found, (*array.shape[:-1], array.shape[-1] // found.block_bytes * found.block_size))


@dataclass
class Maker:
    """Collects leaves (with their data) and nodes; `graph` numbers them. Node j is value -1 - j here."""

    leaves: list[Leaf] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    nodes: list[tuple[str, tuple[int, ...], dict[str, Any], TensorType]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def leaf(self, kind: LeafKind, array: Array, stored: str = "") -> int:
        digest = bytes(DIGEST_BYTES) if kind is LeafKind.WEIGHT else b""
        self.leaves.append(Leaf(kind, f"{kind.value}{len(self.leaves)}", type_of(array, stored), digest))
        self.arrays.append(array)
        return len(self.leaves) - 1

    def input(self, array: Array, stored: str = "") -> int:
        return self.leaf(LeafKind.INPUT, array, stored)

    def weight(self, array: Array, stored: str = "") -> int:
        return self.leaf(LeafKind.WEIGHT, array, stored)

    def variable(self, array: Array, stored: str = "") -> int:
        return self.leaf(LeafKind.VARIABLE, array, stored)

    def type(self, value: int) -> TensorType:
        return self.leaves[value].type if value >= 0 else self.nodes[-1 - value][3]

    def node(self, op: str, *operands: int, **attributes: Any) -> int:
        result, _ = infer(op, [self.type(value) for value in operands], attributes)
        self.nodes.append((op, operands, attributes, result))
        return -len(self.nodes)

    def output(self, *values: int) -> None:
        self.outputs.extend(values)

    def number(self, value: int) -> int:
        return value if value >= 0 else len(self.leaves) - 1 - value

    def graph(self) -> Graph:
        nodes = tuple(
            Node(op, tuple(map(self.number, operands)), result, attributes, f"node{place}")
            for place, (op, operands, attributes, result) in enumerate(self.nodes)
        )
        outputs = tuple(Output(f"y{place}", self.number(v)) for place, v in enumerate(self.outputs))
        return validate(Graph(tuple(self.leaves), nodes, outputs), Limits())


def place(device: Device, array: Array, type: TensorType | None = None) -> Tensor:
    """A tensor with the array's elements, between guard bytes."""
    type = type or type_of(array)
    buffer = device.buffer_type.allocate(type.nbytes + 2 * GUARD_BYTES)
    buffer.clear(GUARD)
    tensor = Tensor(type, buffer, GUARD_BYTES)
    data = np.ascontiguousarray(array, type.dtype.storage)
    assert data.nbytes == type.nbytes
    if data.nbytes:
        buffer.set(GUARD_BYTES, host_bytes(data))
    return tensor


def place_weight(device: Device, array: Array, type: TensorType | None = None) -> Tensor:
    """A tensor with the array's elements that fills a buffer for weights."""
    type = type or type_of(array)
    tensor = Tensor(type, device.buffer_type.allocate(type.nbytes, Usage.WEIGHTS))
    tensor.buffer.set(0, host_bytes(np.ascontiguousarray(array, type.dtype.storage)))
    return tensor


def remove(tensor: Tensor) -> Array:
    """A copy of a tensor's elements; checks its guard bytes, if any, and frees its memory."""
    type = tensor.type
    found = np.frombuffer(access.read_whole(tensor), type.dtype.storage).reshape(type.storage_shape)
    size = tensor.buffer.size_bytes
    for offset in (0, size - GUARD_BYTES) if tensor.offset_bytes else ():
        guard = bytearray(GUARD_BYTES)
        tensor.buffer.get(offset, memoryview(guard))
        assert guard == bytes([GUARD]) * GUARD_BYTES, "somebody wrote outside of a tensor"
    tensor.buffer.free()
    return found


class Loaded:
    """A graph compiled on a device with its leaves in memory."""

    def __init__(
        self,
        device: Device,
        made: Maker,
        *,
        fusion: bool = True,
        arena: Arena | None = None,
        weights: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Compile a graph; `weights` are those that lie in memory already."""
        self.device = device
        self.graph = made.graph()
        weights = weights or {}
        self.tensors = [
            weights[value]
            if value in weights
            else (place_weight if leaf.kind is LeafKind.WEIGHT else place)(device, array, leaf.type)
            for value, (array, leaf) in enumerate(zip(made.arrays, made.leaves, strict=True))
        ]
        bindings = LeafBindings(self._of(LeafKind.WEIGHT), self._of(LeafKind.VARIABLE))
        options = DeviceCompileOptions(fusion=fusion)
        self.plan: Plan = (
            device.compile(self.graph, bindings, options)
            if arena is None
            else device.compile_in(arena, self.graph, bindings, options)
        )

    def _of(self, kind: LeafKind) -> Mapping[int, Tensor]:
        return {v: self.tensors[v] for v, leaf in enumerate(self.graph.leaves) if leaf.kind is kind}

    @property
    def inputs(self) -> list[Tensor]:
        return list(self._of(LeafKind.INPUT).values())

    def run(self, abort: Abort | None = None, *, wanted: Sequence[bool] | None = None) -> list[Array | None]:
        """One run; the outputs, None for those not wanted."""
        types = [self.graph.type_of(output.value) for output in self.graph.outputs]
        chosen = [True] * len(types) if wanted is None else wanted
        outputs = [
            place(self.device, np.zeros(type.storage_shape, type.dtype.storage), type) if wants else None
            for type, wants in zip(types, chosen, strict=True)
        ]
        try:
            self.plan.compute(self.inputs, outputs, abort or Abort())
        finally:
            found = [None if tensor is None else remove(tensor) for tensor in outputs]
        return found

    def free(self) -> list[Array]:
        """Frees all; what the leaves held at last."""
        self.plan.free()
        return [remove(tensor) for tensor in self.tensors]


@contextmanager
def loaded(device: Device, made: Maker, *, fusion: bool = True) -> Iterator[Loaded]:
    """A graph on a device; freed afterwards, and inputs and weights must be what they were."""
    it = Loaded(device, made, fusion=fusion)
    try:
        yield it
    finally:
        after = it.free()
    for leaf, array, now in zip(made.leaves, made.arrays, after, strict=True):
        if leaf.kind is not LeafKind.VARIABLE:
            assert same_bits(array, now), f"a run wrote to {leaf.kind.value} {leaf.name}"


def run(device: Device, made: Maker, *, fusion: bool = True) -> list[Array]:
    """The outputs of one run."""
    with loaded(device, made, fusion=fusion) as it:
        return [array for array in it.run() if array is not None]


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays have the same type, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def normalised_error(found: Array, expected: Array) -> float:
    """Sum of squared differences over the sum of squares, in float64, of the finite elements."""
    finite = np.isfinite(expected)
    reference = expected[finite].astype(np.float64)
    difference = found[finite].astype(np.float64) - reference
    scale = float((reference * reference).sum())
    return float((difference * difference).sum()) / (scale or 1.0)


def used_bytes(device: Device) -> int:
    """Bytes that are taken on a device."""
    memory = device.memory()
    return memory.total_bytes - memory.free_bytes


@contextmanager
def nothing_left(device: CpuDevice) -> Iterator[CpuDevice]:
    """The device, closed afterwards, when its budget must be untouched."""
    try:
        yield device
        assert used_bytes(device) == 0, f"{used_bytes(device):,} bytes are left"
    finally:
        device.close()


def op_path(device: Device, made: Maker) -> OpPath:
    """What a device says of the node."""
    graph = made.graph()
    (node,) = graph.nodes
    return device.op_path(node.op, node.attributes, graph.origin(0).operands, node.type)
