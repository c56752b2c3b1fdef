"""Text files that decide on access: read with care, and again when they change."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from heliograph_proto.errors import ConfigurationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The longest file: some 30,000 tokens.
MAX_BYTES = 8 * 2**20


class AccessFile(Generic[T]):
    """The value of a file when it was last usable. Used by one thread; any thread may read
    `value`, `outcomes` and `problem`.

    `what` names the content in errors, such as "tokens".
    """

    def __init__(self, path: str, what: str, parse: Callable[[str, str], T], advice: str) -> None:
        """Read the file. Raises ConfigurationError, also of `parse`."""
        self.path, self._what, self._parse, self._advice = path, what, parse, advice
        #: How often a new content came into use ("ok"), or was rejected ("failed").
        self.outcomes = Counter(ok=0, failed=0)
        #: Why the latest content is not in use; empty if it is.
        self.problem = ""
        self._seen = _signature(path)
        self._text = read_text(path, what, advice)
        self.value = parse(self._text, path)

    def __repr__(self) -> str:
        return f"<AccessFile {self.path}{': ' if self.problem else ''}{self.problem}>"

    def look(self, at_once: bool = False) -> None:
        """Check for a change, for `FileWatch`."""
        self.refresh(in_doubt=at_once)

    def refresh(self, *, in_doubt: bool = False) -> None:
        """Read the file again if its metadata has changed, or in any case if `in_doubt`: two
        changes in quick succession may leave the metadata the same. A problem is logged."""
        seen = _signature(self.path)
        if seen == self._seen and not in_doubt:
            return
        self._seen = seen
        try:
            text = read_text(self.path, self._what, self._advice)
            if text == self._text and not self.problem:
                return
            self.value, self._text = self._parse(text, self.path), text
        except ConfigurationError as error:
            # The text, as the error's traceback would keep the call alive.
            before, self.problem = self.problem, error.in_a_line()
            if before != self.problem:
                self.outcomes["failed"] += 1
                logger.error("the previous %s stay valid: %s", self._what, self.problem)
            return
        self.problem = ""
        self.outcomes["ok"] += 1
        logger.info("reloaded %s", self.path)


def read_text(path: str, what: str, advice: str) -> str:
    """Read the text of a file. Raises ConfigurationError, also if other users may write it."""
    try:
        text, mode = _content(path, what, advice)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the {what} in {path}: {error.strerror}", advice=advice
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not a text file", advice=advice) from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"{path} may be written by users other than its owner, who could grant access",
            advice=f"chmod 600 {path}",
        )
    if not text.strip():
        # A file without entries has its heading; an empty one is still being written.
        raise ConfigurationError(f"{path} is empty", advice=advice)
    return text


def _content(path: str, what: str, advice: str) -> tuple[str, int]:
    """Return the text and the mode of a file. Raises ConfigurationError, OSError,
    UnicodeDecodeError."""
    # Without O_NONBLOCK, opening a pipe blocks.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigurationError(
                f"cannot read the {what} in {path}: it is not a regular file", advice=advice
            )
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigurationError(f"{path} is longer than {MAX_BYTES:,} bytes", advice=advice)
    return content.decode("utf-8"), mode


def may_be_read_by_all(path: str) -> bool:
    """True if all users of the host may read a file."""
    return bool(os.stat(path).st_mode & stat.S_IROTH)


def _signature(path: str) -> tuple[int, ...]:
    """Metadata that changes with the file."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
