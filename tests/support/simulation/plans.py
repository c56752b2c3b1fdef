"""The plans of simulated sessions: arithmetic on bytes, so that each result tells its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heliograph_proto.plans import Port
from heliograph_proto.types import tensor_type

SIZE = 8
TYPE = tensor_type("u8", (SIZE,))
PORTS = (Port("x", TYPE),), (Port("y", TYPE),)


@dataclass(frozen=True)
class SimulatedPlan:
    """The arithmetic of a plan: `output` and the new value of its variable, by byte."""

    handle: int
    device: str
    output: Callable[[int, int], int]
    reads: str = ""
    assigns: str = ""
    new_value: Callable[[int, int], int] = lambda x, v: v
    #: The copies of its memory, each with a queue of its own.
    copies: int = 1

    def step(self, x: bytes, v: bytes) -> tuple[bytes, bytes]:
        """Return the output and the variable's new value."""
        pairs = list(zip(x, v, strict=True))
        return (
            bytes(self.output(*pair) & 255 for pair in pairs),
            bytes(self.new_value(*pair) & 255 for pair in pairs),
        )


FIRST_PLAN = 1 << 40
PLANS = {
    one.handle: one
    for one in (
        SimulatedPlan(FIRST_PLAN, "a", lambda x, v: 3 * x + 1),
        SimulatedPlan(FIRST_PLAN + 1, "a", lambda x, v: x + v, assigns="v", new_value=lambda x, v: v + x + 1),
        SimulatedPlan(FIRST_PLAN + 2, "a", lambda x, v: x ^ v, reads="v"),
        SimulatedPlan(FIRST_PLAN + 3, "b", lambda x, v: 5 * x + 7, copies=3),
    )
}
