"""Texts for people: times, and untrusted text; `size_text` of the protocol formats bytes."""

from __future__ import annotations

import math

#: The limit of plausible numbers from a clock or from another program.
MOST = 1e18


def usable(number: float | None) -> bool:
    """True if a number is finite, positive and plausible."""
    return number is not None and math.isfinite(number) and 0 < number < MOST


def plain(text: str) -> str:
    """The text of a server as one line of printable characters."""
    return "".join(one if one.isprintable() else "?" for one in str(text))[:300]


def time_text(seconds: float) -> str:
    """A time in a suitable unit."""
    if not usable(seconds):
        return "unknown"
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def age_text(seconds: float) -> str:
    """A time since something, in its two largest units."""
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
