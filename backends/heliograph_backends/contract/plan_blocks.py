"""The memory that a plan allocates, and a check of the memory that it is bound to."""

from __future__ import annotations

from collections.abc import Callable

from heliograph_backends.contract import Buffer, BufferType, LeafBindings, Tensor, Usage
from heliograph_backends.contract.access import copy
from heliograph_proto.types import TensorType


class PlanBlocks:
    """The buffers that a plan allocates: those that it owns, and those of the present run."""

    def __init__(self, memory: BufferType) -> None:
        self._memory = memory
        #: The buffers that the plan owns.
        self.owned: list[Buffer] = []
        self._temporary: list[Buffer] = []
        #: Memory for skipped outputs, by their places.
        self._spares: dict[int, Tensor] = {}
        #: (written tensor, output), for outputs to copy when the run is finished.
        self.late: list[tuple[Tensor, Tensor]] = []

    @property
    def size_bytes(self) -> int:
        """Bytes of the device's memory that the plan owns."""
        return sum(buffer.size_bytes for buffer in self.owned)

    def allocate(self, size_bytes: int) -> Buffer:
        """Allocate a buffer that the plan owns. Raises OutOfMemoryError."""
        self.owned.append(self._memory.allocate(size_bytes, Usage.COMPUTE))
        return self.owned[-1]

    def spare(self, place: int, type: TensorType) -> Tensor:
        """Return memory for a skipped output, the same in each run. Raises OutOfMemoryError."""
        if place not in self._spares:
            self._spares[place] = Tensor(type, self.allocate(type.nbytes))
        return self._spares[place]

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor for this run. Raises OutOfMemoryError."""
        made = self._make(tensor.type)
        copy(tensor, made)
        return made

    def written_for(self, output: Tensor) -> Tensor:
        """Return memory that this run writes instead of an output. Raises OutOfMemoryError."""
        made = self._make(output.type)
        self.late.append((made, output))
        return made

    def finish_run(self) -> None:
        """Copy the outputs that kernels could not write in place."""
        for source, output in self.late:
            copy(source, output)

    def end_run(self) -> None:
        """Free the buffers of the run, and forget its outputs."""
        self.late.clear()
        for buffer in self._temporary:
            buffer.free()
        self._temporary.clear()

    def free(self) -> None:
        """Free all buffers. Idempotent."""
        self.end_run()
        self._spares.clear()
        for buffer in self.owned:
            buffer.free()
        self.owned.clear()

    def _make(self, type: TensorType) -> Tensor:
        buffer = self._memory.allocate(type.nbytes, Usage.COMPUTE)
        self._temporary.append(buffer)
        return Tensor(type, buffer)


def are_separate(bindings: LeafBindings, address_of: Callable[[Tensor], int]) -> bool:
    """True if no variable shares a byte with another variable or a weight."""
    spans = [
        (address_of(tensor), address_of(tensor) + tensor.extent_bytes, is_variable)
        for is_variable, bound in ((False, bindings.weights), (True, bindings.variables))
        for tensor in bound.values()
    ]
    end = variable_end = 0
    for start, stop, is_variable in sorted(spans):
        if start < stop and (start < variable_end or (is_variable and start < end)):
            return False
        end = max(end, stop)
        variable_end = max(variable_end, stop) if is_variable else variable_end
    return True
