"""The audit log: one JSON line for each action of an operator.

    {"time": "2026-01-31T12:00:00.123Z", "principal": "ops", "tenant": "operators", "peer":
     "ipv4:10.0.0.7:40312", "method": "Drain", "arguments": {"stay": true}, "outcome": "ok"}

The lines go to a file, or without one to the log, as messages of the logger `heliograph.audit`. A
file that has grown to `MOST_BYTES` is renamed to FILE.1, and older ones up to FILE.4 are kept.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Any

from heliograph_proto.errors import ConfigurationError
from heliograph_server.resources.principals import Principal
from heliograph_server.telemetry.logs import one_line, utc

logger = logging.getLogger(__name__)
#: The lines without a file. They do not depend on the level of the log.
lines = logging.getLogger("heliograph.audit")
lines.setLevel(logging.INFO)

#: The size at which a file is renamed, and the number of renamed files.
MOST_BYTES = 16 * 2**20
KEPT = 4
#: The most characters of a text, and of all arguments of a line.
TEXT_CHARACTERS = 500
ARGUMENT_CHARACTERS = 2000
#: Parts of the names of arguments that are not written.
_SECRET = ("token", "secret", "key", "password", "credential")


@dataclass(frozen=True, slots=True)
class Action:
    """An action of an operator. `peer` is empty for one by a file or a signal."""

    method: str
    outcome: str
    principal: Principal = field(default_factory=Principal)
    peer: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: The reason, if it was refused or failed.
    error: str = ""

    def line(self, now: float) -> str:
        """The line of the log, without its end."""
        found: dict[str, Any] = {
            "time": utc(now),
            "principal": _shown(self.principal.shown),
            "tenant": _shown(self.principal.tenant),
            "peer": _shown(self.peer),
            "method": self.method,
            "arguments": _arguments(self.arguments),
            "outcome": self.outcome,
        }
        return json.dumps(found | ({"error": _shown(self.error)} if self.error else {}))


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _argument(name, value) for name, value in given.items()}
    if (count := len(json.dumps(found))) > ARGUMENT_CHARACTERS:
        return {"omitted": f"{count:,} characters"}
    return found


def _argument(name: str, value: Any) -> Any:
    if any(part in name.lower() for part in _SECRET):
        return "***"
    if isinstance(value, bool | int | float):
        return value
    return _shown(value if isinstance(value, str) else json.dumps(value, default=str))


def _shown(text: str) -> str:
    return one_line(text, TEXT_CHARACTERS)


def reloaded(kind: str, outcome: str, problem: str) -> Action:
    """The action of changing a file that the daemon reads again."""
    return Action("Reload", outcome, arguments={"kind": kind}, error=problem)


class AuditLog:
    """The audit log of a daemon, at a path or in the log. Thread-safe."""

    def __init__(self, path: str = "") -> None:
        """Open the file. Raises ConfigurationError."""
        self._path = Path(path) if path else None
        self._lock = threading.Lock()
        self._file: RawIOBase | None = None
        try:
            self._open()
        except OSError as error:
            raise ConfigurationError(
                f"cannot write the audit log {path}: {error.strerror}", advice="audit_log names a file"
            ) from None

    def __repr__(self) -> str:
        return f"<AuditLog {self._path or 'in the log'}>"

    def record(self, action: Action) -> None:
        """Write the line of an action. One that the file does not take goes to the log."""
        line = action.line(time.time())
        with self._lock:
            if self._file is not None and self._written(line):
                return
        lines.info("%s", line)

    def _written(self, line: str) -> bool:
        try:
            self._rotate()
            assert self._file is not None
            encoded = f"{line}\n".encode()
            if self._file.write(encoded) != len(encoded):
                raise OSError("only a part of a line was written")
        except (OSError, ValueError) as error:
            logger.error("cannot write the audit log %s, so its lines follow here: %s", self._path, error)
            return False
        return True

    def _open(self) -> None:
        if self._path is not None:
            # Without O_NONBLOCK, opening a pipe blocks.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0)

    def _rotate(self) -> None:
        """Rename a file that has become too large. Raises OSError."""
        assert self._path is not None and self._file is not None
        if os.fstat(self._file.fileno()).st_size < MOST_BYTES:
            return
        for number in range(KEPT, 0, -1):
            before = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if before.exists():
                os.replace(before, self._path.with_name(f"{self._path.name}.{number}"))
        self._reopen()

    def reopen(self) -> None:
        """Open the file again, which a program for the rotation of logs may have renamed."""
        with self._lock:
            try:
                self._reopen()
            except OSError as error:
                logger.error("cannot open the audit log %s again: %s", self._path, error)

    def _reopen(self) -> None:
        before = self._file
        self._open()
        if before is not None:
            before.close()

    def close(self) -> None:
        """Close the file. Later lines go to the log."""
        with self._lock:
            before, self._file = self._file, None
            if before is not None:
                before.close()
