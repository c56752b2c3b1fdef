"""The device properties that lowering depends on, and the slots of plans beside those of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heliograph_backends.cuda.lowering.launch import Located
from heliograph_proto.graph import Node
from heliograph_proto.types import DTYPES, TensorType

#: The report of a failure: the node's number and the bad index.
FAILURE_TYPE = TensorType(DTYPES["u64"], (2,))
#: From this size a chain has its own kernel. It saves some microseconds a run, and a millisecond at
#: 2^28 elements. The first plan that has the chain takes 0.1 s to compile it; later ones load it
#: from CuPy's cache.
LEAST_GENERATED = 2**20


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """The device properties that lowering depends on."""

    #: The most shared memory of a block.
    shared_bytes: int
    multiprocessors: int = 1
    #: Chains of at least this many elements have their own kernels.
    least_generated: int = LEAST_GENERATED


class OwnSlots(NamedTuple):
    """Slots of a plan that belong to no value."""

    #: The failure report of kernels.
    report: int
    #: The memory that a step needs while it runs.
    workspace: int


class Asked(NamedTuple):
    """A node that a kernel is wanted for: its number, operands and result, and the plan's slots."""

    number: int
    node: Node
    values: Sequence[Located]
    result: Located
    own: OwnSlots
    target: CudaTarget

    @property
    def report(self) -> Located:
        """The failure report of kernels."""
        return Located(FAILURE_TYPE, self.own.report, 0, (8,))
