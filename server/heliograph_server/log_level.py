"""From which level on events are logged: what an operator may change while the daemon runs."""

from __future__ import annotations

import logging

from heliograph_proto.log_lines import check_level


def log_level() -> str:
    """The name of the level, such as "info"."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_log_level(level: str) -> str:
    """Sets it; the one before. Raises InvalidArgumentError."""
    number = logging.getLevelNamesMapping()[check_level(level).upper()]
    previous = log_level()
    logging.getLogger().setLevel(number)
    return previous
