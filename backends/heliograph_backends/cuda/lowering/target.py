"""What kernels may count on of a device, and the slots that plans have beside those of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: From here on a chain's run takes some microseconds less in a kernel of its own, and at 2^28 elements a
#: millisecond. The first plan that has the chain takes 0.1 s to compile it, others a file of CuPy's cache.
LEAST_GENERATED = 2**20


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """What the kernels may count on of a device."""

    #: The most shared memory of a block.
    shared_bytes: int
    multiprocessors: int = 1
    #: Chains of so many elements have kernels of their own.
    least_generated: int = LEAST_GENERATED


class OwnSlots(NamedTuple):
    """Slots of a plan that are no value's."""

    #: Where kernels report a failure.
    report: int
    #: What a step needs while it runs.
    workspace: int
