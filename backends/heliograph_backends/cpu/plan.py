"""A graph compiled for the CPU: memory planned and bound once, then runs of steps.

    validated graph -> places -> groups -> storage -> steps

Steps are native programs (runs of f32 groups without any Python between them) and definition steps
(one NumPy call each, on arrays made once). Only what lies in a run's own inputs and outputs is bound
again with each run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph_backends.access import copy as copy_tensor
from heliograph_backends.contract import Abort, CompileOptions, LeafBindings, Plan, Tensor, Usage
from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.lowering import Lowering
from heliograph_backends.cpu.memory import HostBuffer
from heliograph_backends.cpu.storage import ARENA, CONSTANTS, Storage, plan_storage
from heliograph_backends.definition import define
from heliograph_backends.planning.fusion import Group, group_nodes
from heliograph_backends.planning.layout import place_values
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HeliographError,
    OutOfMemoryError,
)
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.ops import OPS
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph_backends.cpu.device import CpuDevice


class CpuPlan(Plan):
    """Made by `CpuDevice.compile`."""

    def __init__(
        self, device: CpuDevice, graph: Graph, bindings: LeafBindings, options: CompileOptions
    ) -> None:
        self.graph = graph
        self.device = device
        self._lock = threading.Lock()
        places = place_values(graph)
        lowering = Lowering(graph, places)
        kernels = lowering if device.native else _DefinitionOnly()
        groups = group_nodes(graph, places, kernels, fusion=options.fusion)
        self._storage = plan_storage(graph, places, groups)
        self._memory = _PlanMemory(device, graph, self._storage, bindings)
        try:
            self._steps = _Compiler(self, lowering, groups, native=device.native).steps
        except BaseException:
            self._memory.free()
            raise
        self.compute_bytes = self._memory.compute_bytes
        self.steps = sum(step.count for step in self._steps)

    def __repr__(self) -> str:
        return f"<CpuPlan of {len(self.graph.nodes)} nodes in {self.steps} steps on {self.device.name}>"

    @property
    def memory(self) -> _PlanMemory:
        return self._memory

    @property
    def storage(self) -> Storage:
        return self._storage

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        with self._lock, np.errstate(all="ignore"), abort.watch(self._request_abort):
            try:
                self._memory.bind_run(inputs, outputs)
                for step in self._steps:
                    if abort.is_set:
                        raise CancelledError("the run was cancelled")
                    step.run()
            finally:
                self._memory.unbind_run()
                for step in self._steps:
                    step.clear_abort()

    def _request_abort(self) -> None:
        for step in self._steps:
            step.abort()

    def free(self) -> None:
        with self._lock:
            self._steps = []
            self._memory.free()


class _DefinitionOnly:
    """Without numba every node is a step on the definition."""

    def role(self, number: int) -> Any:
        return "other"

    def is_row_operand(self, value: int) -> bool:
        return False


class _PlanMemory:
    """The tensors behind the slots: the plan's own, the leaves', and those of the present run."""

    def __init__(self, device: CpuDevice, graph: Graph, storage: Storage, bindings: LeafBindings) -> None:
        self.device = device
        self.graph = graph
        self.storage = storage
        self._own: list[HostBuffer] = []
        self._spares: dict[int, Tensor] = {}
        self._temporary: list[HostBuffer] = []
        count = 2 + len(graph.leaves) + len(graph.outputs)
        #: The base of each slot; None while it is bound to nothing.
        self.tensors: list[Tensor | None] = [None] * count
        #: Base addresses by slot, with those of packed weights behind them.
        self.addresses: list[int] = [0] * count
        for slot, size in ((ARENA, storage.arena_bytes), (CONSTANTS, storage.constant_bytes)):
            self._bind(slot, Tensor(_bytes_type(size), self._allocate(size)))
        for value, tensor in {**bindings.weights, **bindings.variables}.items():
            self._bind(storage.leaf_slots[value], tensor)
        inputs = [v for v, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.INPUT]
        self._input_slots = [storage.leaf_slots[value] for value in inputs]

    @property
    def compute_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self._own)

    @property
    def run_slots(self) -> frozenset[int]:
        """Slots that get other memory with each run."""
        return frozenset((*self._input_slots, *self.storage.output_slots))

    def bind_run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        for slot, tensor in zip(self._input_slots, inputs, strict=True):
            self._bind(slot, self._readable(tensor))
        for place, (slot, output) in enumerate(zip(self.storage.output_slots, outputs, strict=True)):
            self._bind(slot, output or self._spare(place))

    def unbind_run(self) -> None:
        """Lets go of the run's tensors, so that they can be freed."""
        for slot in self.run_slots:
            self.tensors[slot] = None
        for buffer in self._temporary:
            buffer.free()
        self._temporary.clear()

    def array(self, value: int) -> Any:
        """The NumPy view of a value, in the memory that is bound now."""
        slot, offset, strides = self.storage.locate(value)
        return self.slot_array(slot, self.graph.type_of(value), offset, strides)

    def slot_array(self, slot: int, type: TensorType, offset: int, strides: tuple[int, ...]) -> Any:
        base = self.tensors[slot]
        assert base is not None, "a step reads memory that nothing is bound to"
        return base.buffer.array(type, base.offset_bytes + offset, strides)

    def add_packed(self, address: int) -> int:
        """A slot for a packed weight."""
        self.addresses.append(address)
        return len(self.addresses) - 1

    def free(self) -> None:
        for buffer in (*self._own, *self._temporary):
            buffer.free()
        self._own.clear()
        self._spares.clear()

    def _bind(self, slot: int, tensor: Tensor) -> None:
        buffer = tensor.buffer
        assert isinstance(buffer, HostBuffer), "the CPU computes on host memory"
        self.tensors[slot] = tensor
        self.addresses[slot] = buffer.address + tensor.offset_bytes

    def _allocate(self, size: int) -> HostBuffer:
        buffer = self.device.buffer_type.allocate(size, Usage.COMPUTE)
        self._own.append(buffer)
        return buffer

    def _readable(self, tensor: Tensor) -> Tensor:
        """The tensor, or a contiguous copy where kernels could not read it in place."""
        aligned = tensor.offset_bytes % tensor.type.dtype.block_bytes == 0
        if isinstance(tensor.buffer, HostBuffer) and tensor.is_contiguous and aligned:
            return tensor
        buffer = self.device.buffer_type.allocate(tensor.type.nbytes, Usage.COMPUTE)
        self._temporary.append(buffer)
        plain = Tensor(tensor.type, buffer)
        copy_tensor(tensor, plain)
        return plain

    def _spare(self, place: int) -> Tensor:
        """Memory for an output that nobody wants."""
        if place not in self._spares:
            type = self.graph.type_of(self.graph.outputs[place].value)
            self._spares[place] = Tensor(type, self._allocate(type.nbytes))
        return self._spares[place]


