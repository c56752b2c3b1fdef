"""Backends that are wrong in one way each: the CPU's, with a defect that the conformance suite must find."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heliograph_backends.contract import (
    Abort,
    Arena,
    Buffer,
    DeviceCompileOptions,
    LeafBindings,
    Plan,
    Tensor,
)
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.arena import lender_of
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_backends.cpu.stream import CpuStream
from heliograph_backends.host_memory.buffers import HostBuffer
from heliograph_backends.reference import define_node
from heliograph_proto.errors import CancelledError, OutOfRangeError, UnsupportedError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.types import TensorType


class Intact(CpuDevice):
    """Without a defect: what the others begin with."""

    plan_type: type[CpuPlan] = CpuPlan

    def __init__(self) -> None:
        super().__init__("broken0", threads=1, memory_bytes=2**28, native=False)
        self.streams: list[CpuStream] = []

    def stream(self) -> CpuStream:
        self.streams.append(super().stream())
        return self.streams[-1]

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        return self.plan_type(self, graph, bindings, options)

    def compile_in(
        self, arena: Arena, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> Plan:
        return self.plan_type(self, graph, bindings, options, lender_of(arena))

    def close(self) -> None:
        # What the suite has abandoned, too.
        for stream in self.streams:
            stream.close()
        super().close()


def with_plan(plan: type[CpuPlan]) -> type[Intact]:
    """A device whose plans are of this kind."""
    return type(plan.__name__, (Intact,), {"plan_type": plan})


def bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """All of the tensor's buffer."""
    assert isinstance(tensor.buffer, HostBuffer)
    return tensor.buffer.memory


class Altering(CpuPlan):
    """Computes, then does something else."""

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        super().compute(inputs, outputs, abort)
        self.alter(inputs, [one for one in outputs if one is not None and one.type.size])

    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        raise AssertionError("a defect is missing")


class OffByAHundredth(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            if one.type.dtype.is_float:
                one.array[...] *= 1.01


class SpoilsWhatLiesInArenas(Altering):
    """As one that leaves something in the arena for its next run."""

    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs if self.arena_bytes else ():
            one.array[...] *= 1.01


class TakesMemoryBesideArenas(CpuPlan):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:4])
        self.arena_bytes = self.compute_bytes


class OneWrongElement(Altering):
    """The last element, as a loop that ends too early might leave it."""

    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            elements = one.array.reshape(-1)
            if elements.dtype.kind == "f":
                elements[-1] += 2 * (1 + np.abs(elements[np.isfinite(elements)]).max(initial=0))
            else:
                elements[-1] ^= elements.dtype.type(1)


