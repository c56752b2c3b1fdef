"""What kernels report of a run: the first index that is not one of those there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from heliograph_backends.cuda.driver.driver import Queue
from heliograph_backends.cuda.lowering.lowering import FAILURE_TYPE
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.graph import Graph

if TYPE_CHECKING:
    from heliograph_backends.cuda.binding import CudaPlanMemory

#: Ops whose kernels report.
REPORTING = ("get_rows", "set_rows", "mul_mat_id")


class IndexReport:
    """Two words on the card, which come to pinned memory behind a run's steps: so whoever waits for the run
    has them, and waits once."""

    def __init__(self, graph: Graph, memory: CudaPlanMemory) -> None:
        """Raises DriverError."""
        self._graph = graph
        self._driver = memory.device.driver
        self._address = memory.addresses[memory.own_slots.report]
        self._memory = self._driver.allocate_pinned(FAILURE_TYPE.nbytes)
        self._words = self._memory.view(np.uint64)
        #: Whether the card's words are known to be 0, as they stay when nothing fails.
        self._is_clear = False

    def begin(self, queue: Queue) -> None:
        """Before a run's steps."""
        if not self._is_clear:
            self._driver.fill(self._address, 0, FAILURE_TYPE.nbytes, queue)
        self._is_clear = False

    def fetch(self, queue: Queue) -> None:
        """Behind a run's steps."""
        target = int(self._memory.ctypes.data)
        self._driver.copy(target, self._address, FAILURE_TYPE.nbytes, queue)

    def check(self) -> None:
        """When the run is computed. Raises OutOfRangeError."""
        if not self._words[0]:
            self._is_clear = True
            return
        number, met = int(self._words[0]) - 1, int(self._words[1].astype(np.int64))
        node = self._graph.nodes[number]
        *leading, rows, _ = self._graph.type_of(node.operands[0]).shape
        choices = f"{leading[0]} experts" if node.op == "mul_mat_id" else f"{rows} rows"
        message = f"{node.op}: index {met} is not one of {choices}"
        raise OutOfRangeError(message, origin=self._graph.origin(number))


def report_of(graph: Graph, memory: CudaPlanMemory) -> IndexReport | None:
    """A plan's, if any of its kernels may report. Raises DriverError."""
    reports = any(node.op in REPORTING for node in graph.nodes)
    return IndexReport(graph, memory) if reports else None
