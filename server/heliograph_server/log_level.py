"""From which level on events are logged: what an operator may change while the daemon runs."""

from __future__ import annotations

import logging

from heliograph_proto.administration import LOG_LEVELS
from heliograph_proto.errors import InvalidArgumentError


def log_level() -> str:
    """The name of the level, such as "info"."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_log_level(level: str) -> str:
    """Sets it; the one before. Raises InvalidArgumentError."""
    if level not in LOG_LEVELS:
        raise InvalidArgumentError(f"{level!r:.100} is no level of a log", advice=f"{', '.join(LOG_LEVELS)}")
    previous = log_level()
    logging.getLogger().setLevel(level.upper())
    return previous