def _bytes_type(size: int) -> TensorType:
    from heliograph_proto.types import DTYPES

    return TensorType(DTYPES["u8"], (size,))


class _Step:
    """A part of a plan that runs without returning to the plan."""

    #: How many steps of the plan it stands for.
    count = 1

    def run(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        """Asks the run in progress to end between two nodes. Default: the plan polls before each step."""

    def clear_abort(self) -> None:
        """Forgets an abort. Default: nothing to forget."""


class _NativeStep(_Step):
    """A native program, run by the device's workers."""

    def __init__(self, plan: CpuPlan, program: k.Program) -> None:
        self.count = program.steps
        self._device = plan.device
        self._memory = plan.memory
        self._bound = program.bind(plan.memory.addresses)

    def run(self) -> None:
        self._bound.rebind(self._memory.addresses)
        status = self._device.run_program(self._bound)
        if status == k.Status.ABORTED:
            raise CancelledError("the run was cancelled")
        if status != k.Status.OK:
            raise ComputeFailedError(f"native step {self._bound.failed_step} ended with {status.name}")

    def abort(self) -> None:
        self._bound.abort()

    def clear_abort(self) -> None:
        self._bound.clear_abort()


class _DefinitionStep(_Step):
    """One node on the definition. Arrays are made once, or with each run where memory changes."""

    def __init__(self, plan: CpuPlan, number: int) -> None:
        self._graph = plan.graph
        self._number = number
        node = plan.graph.nodes[number]
        kernel = define(node.op, node.attributes)
        values = (*node.operands, len(plan.graph.leaves) + number)
        memory = plan.memory
        changing = {plan.storage.locate(value)[0] for value in values} & memory.run_slots
        self._call: Callable[[], Any]
        if changing:
            self._call = lambda: kernel(*(memory.array(value) for value in values))
        else:
            self._call = partial(kernel, *(memory.array(value) for value in values))

    def run(self) -> None:
        try:
            self._call()
        except HeliographError as error:
            raise error.at(self._graph.origin(self._number)) from None
        except MemoryError:
            message = "the host's memory does not suffice for a temporary result"
            raise OutOfMemoryError(message, origin=self._graph.origin(self._number)) from None
        except Exception as error:
            origin = self._graph.origin(self._number)
            raise ComputeFailedError(f"{type(error).__name__}: {error}", origin=origin) from error


class _OutputCopy(_Step):
    """An output that is a view, a leaf, or wanted twice: copied when all is computed."""

    def __init__(self, plan: CpuPlan, place: int) -> None:
        self._memory = plan.memory
        self._value = plan.graph.outputs[place].value
        self._slot = plan.storage.output_slots[place]
        self._type = plan.graph.type_of(self._value)

    def run(self) -> None:
        target = self._memory.slot_array(self._slot, self._type, 0, self._type.strides)
        np.copyto(target, self._memory.array(self._value))


class _Compiler:
    """Turns groups into steps; consecutive groups with kernels share one native program."""

    def __init__(self, plan: CpuPlan, lowering: Lowering, groups: Sequence[Group], *, native: bool) -> None:
        self.plan = plan
        self.lowering = lowering
        self.steps: list[_Step] = []
        self._packed: dict[int, int] = {}
        self._builder: k.ProgramBuilder | None = None
        for group in groups:
            self._add(group, native)
        self._close_program()
        self.steps += [_OutputCopy(plan, place) for place in plan.storage.copied_outputs]

    def _add(self, group: Group, native: bool) -> None:
        node = self.plan.graph.nodes[group.last]
        if OPS[node.op].group == "source":
            _DefinitionStep(self.plan, group.last).run()
        elif native and self.lowering.has_kernel(group.last):
            self._builder = self._builder or k.ProgramBuilder()
            self.lowering.append(self._builder, group, self.plan.storage, self._pack)
        else:
            self._close_program()
            self.steps.append(_DefinitionStep(self.plan, group.last))

    def _close_program(self) -> None:
        builder, self._builder = self._builder, None
        if builder is None:
            return
        program = builder.build()
        if program.steps:
            self.steps.append(_NativeStep(self.plan, program))

    def _pack(self, value: int) -> int:
        """The slot of a weight's packed form, which is kept beside the weight for all plans."""
        if value not in self._packed:
            matrix = self.plan.memory.array(value)
            place = self.plan.storage.places[value]
            weight = self.plan.memory.tensors[self.plan.storage.leaf_slots[place.root]]
            assert weight is not None and isinstance(weight.buffer, HostBuffer)
            key = replace(place, root=weight.offset_bytes), matrix.shape
            packed = weight.buffer.extra(key, matrix.nbytes, partial(k.pack_weight, matrix))
            self._packed[value] = self.plan.memory.add_packed(packed.address)
        return self._packed[value]
