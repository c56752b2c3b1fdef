"""The memory behind a plan's slots: the plan's own, the leaves', and that of the current run."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from heliograph_backends.contract import Buffer, LeafBindings, Tensor
from heliograph_backends.contract.plan_blocks import PlanBlocks
from heliograph_backends.cpu.kernels import WeightForm
from heliograph_backends.host_memory.buffers import HostBuffer, array_over
from heliograph_backends.host_memory.order import Held
from heliograph_backends.planning.storage import StorageLayout
from heliograph_proto.errors import InvalidInputError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.types import DTYPES, TensorType

if TYPE_CHECKING:
    from heliograph_backends.cpu.backend import CpuDevice


class Lender(Protocol):
    """A source of memory for a plan: an arena, or the plan that it replaces."""

    @property
    def blocks(self) -> Sequence[Buffer]:
        """The offered memory."""

    def give(self, blocks: Sequence[Buffer]) -> list[Buffer]:
        """Return those of the borrowed blocks that the borrower owns from now on."""


class CpuPlanMemory:
    """The memory of a plan by slots. Those of inputs and outputs are bound in each run, the others
    once.

    Native programs read `addresses`, definition steps read `arrays`; both stay the same objects.
    """

    def __init__(
        self,
        device: CpuDevice,
        graph: Graph,
        storage: StorageLayout,
        bindings: LeafBindings,
        forms: Mapping[int, WeightForm],
        lender: Lender | None = None,
    ) -> None:
        """Bind the leaves and the plan's own memory.

        `forms`: see `packed_forms`. A lender's blocks are used where they suffice; they belong to
        the lender at least until `take_over`.

        Raises OutOfMemoryError, InvalidInputError.
        """
        self.device = device
        self.graph = graph
        self.storage = storage
        count = storage.slots
        #: The weights that lie in their packed form.
        self.packed: frozenset[int] = frozenset()
        #: The tensor of each slot; None while it is unbound.
        self.tensors: list[Tensor | None] = [None] * count
        #: Base addresses by slot.
        self.addresses = np.zeros(count, np.int64)
        #: NumPy views by value, for the values in `use`.
        self.arrays: list[Any] = [None] * (len(graph.leaves) + len(graph.nodes))
        #: The memory behind the addresses, kept alive and in its order: freeing a buffer does not
        #: free memory in use here.
        self._held: dict[int, Held] = {}
        #: Values in `use` that lie in other memory in each run.
        self._changing: dict[int, None] = {}
        #: The memory that the plan allocates.
        self.own = PlanBlocks(device.buffer_type)
        self._arena: list[Buffer] = []
        self._lender = lender
        #: The lender's buffers in use, with the used bytes of each.
        self._borrowed: dict[Buffer, int] = {}
        self._written: Spans | None = None
        self._input_slots = {
            storage.leaf_slots[value]: leaf.type
            for value, leaf in enumerate(graph.leaves)
            if leaf.kind is LeafKind.INPUT
        }
        self._output_types = [graph.type_of(output.value) for output in graph.outputs]
        self._copied = frozenset(storage.copied_outputs)
        self.run_slots = frozenset((*self._input_slots, *storage.output_slots))
        try:
            self._bind_lasting(bindings, forms)
        except BaseException:
            self.free()
            raise

    @property
    def borrowed_bytes(self) -> int:
        """Bytes in the lender's memory."""
        return sum(self._borrowed.values())

    @property
    def blocks(self) -> Sequence[Buffer]:
        return self._arena

    def give(self, blocks: Sequence[Buffer]) -> list[Buffer]:
        owned = self.own.owned
        given = [each for each in blocks if each in owned]
        owned[:] = [each for each in owned if each not in given]
        return given

    # Bound once

    def use(self, values: Iterable[int]) -> None:
        """Keep the NumPy views of these values in `arrays`, from now on or from the start of each
        run."""
        for value in values:
            if self.storage.locate(value)[0] in self.run_slots:
                self._changing[value] = None
            elif self.arrays[value] is None:
                self.arrays[value] = self.array(value)

    def array(self, value: int) -> Any:
        """Return the NumPy view of a value, in the memory that is bound now."""
        slot, offset, strides = self.storage.locate(value)
        base = self.tensors[slot]
        assert base is not None, "a step reads an unbound slot"
        assert value not in self.packed, "a packed weight is no array"
        type, held = self.graph.type_of(value), self._held[slot]
        return array_over(held.memory, type, base.offset_bytes + offset - held.start, strides)

    def elements(self, value: int) -> np.ndarray[Any, Any]:
        """Return a copy of a value's elements while its address is bound, with or without a
        tensor."""
        slot, offset, strides = self.storage.locate(value)
        type = self.graph.type_of(value)
        extent = sum((size - 1) * step for size, step in zip(type.shape, strides, strict=True))
        memory = ctypes.string_at(int(self.addresses[slot]) + offset, extent + type.dtype.itemsize)
        return np.ndarray(type.shape, type.dtype.storage, memory, 0, strides)

    def take_over(self) -> None:
        """Take ownership of the borrowed blocks that the lender gives away.

        A plan as a lender may only be freed after this.
        """
        for buffer in self._lender.give(list(self._borrowed)) if self._lender is not None else ():
            self.own.owned.append(buffer)
            del self._borrowed[buffer]
        self._lender = None

    def free(self) -> None:
        """Free the plan's own memory. Idempotent."""
        self.unbind_run()
        self._changing.clear()
        self.own.free()
        self._arena.clear()
        for held in self._held.values():
            held.release()
        self._held.clear()
        self.arrays.clear()

    # Bound in each run

    def bind_run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        """Bind a run's tensors. Raises InvalidInputError, OutOfMemoryError."""
        for (slot, type), tensor in zip(self._input_slots.items(), inputs, strict=True):
            if not _can_use(tensor) or (self._written and self._written.overlaps(tensor)):
                # Kernels cannot read it in place, or a result would overwrite it before it is read.
                tensor = self.own.copied(tensor)
            self._bind(slot, tensor, type)
        for place, (slot, output) in enumerate(zip(self.storage.output_slots, outputs, strict=True)):
            target = self._target(place, output)
            if target is not None:
                self._bind(slot, target, self._output_types[place])
        for value in self._changing:
            self.arrays[value] = self.array(value)

    @property
    def copies_outputs(self) -> bool:
        """True if a run copies outputs or uses arrays beside its kernels."""
        return bool(self._copied or self._changing)

    def lasting_run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Return the slots and addresses of a run on these tensors; None if kernels cannot use them
        in place.

        The caller keeps the tensors alive.
        """
        tensors = (*inputs, *outputs)
        if self._written or not all(_can_use(each) and each.buffer.is_plain for each in tensors):
            return None
        self.bind_run(inputs, outputs)
        try:
            slots = np.array(sorted(self.run_slots), np.intp)
            return slots, self.addresses[slots]
        finally:
            self.unbind_run()

    def unbind_run(self) -> None:
        """Drop the references to the run's tensors, so that they can be freed."""
        for slot in self.run_slots:
            self.tensors[slot] = None
            if (held := self._held.pop(slot, None)) is not None:
                held.release()
        for value in self._changing:
            self.arrays[value] = None
        self.own.end_run()

    def output_array(self, place: int) -> Any:
        """Return the NumPy view of an output's own memory, or None for a skipped output."""
        slot = self.storage.output_slots[place]
        base = self.tensors[slot]
        if base is None:
            return None
        held = self._held[slot]
        return array_over(held.memory, base.type, base.offset_bytes - held.start, base.byte_strides)

    # Parts

    def _bind_lasting(self, bindings: LeafBindings, forms: Mapping[int, WeightForm]) -> None:
        self._make_arena()
        for number, size in enumerate(self.storage.own_bytes):
            type = TensorType(DTYPES["u8"], (size,))
            in_arena = number < len(self.storage.arena)
            buffer = self._arena[number] if in_arena else self.own.allocate(size)
            self._bind(self.storage.arena_slot + number, Tensor(type, buffer), type)
        written = frozenset(self.storage.written)
        for value, tensor in {**bindings.weights, **bindings.variables}.items():
            if not _can_use(tensor):
                raise InvalidInputError(f"leaf {value} has gaps or is unaligned, and so cannot be bound")
            slot, type, writes = self.storage.leaf_slots[value], self.graph.type_of(value), value in written
            self._bind(slot, tensor, type, forms.get(value), writes=writes)
        slots = self.storage.leaf_slots
        self.packed = frozenset(value for value in forms if self._held[slots[value]].form is not None)
        if self.storage.written:
            self._written = Spans([bindings.variables[value] for value in self.storage.written])

    def _make_arena(self) -> None:
        """Find a buffer for each chunk: the lender's smallest one that suffices, or else a new
        one."""
        size_of = attrgetter("size_bytes")
        offered = [] if self._lender is None else sorted(self._lender.blocks, key=size_of)
        for size in self.storage.arena:
            place = bisect_left(offered, size, key=size_of)
            if place < len(offered):
                self._arena.append(offered.pop(place))
                self._borrowed[self._arena[-1]] = size
            else:
                self._arena.append(self.own.allocate(size))

    def _bind(
        self,
        slot: int,
        tensor: Tensor,
        expected: TensorType,
        form: WeightForm | None = None,
        *,
        writes: bool = False,
    ) -> None:
        """Bind a slot, in this form if the buffer allows it, or for `writes` in each run.

        Native code trusts addresses, so types and bounds are checked here.
        """
        if tensor.type != expected:
            raise InvalidInputError(f"a tensor of {tensor.type} where the plan has {expected}")
        buffer = tensor.buffer
        assert isinstance(buffer, HostBuffer), "the CPU computes on host memory"
        if tensor.offset_bytes + expected.nbytes > buffer.memory.nbytes:
            raise InvalidInputError(f"a tensor of {expected} reaches outside {buffer!r}")
        start = tensor.offset_bytes
        held = buffer.hold(start, start + expected.nbytes, form, writes=writes)
        self.tensors[slot] = tensor
        self._held[slot] = held
        self.addresses[slot] = held.address + start

    def _target(self, place: int, output: Tensor | None) -> Tensor | None:
        """Return the tensor that a run writes for an output: its own, or another; None if none is
        written."""
        if output is None:
            type = self._output_types[place]
            return None if place in self._copied else self.own.spare(place, type)
        in_place = _can_use(output) and output.buffer.is_plain
        return output if in_place else self.own.written_for(output)


class Spans:
    """The address ranges of contiguous tensors; adjacent ones are joined."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(map(span_of, tensors)):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def overlaps(self, tensor: Tensor) -> bool:
        """True if the tensor shares a byte with one of them."""
        start, end = span_of(tensor)
        place = bisect_right(self._ends, start)
        return start < end and place < len(self._starts) and self._starts[place] < end


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte and the one after its last byte."""
    start = address_of(tensor)
    return start, start + tensor.extent_bytes


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's first byte."""
    assert isinstance(tensor.buffer, HostBuffer), "the CPU computes on host memory"
    return tensor.buffer.address + tensor.offset_bytes


def _can_use(tensor: Tensor) -> bool:
    """True if kernels can read and write the tensor in place."""
    buffer = tensor.buffer
    if not isinstance(buffer, HostBuffer) or not tensor.is_contiguous:
        return False
    # Checked data, above all indices, must not change afterwards.
    if buffer.buffer_type.is_mappable:
        return False
    # Blocks are read by the byte; their sizes are not powers of two.
    alignment = tensor.type.dtype.itemsize or 1
    return (buffer.address + tensor.offset_bytes) % alignment == 0