class WritesBehind(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            bytes_of(one)[one.offset_bytes + one.extent_bytes] ^= 1


class WritesBefore(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            bytes_of(one)[one.offset_bytes - 1] ^= 1


class WritesGaps(Altering):
    """Writes a strided output as if its rows had no gaps."""

    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            if one.strides:
                bytes_of(one)[one.offset_bytes : one.offset_bytes + one.extent_bytes] = 0


class WritesInputs(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in inputs:
            if one.type.size:
                bytes_of(one)[one.offset_bytes] ^= 1


class WritesWeights(CpuPlan):
    """Packs a weight where it lies."""

    def __init__(
        self, device: Intact, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> None:
        super().__init__(device, graph, bindings, options)
        for one in bindings.weights.values():
            bytes_of(one)[one.offset_bytes] ^= 1


class ComputesIntegersAsFloats(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            if one.type.dtype.name == "i64":
                one.array[...] = one.array.astype(np.float64).astype(np.int64)


class GivesNaN(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            if one.type.dtype.name == "f32":
                one.array.reshape(-1)[0] = np.nan


class SwallowsNaN(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            if one.type.dtype.name == "f32":
                one.array[...] = np.nan_to_num(one.array, posinf=np.inf, neginf=-np.inf)


class TurnsInfinities(Altering):
    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for one in outputs:
            if one.type.dtype.name == "f32":
                one.array[np.isneginf(one.array)] = np.inf


class IgnoresStrides(CpuPlan):
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        plain = [Tensor(one.type, one.buffer, one.offset_bytes) for one in inputs]
        super().compute(plain, outputs, abort)


class OverwritesWhatIsKept(Altering):
    """The result takes over an operand's memory although a later node needs it."""

    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if len(outputs) > 1 and outputs[0].type == outputs[1].type:
            outputs[1].array[...] = outputs[0].array


class NotReproducible(Altering):
    """Adds in another order with every run: right, but other bits."""

    runs = 0

    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        NotReproducible.runs += 1
        for one in outputs:
            if one.type.dtype.name == "f32" and self.runs % 2:
                one.array[...] = np.nextafter(one.array, np.float32(9))


class DependsOnFusion(CpuPlan):
    def __init__(
        self, device: Intact, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> None:
        super().__init__(device, graph, bindings, options)
        self._fusion = options.fusion

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        super().compute(inputs, outputs, abort)
        for one in outputs:
            if one is not None and self._fusion and one.type.dtype.name == "f32":
                one.array[...] = np.nextafter(one.array, np.float32(9))


class LosesAssignments(CpuPlan):
    """Assigns to a copy of the variable."""

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        variables = [self.memory.tensors[slot] for slot in self._variable_slots()]
        before = [np.array(one.array) for one in variables if one is not None]
        super().compute(inputs, outputs, abort)
        for one, old in zip(filter(None, variables), before, strict=True):
            one.array[...] = old

    def _variable_slots(self) -> list[int]:
        leaves = enumerate(self.graph.leaves)
        return [self.storage.leaf_slots[v] for v, leaf in leaves if leaf.kind is LeafKind.VARIABLE]


class TakesAnyIndex(CpuPlan):
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        try:
            super().compute(inputs, outputs, abort)
        except OutOfRangeError:
            return


class HidesTheOrigin(CpuPlan):
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        try:
            super().compute(inputs, outputs, abort)
        except OutOfRangeError as error:
            raise OutOfRangeError(error.message) from None


class FailsInCompute(CpuPlan):
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        raise ZeroDivisionError("a defect of the kernel")


class NeverAborts(CpuPlan):
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        super().compute(inputs, outputs, Abort())


class RunsAfterFree(CpuPlan):
    def free(self) -> None:
        """Too late."""


class TakesAnyType(CpuPlan):
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        types = [leaf.type for leaf in self.graph.inputs]
        known = [Tensor(type, one.buffer, one.offset_bytes) for type, one in zip(types, inputs, strict=True)]
        super().compute(known, outputs, abort)


class BendsAtAHalf(Altering):
    """Two approximations do not meet: just below a half neither is right."""

    def alter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        x, y = inputs[0], outputs[0]
        if x.type == y.type and x.type.dtype.name == "f32":
            y.array[(x.array < 0.5) & (x.array > 0.5 - 2**-22)] = 0


class KeepsAborts(CpuPlan):
    """An abort that comes too late ends the next run."""

    last = Abort()

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        before, self.last = self.last, abort
        if before.is_set:
            raise CancelledError("the run was cancelled")
        super().compute(inputs, outputs, Abort())


class RunsAtOnce(CpuPlan):
    """Runs on two streams at once share intermediate results."""

    def __init__(
        self, device: Intact, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> None:
        super().__init__(device, graph, bindings, options)
        self._kernels = [define_node(graph, number) for number in range(len(graph.nodes))]
        types = [node.type for node in graph.nodes]
        self._results = [np.empty(type.storage_shape, type.dtype.storage) for type in types]

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        values = [*(one.array for one in inputs), *self._results]
        for node, kernel, result in zip(self.graph.nodes, self._kernels, self._results, strict=True):
            kernel(*(values[value] for value in node.operands), result)
        for output, tensor in zip(self.graph.outputs, outputs, strict=True):
            if tensor is not None:
                tensor.array[...] = values[output.value]


class KeepsTensors(CpuPlan):
    """Runs in the tensors of the first run for ever."""

    bound: tuple[Sequence[Tensor], Sequence[Tensor | None]] | None = None

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        self.bound = self.bound or (inputs, outputs)
        super().compute(*self.bound, abort)


class FreesBeforeItUpdates(CpuPlan):
    def update(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        self.free()
        return self.device.compile(graph, bindings, options)


class WipesWeights(CpuPlan):
    """Frees what it shares with other plans."""

    def __init__(
        self, device: Intact, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> None:
        super().__init__(device, graph, bindings, options)
        self._weights = list(bindings.weights.values())

    def free(self) -> None:
        super().free()
        for one in self._weights:
            one.array[...] = 0


class KeepsPackedWeights(Intact):
    """Packs a weight once, whatever is written there afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[tuple[int, int], Tensor] = {}
        # While they are there, no other buffer has the id of one.
        self.known: list[Buffer] = []

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        weights = {value: self._packed(one) for value, one in bindings.weights.items()}
        return super().compile(graph, LeafBindings(weights, bindings.variables), options)

    def _packed(self, tensor: Tensor) -> Tensor:
        key = id(tensor.buffer), tensor.offset_bytes
        if key not in self.packed:
            self.packed[key] = Tensor(tensor.type, self.buffer_type.allocate(tensor.type.nbytes))
            self.packed[key].array[...] = tensor.array
            self.known.append(tensor.buffer)
        return self.packed[key]


class RefusesToCompile(Intact):
    """Says that it supports an op, and raises."""

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        raise UnsupportedError("this op comes with the next release")


class HangsInCompile(Intact):
    def __init__(self) -> None:
        super().__init__()
        self.closing = threading.Event()

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        self.closing.wait(30)
        return super().compile(graph, bindings, options)

    def close(self) -> None:
        self.closing.set()
        super().close()


class LacksTwoOps(Intact):
    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return f"there is no kernel of {op}" if op in ("scale", "get_rows") else ""


class SupportsNothing(Intact):
    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return f"there is no kernel of {op}"
