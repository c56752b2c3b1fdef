"""The steps of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph_backends.cuda.driver.driver import DriverError, Gemm, Queue
from heliograph_backends.cuda.lowering.launch import Launch
from heliograph_backends.cuda.lowering.lowering import Work
from heliograph_backends.reference import define_node
from heliograph_proto.errors import ComputeFailedError, HeliographError, OutOfMemoryError
from heliograph_proto.graph import Graph

if TYPE_CHECKING:
    from heliograph_backends.cuda.binding import CudaPlanMemory


class Step(ABC):
    """A part of a plan that issues work."""

    #: The reason why it cannot be captured; empty if it can.
    why_not_captured = ""
    #: The number of launches and calls that it puts on a queue, if it can be captured.
    calls = 0

    @abstractmethod
    def issue(self, queue: Queue) -> None:
        """Put its work on a queue, in memory that is bound."""

    @abstractmethod
    def rebind(self) -> None:
        """Take up the addresses of a run's memory."""


class KernelStep(Step):
    """Launches and calls of cuBLAS, whose parameters are complete except for the addresses of a
    run."""

    def __init__(
        self, graph: Graph, number: int, work: Sequence[Work], memory: CudaPlanMemory, *, tf32: bool
    ) -> None:
        self._graph, self._number = graph, number
        self._work = work
        self.calls = len(work)
        self._bound = work
        self._memory = memory
        self._driver = memory.device.driver
        self._tf32 = tf32
        self.rebind()

    def rebind(self) -> None:
        self._bound = [self._with_memory(one) if isinstance(one, Launch) else one for one in self._work]

    def _with_memory(self, launch: Launch) -> Launch:
        """Return the launch with addresses, or its replacement if the memory is not aligned for
        it."""
        addresses = self._memory.addresses
        words = launch.parameters.view(np.uint64)
        aligned = True
        for word, slot, offset in launch.patches:
            words[word] = addresses[slot] + offset
            aligned = aligned and addresses[slot] % launch.alignment == 0
        return launch if aligned or launch.instead is None else self._with_memory(launch.instead)

    def issue(self, queue: Queue) -> None:
        try:
            for one in self._bound:
                if isinstance(one, Launch):
                    self._driver.launch(
                        one.kernel, one.grid, one.threads, one.parameters, queue, one.shared_bytes
                    )
                else:
                    self._multiply(one.gemm, (one.a, one.b, one.c), queue)
        except HeliographError as error:
            raise error.at(self._graph.origin(self._number)) from None

    def _multiply(self, gemm: Gemm, places: Sequence[tuple[int, int]], queue: Queue) -> None:
        a, b, c = (self._memory.addresses[slot] + offset for slot, offset in places)
        self._driver.gemm(gemm, a, b, c, queue, tf32=self._tf32)


class DefinitionStep(Step):
    """A node computed by its reference definition, with CuPy, between arrays over the plan's
    memory."""

    def __init__(self, graph: Graph, number: int, memory: CudaPlanMemory) -> None:
        node = graph.nodes[number]
        self._graph, self._number = graph, number
        self._memory = memory
        self._driver = memory.device.driver
        self._values = (*node.operands, target_of(graph, number))
        self._kernel = define_node(graph, number, self._driver.xp)
        self._arrays: list[Any] = []
        self.why_not_captured = f"{node.op} runs on the definition, which may ask the device for values"
        if memory.is_fixed or not any(memory.slot_of(value) in memory.run_slots for value in self._values):
            self._arrays = [memory.array(value) for value in self._values]
        self._lasts = bool(self._arrays)

    def rebind(self) -> None:
        if not self._lasts:
            self._arrays = [self._memory.array(value) for value in self._values]

    def issue(self, queue: Queue) -> None:
        origin = self._graph.origin(self._number)
        try:
            self._kernel(*self._arrays)
        except HeliographError as error:
            raise error.at(origin) from None
        except DriverError:
            raise
        except Exception as error:
            failure = self._driver.failure(error)
            if failure is not None:
                raise failure from error
            if isinstance(error, MemoryError):
                raise OutOfMemoryError(f"no memory for a temporary result: {error}", origin=origin) from error
            raise ComputeFailedError(f"{type(error).__name__}: {error}", origin=origin) from error


class ArrayCopy(Step):
    """A copy between strides that the copy kernel does not support."""

    why_not_captured = "a copy over more dimensions than the kernels walk goes through CuPy"

    def __init__(self, memory: CudaPlanMemory, source: int, slot: int, offset: int) -> None:
        self._memory, self._source, self._slot, self._offset = memory, source, slot, offset

    def rebind(self) -> None:
        pass

    def issue(self, queue: Queue) -> None:
        memory, type = self._memory, self._memory.graph.type_of(self._source)
        target = memory.at(type, self._slot, self._offset, type.strides)
        target[...] = memory.array(self._source)


def target_of(graph: Graph, number: int) -> int:
    """Return the value that a node writes: its own, or the variable that it assigns to."""
    node = graph.nodes[number]
    return node.operands[0] if node.op == "assign" else len(graph.leaves) + number
