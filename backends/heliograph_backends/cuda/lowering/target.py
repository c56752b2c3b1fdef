"""The device properties that lowering depends on, and the slots of plans beside those of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
