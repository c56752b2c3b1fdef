"""The failure report of kernels: the first index of a run that is out of range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph_backends.cuda.driver.driver import Queue
from heliograph_backends.cuda.lowering.moves import SCATTERS
from heliograph_backends.cuda.lowering.target import FAILURE_TYPE
from heliograph_backends.reference.base import index_error, indices_of
from heliograph_proto.graph import Graph

if TYPE_CHECKING:
    from heliograph_backends.cuda.binding import CudaPlanMemory

#: Ops whose kernels report failures.
REPORTING = ("get_rows", "get_rows_back", *SCATTERS, "mul_mat_id", "flash_attn_paged")


class IndexReport:
    """Two words on the card, which are copied to pinned memory after a run's steps: a caller that
    waits for the run has them without a second wait."""

    def __init__(self, graph: Graph, memory: CudaPlanMemory) -> None:
        """Allocate the words. Raises DriverError."""
        self._graph = graph
        self._plan_memory = memory
        self._driver = memory.device.driver
        self._address = memory.addresses[memory.own_slots.report]
        self._memory = self._driver.allocate_pinned(FAILURE_TYPE.nbytes)
        self._words = self._memory.view(np.uint64)
        #: True if the card's words are known to be 0, as they stay unless an index fails.
        self._is_clear = False

    def begin(self, queue: Queue) -> None:
        """Clear the words before a run's steps."""
        if not self._is_clear:
            self._driver.fill(self._address, 0, FAILURE_TYPE.nbytes, queue)
        self._is_clear = False

    def fetch(self, queue: Queue) -> None:
        """Copy the words after a run's steps."""
        target = int(self._memory.ctypes.data)
        self._driver.copy(target, self._address, FAILURE_TYPE.nbytes, queue)

    def check(self, queue: Queue) -> None:
        """Check the words after the run. Raises OutOfRangeError."""
        if not self._words[0]:
            self._is_clear = True
            return
        number, index = int(self._words[0]) - 1, int(self._words[1].astype(np.int64))
        indices = self._indices(indices_of(self._graph.nodes[number]), queue)
        raise index_error(self._graph, number, index, indices)

    def _indices(self, value: int, queue: Queue) -> np.ndarray[Any, Any] | None:
        """Return the tensor of indices; None if it is not contiguous."""
        plan, type = self._plan_memory, self._graph.type_of(value)
        slot, offset, strides = plan.storage.locate(value)
        if strides != type.strides:
            return None
        indices = np.empty(type.shape, type.dtype.storage)
        source = plan.addresses[slot] + offset
        self._driver.copy(int(indices.ctypes.data), source, indices.nbytes, queue)
        plan.device.settle(queue)
        return indices
