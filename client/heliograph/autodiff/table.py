"""The rule of each op row, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping

from heliograph.autodiff import (
    elementwise,
    moves,
    products,
    recurrences,
    reductions,
    rows,
    streams,
    windows,
)
from heliograph.autodiff.step import Rule

_FAMILIES = (elementwise, moves, reductions, products, rows, windows, streams, recurrences)
#: Rules by op.
RULES: Mapping[str, Rule] = {op: rule for family in _FAMILIES for op, rule in family.RULES.items()}

#: Ops whose results are floats that stay the same, or jump, when an operand changes a little.
FLAT = frozenset({"sgn", "step", "floor", "ceil", "round", "trunc", "floor_divide"})

#: Ops without a gradient, and why.
REFUSED: Mapping[str, str] = {
    "bitcast": "the bits of a number are no smooth function of it",
    "nextafter": "the next float is no smooth function",
    "opt_step_adamw": "a step of an optimizer ends a gradient",
    "opt_step_sgd": "a step of an optimizer ends a gradient",
}
