"""Sizes in bytes as people write them, such as "512MiB". Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Bytes of each unit; without one, bytes.
UNITS: Mapping[str, int] = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
#: For numbers that are no sizes.
NO_UNITS: Mapping[str, int] = {"": 1}
#: What travels in 64 bits with a sign.
MOST = 2**63 - 1


def parse_size(text: str, units: Mapping[str, int] = UNITS) -> int | None:
    """A whole number with a unit behind it, in bytes; None for any other text, and from 2**63 on."""
    match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]*)", text)
    if match is None or match[2] not in units:
        return None
    number = int(match[1]) * units[match[2]]
    return number if number <= MOST else None


def size_text(size_bytes: int) -> str:
    """Bytes in the largest unit that fits, such as "1.5 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
