"""A picture's content: nodes, leaves and copies of a plan, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: The origin of the times of nodes, from the best to the weakest.
Timing = Literal["measured", "run", "predicted", "work"]
#: Its words for the legend.
TIMING_TEXT: dict[Timing, str] = {
    "measured": "measured time",
    "run": "time of the last run, divided by work",
    "predicted": "predicted time, divided by work",
    "work": "work: bytes and operations",
}
LeafRole = Literal["input", "variable", "weight"]


@dataclass(frozen=True, slots=True)
class PictureLeaf:
    """An input, a variable or a weight."""

    role: LeafRole
    name: str
    #: Its data type and shape.
    type: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PictureNode:
    """A node of the plan."""

    #: Parts of the name in front of a "/" are the scopes that it lies in.
    name: str
    op: str
    #: The data type and the shape of its result.
    type: str
    #: Values: the leaves come first, then the nodes.
    operands: tuple[int, ...]
    #: The place of its device, and the number of its split.
    device: int
    split: int
    #: The cause of its device.
    why: str = ""
    #: Of its result.
    size_bytes: int = 0
    #: Its part of the time, in microseconds, or of the work.
    time: float = 0.0
    #: The number of its step, and the number of nodes in that step; 0: unknown.
    step: int = 0
    together: int = 0
    #: The line of code that built it.
    source: str = ""
    #: True if its result lies where an operand lies, so that it computes nothing.
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A plan to draw."""

    title: str
    summary: str
    leaves: tuple[PictureLeaf, ...]
    nodes: tuple[PictureNode, ...]
    #: Names of outputs and their values.
    outputs: tuple[tuple[str, int], ...]
    #: Names of devices, by priority.
    devices: tuple[str, ...]
    timing: Timing = "work"
    #: By value that is copied in each run, and the place of the device that it is copied to: words
    #: about it.
    copies: Mapping[tuple[int, int], str] = field(default_factory=dict)
