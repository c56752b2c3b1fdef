"""What kernels may count on of a device, and the slots that plans have beside those of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Target:
    """What the kernels may count on of a device."""

    #: The most shared memory of a block.
    shared_bytes: int
    multiprocessors: int


class OwnSlots(NamedTuple):
    """Slots of a plan that are no value's."""

    #: Where kernels report a failure.
    report: int
    #: What a step needs while it runs.
    workspace: int
