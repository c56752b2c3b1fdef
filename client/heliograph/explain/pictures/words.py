"""Words and colours of pictures: times, texts that fit, colours of devices, heat. Pure."""

from __future__ import annotations

import math
from functools import cache
from html import escape

#: Colours of devices by priority, repeating: those of Okabe and Ito, distinct for colour-blind
#: readers.
DEVICE_COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#7f7f7f",
)
#: The share of the time at which heat begins: a thousandth. It is full at all of the time.
COOLEST = 3.0
_NARROW = frozenset("iljtfrI.,:;'|!/\\()[]-` ·")
_WIDE = frozenset("mwMW@%…<>=+&#~")


def time_text(microseconds: float) -> str:
    """A time in the largest unit that fits; "-" for none."""
    for unit, name in ((1e6, "s"), (1e3, "ms"), (1.0, "us")):
        if microseconds >= unit:
            return f"{microseconds / unit:.3g} {name}"
    return f"{microseconds:.2g} us" if microseconds else "-"


def heat_of(share: float) -> float:
    """The heat, from 0 to 1, of a share of the time: its logarithm, from a thousandth on."""
    return min(1.0, max(0.0, 1 + math.log10(share) / COOLEST)) if share > 0 else 0.0


def colour_of(device: int) -> str:
    """The colour of a device by its place."""
    return DEVICE_COLOURS[device % len(DEVICE_COLOURS)]


@cache
def _width_of(character: str) -> float:
    if character in _NARROW:
        return 0.37
    if character in _WIDE:
        return 0.97
    if character.isupper():
        return 0.72
    if character.isascii():
        return 0.62
    # Latin letters and signs, or others, which may be as wide as high.
    return 0.84 if character < "\u0250" else 1.05


def width_of(text: str, size: float) -> float:
    """About the width of a text in pixels, in a sans-serif font of this size; rather too large."""
    return sum(map(_width_of, text)) * size


def marked_up(text: str) -> str:
    """Escape a text for markup, as text or in an attribute; unprintable characters, which XML does
    not allow, become "?"."""
    return escape(printable(text), quote=True)


def printable(text: str) -> str:
    """A text with "?" for unprintable characters."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def fitted(text: str, width: float, size: float) -> str:
    """Return a text that fits a width, without its middle if it is too long; unprintable characters
    are shown as "?"."""
    shown = printable(text[:1024])
    if width_of(shown, size) <= width:
        return shown
    low, high = 0, len(shown)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if width_of(_cut(shown, middle), size) <= width else (low, middle - 1)
    return _cut(shown, low)


def _cut(text: str, count: int) -> str:
    """Keep some characters: the first ones, and rather more of the last ones, which differ."""
    last = (count + 1) // 2
    return f"{text[: count - last]}…{text[len(text) - last :]}"
