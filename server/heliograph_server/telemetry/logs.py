"""Lines of the log: one for each event, for people or as JSON, with its session and tenant.

    2026-01-31 12:00:00,123 INFO    heliograph_server.rpc.session_service: session 3 of ... began
    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "session": 3, "message": "session 3 ..."}

Line ends and other control characters are escaped, so that text of clients, such as their names,
cannot start a line. Long lines are cut, and tokens are masked.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from contextlib import suppress
from logging import LogRecord
from threading import Condition, Thread
from typing import Any, TextIO
from weakref import WeakMethod

from heliograph_proto.errors import ConfigurationError
from heliograph_proto.sessions import check_level

FORMATS = ("human", "json")
#: The most lines that wait for the reader of the log.
UNWRITTEN_LINES = 10_000
#: The most lines that are written at once.
WRITTEN_LINES = 250
#: How long the end of the process waits for them.
FLUSH_SECONDS = 1.0
#: The longest message, and the longest traceback, in characters.
MESSAGE_CHARACTERS = 4096
TRACEBACK_CHARACTERS = 16_384
#: The fields of a line beside its message, in this order.
FIELDS = ("session", "run", "tenant", "trace")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SECRETS = re.compile(r"(?i)\b(bearer|token=)\s*[^\s,;\"']+")
#: A token by itself.
_TOKEN = re.compile(r"\bhgt_[A-Za-z0-9_-]+")


def log_level() -> str:
    """The name of the lowest level that is logged, such as "info"."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_log_level(level: str) -> str:
    """Set the level, and return the previous one. Raises InvalidArgumentError."""
    number = logging.getLevelNamesMapping()[check_level(level).upper()]
    previous = log_level()
    logging.getLogger().setLevel(number)
    return previous


def one_line(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """The text with escaped control characters and masked tokens, cut to `most` characters."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most:,} characters more)"
    text = _without_secrets(text)
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _without_secrets(text: str) -> str:
    return _TOKEN.sub("hgt_***", _SECRETS.sub(lambda found: f"{found[1]} ***", text))


class LogWriter(logging.Handler):
    """Writes lines in a thread of its own, as the reader of a pipe may be slow or gone.

    The time of a line is that at which it is queued, so times rise: threads make their records
    before they get the handler's lock, perhaps in another order. Lines that do not fit are dropped
    and counted.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._begin()
        if hasattr(os, "register_at_fork"):
            # Weak, since it cannot be taken back.
            forked = WeakMethod(self._forked)
            os.register_at_fork(after_in_child=lambda: (call := forked()) and call())

    def _begin(self) -> None:
        self._lines: list[str] = []
        self._lost = 0
        self._is_writing = self._is_closed = False
        # Reentrant: a finalizer may log anywhere.
        self._changed = Condition()
        Thread(target=self._write, name="heliograph-log", daemon=True).start()

    def _forked(self) -> None:
        """Begin anew in the child of a fork, whose parent writes the lines from before."""
        if not self._is_closed:
            self._begin()

    def emit(self, record: logging.LogRecord) -> None:
        record.created = time.time()
        record.msecs = record.created % 1 * 1000
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) < UNWRITTEN_LINES:
                self._lines.append(line)
                self._changed.notify_all()
            else:
                self._lost += 1

    def _write(self) -> None:
        while (lines := self._next()) is not None:
            # The reader may be gone, and the stream closed.
            with suppress(Exception):
                self._stream.write("\n".join((*lines, "")))
                self._stream.flush()

    def _next(self) -> list[str] | None:
        """Wait for lines, and take the first ones; None at the end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            lines = self._lines[:WRITTEN_LINES]
            del self._lines[:WRITTEN_LINES]
            lost = 0 if self._lines else self._lost
            self._lost -= lost
            self._is_writing = bool(lines)
        if lost:
            # Not by the logger: a thread that flushes the handler holds its lock.
            text = f"{lost} lines of the log were lost: its reader was too slow"
            lines.append(self.format(LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)))
        return lines or None

    def flush(self) -> None:
        """Wait until all lines are written, for a bounded time."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._lines or self._is_writing), FLUSH_SECONDS)

    def close(self) -> None:
        """End the thread when all lines are written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()


class HumanFormatter(logging.Formatter):
    """The format for people: lines that concern a session end with its tenant. Lines of a traceback
    are indented, so that none looks like an event."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        tenant = getattr(record, "tenant", "")
        whose = f" (tenant {one_line(str(tenant))})" if tenant else ""
        record.message = one_line(record.message) + whose
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = _traceback(super().formatException(ei)).split("\n")
        return "\n".join(f"    {one_line(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        for name in FIELDS:
            if (value := getattr(record, name, None)) is not None:
                found[name] = value if isinstance(value, int) else one_line(str(value))
        found["message"] = one_line(record.getMessage())
        if record.exc_info:
            found["traceback"] = _traceback(self.formatException(record.exc_info))
        return json.dumps(found)


def _traceback(text: str) -> str:
    return _without_secrets(text)[-TRACEBACK_CHARACTERS:]


def utc(seconds: float) -> str:
    """The time in ISO 8601, with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03}Z"


def configure(level: str = "info", format: str = "human", stream: TextIO | None = None) -> None:
    """Log to a stream, by default stderr. Raises ConfigurationError."""
    if format not in FORMATS:
        raise ConfigurationError(f"log_format is {format!r}", advice=f"it is {' or '.join(FORMATS)}")
    handler = LogWriter(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else HumanFormatter())
    logging.basicConfig(handlers=[handler])
    set_log_level(level)
