"""Lines of a server's log, as a client that follows its session's is given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heliograph_proto.errors import InvalidArgumentError

#: From the least one.
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One event."""

    #: Seconds since 1970.
    time: float
    #: One of LEVELS.
    level: str
    #: Which part of the server says it.
    logger: str
    message: str
    #: The sequence number of the command that it is about; 0: none.
    run: int = 0
    #: The id of the command's trace; "": none.
    trace: str = ""
    #: How many lines before it are missing, since nobody read them in time.
    dropped: int = 0


def check_level(level: str) -> str:
    """The level. Raises InvalidArgumentError for one that there is not."""
    if level not in LEVELS:
        levels = ", ".join(LEVELS)
        raise InvalidArgumentError(f"there is no level {level!r:.40}", advice=f"take one of {levels}")
    return level


def after_dropped(lines: Sequence[LogLine], dropped: int) -> list[LogLine]:
    """Lines of which the first says how many before it were dropped."""
    return [replace(one, dropped=0 if number else dropped) for number, one in enumerate(lines)]
