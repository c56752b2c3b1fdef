"""How the rows of a weight are to lie over several devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heliograph_proto.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Names of devices and what each has of the rows, in their order. The fractions need not add up to 1:
    each counts against their sum."""

    #: Where the parts of a product are joined.
    main: str
    fractions: tuple[tuple[str, float], ...]


def check_fractions(fractions: Sequence[tuple[str, float]]) -> None:
    """Raises InvalidArgumentError unless they are 0 or more, finite, not all 0, and each device has one."""
    names: set[str] = set()
    for name, fraction in fractions:
        if not (math.isfinite(fraction) and fraction >= 0):
            raise InvalidArgumentError(
                f"device {name[:64]!r} is to have the fraction {fraction} of a weight's rows",
                advice="fractions are finite and 0 or more, such as 0.6 and 0.4",
            )
        if name in names:
            raise InvalidArgumentError(f"device {name[:64]!r} has two fractions of a weight's rows")
        names.add(name)
    if not 0 < sum(fraction for _, fraction in fractions) < math.inf:
        raise InvalidArgumentError(
            "the fractions of a weight's rows add up to no finite number above 0",
            advice="say what each device is to have, such as {'cpu0': 0.6, 'cpu1': 0.4}",
        )
