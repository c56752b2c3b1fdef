"""The memory behind a plan's slots on a GPU: its own, the leaves', and that of the present run.

Small inputs and outputs have fixed places, to and from which a run copies them, so that a recording
can be replayed. Large ones are read and written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from heliograph_backends.contract import LeafBindings, Tensor, access
from heliograph_backends.contract.plan_blocks import PlanBlocks
from heliograph_backends.cuda.lowering.target import FAILURE_TYPE, OwnSlots
from heliograph_backends.cuda.memory import address_of, can_reach, owner_of
from heliograph_backends.planning.storage import StorageLayout
from heliograph_proto.errors import InvalidInputError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.types import DTYPES, TensorType

if TYPE_CHECKING:
    from heliograph_backends.cuda.device import CudaDevice

#: Inputs and outputs of up to this size together have fixed places: at 4 TB/s they are copied in 16
#: us.
MOST_FIXED_BYTES = 32 * 2**20


def fixed_bytes(graph: Graph) -> tuple[int, ...]:
    """Return the size of each buffer for an input or output in a fixed place; empty if they are too
    large."""
    sizes = [type.nbytes for type in _run_types(graph)]
    return tuple(sizes) if sum(sizes) <= MOST_FIXED_BYTES else ()


def _run_types(graph: Graph) -> list[TensorType]:
    outputs = (graph.type_of(output.value) for output in graph.outputs)
    return [*(leaf.type for leaf in graph.of_kind(LeafKind.INPUT)), *outputs]


class CudaPlanMemory:
    """Addresses by slot. Inputs and outputs have the run's addresses, unless they have fixed
    places."""

    def __init__(
        self,
        device: CudaDevice,
        graph: Graph,
        storage: StorageLayout,
        bindings: LeafBindings,
        workspace_bytes: int = 0,
    ) -> None:
        """Allocate and bind the plan's memory. Raises OutOfMemoryError, InvalidInputError."""
        self.device = device
        self.graph = graph
        self.storage = storage
        self.own_slots = OwnSlots(storage.slots, storage.slots + 1)
        count = storage.slots + len(self.own_slots)
        self.addresses = [0] * count
        self._owners: list[Any] = [None] * count
        #: Memory for intermediate results, and for inputs and outputs in fixed places.
        self.own = PlanBlocks(device.buffer_type)
        self._fixed: list[Tensor] = []
        inputs = [value for value, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.INPUT]
        self.input_slots = tuple(storage.leaf_slots[value] for value in inputs)
        self.run_slots = frozenset((*self.input_slots, *storage.output_slots))
        self.is_fixed = bool(fixed_bytes(graph)) or not self.run_slots
        self._types = _run_types(graph)
        self._written = [bindings.variables[value] for value in storage.written]
        try:
            self._bind_lasting(bindings)
            if workspace_bytes:
                workspace = self._allocate(TensorType(DTYPES["u8"], (workspace_bytes,)))
                self._bind(self.own_slots.workspace, workspace)
        except BaseException:
            self.free()
            raise

    def array(self, value: int) -> Any:
        """Return the view of a value in the array library, in the memory that is bound now."""
        slot, offset, strides = self.storage.locate(value)
        return self.at(self.graph.type_of(value), slot, offset, strides)

    def at(self, type: TensorType, slot: int, offset: int, strides: tuple[int, ...]) -> Any:
        """Return a view of the memory at an offset of a slot."""
        return self.device.array(type, self.addresses[slot] + offset, strides, self._owners[slot])

    def slot_of(self, value: int) -> int:
        """Return the slot of a value."""
        return self.storage.locate(value)[0]

    def free(self) -> None:
        """Give the plan's own memory back. Idempotent."""
        self.unbind_run()
        self.own.free()
        self._fixed.clear()
        self._owners = [None] * len(self._owners)

    # With each run

    def bind_run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        """Bind a run's tensors. Raises InvalidInputError, OutOfMemoryError."""
        self._check(inputs, outputs)
        if self.is_fixed:
            for source, target in zip(inputs, self._fixed, strict=False):
                access.copy(source, target)
            given = zip(self._fixed[len(inputs) :], outputs, strict=True)
            self.own.late += [(source, output) for source, output in given if output is not None]
            return
        for slot, tensor in zip(self.input_slots, inputs, strict=True):
            self._bind(slot, self._readable(tensor))
        for place, (slot, output) in enumerate(zip(self.storage.output_slots, outputs, strict=True)):
            self._bind(slot, self._target(place, output))

    def unbind_run(self) -> None:
        """Release the run's tensors, so that they can be freed."""
        self.own.end_run()
        if not self.is_fixed:
            for slot in self.run_slots:
                self.addresses[slot], self._owners[slot] = 0, None

    # Parts

    def _check(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        """Check the types of a run's tensors: kernels trust addresses."""
        for tensor, expected in zip((*inputs, *outputs), self._types, strict=True):
            if tensor is not None and tensor.type != expected:
                raise InvalidInputError(f"a tensor of {tensor.type} where the plan has {expected}")

    def _bind_lasting(self, bindings: LeafBindings) -> None:
        for number, size in enumerate(self.storage.own_bytes):
            self._bind(self.storage.arena_slot + number, self._allocate(TensorType(DTYPES["u8"], (size,))))
        self._bind(self.own_slots.report, self._allocate(FAILURE_TYPE))
        if self.is_fixed:
            slots = (*self.input_slots, *self.storage.output_slots)
            for slot, type in zip(slots, _run_types(self.graph), strict=True):
                self._fixed.append(self._allocate(type))
                self._bind(slot, self._fixed[-1])
        for value, tensor in {**bindings.weights, **bindings.variables}.items():
            if tensor.type != self.graph.type_of(value) or not self._can_use(tensor):
                raise InvalidInputError(
                    f"leaf {value} lies with gaps, unaligned, or where the device cannot reach it"
                )
            self._bind(self.storage.leaf_slots[value], tensor)

    def _bind(self, slot: int, tensor: Tensor) -> None:
        buffer = tensor.buffer
        if tensor.offset_bytes + tensor.type.nbytes > buffer.size_bytes:
            raise InvalidInputError(f"a tensor of {tensor.type} reaches outside {buffer!r}")
        self.addresses[slot] = address_of(tensor)
        self._owners[slot] = owner_of(tensor)

    def _can_use(self, tensor: Tensor) -> bool:
        alignment = tensor.type.dtype.itemsize or 2
        in_place = can_reach(tensor, self.device) and tensor.is_contiguous
        return in_place and address_of(tensor) % alignment == 0

    def _allocate(self, type: TensorType) -> Tensor:
        return Tensor(type, self.own.allocate(type.nbytes))

    def _readable(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy if kernels cannot read it in place or a result would
        overwrite it before it is read."""
        if self._can_use(tensor) and not any(tensor.buffer is one.buffer for one in self._written):
            return tensor
        return self.own.copied(tensor)

    def _target(self, place: int, output: Tensor | None) -> Tensor:
        """Return the tensor that a run writes an output to: the output itself, or the plan's own
        memory."""
        if output is None:
            return self.own.spare(place, self._types[len(self.input_slots) + place])
        return output if self._can_use(output) else self.own.written_for(output)
