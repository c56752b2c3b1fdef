"""Files that are read again when they change. A bad new content leaves the last good value in use.

    tokens = ReloadedFile(parse_tokens, Path("/etc/heliograph/tokens"))   # raises for a bad file
    watch.add(tokens)
    tokens.value                                                          # of the last good content

Contents are compared, not times: a file may be replaced by renaming, a link to its folder may be
changed, as Kubernetes does with its mounts, and a time may stay the same. A new content counts once
two checks in a row have found it, as files may be written in several steps; on SIGHUP, it counts at
once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from heliograph_proto.errors import ConfigurationError, HeliographError
from heliograph_server.config.config import ServerConfig, Sources
from heliograph_server.config.schema import changes, with_live
from heliograph_server.telemetry.logs import set_log_level

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The time between two checks.
LOOK_SECONDS = 1.0
#: The longest file of settings.
MOST_BYTES = 16 * 2**20

#: The result of a check: the content of each file, or why they cannot be read.
_Found: TypeAlias = "tuple[bytes, ...] | str"


def read_all(path: Path) -> bytes:
    """Read a file. Raises ConfigurationError if it is missing, too long, or not a regular file."""
    try:
        # Without O_NONBLOCK, opening a pipe blocks.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigurationError(f"cannot read {path}: it is not a regular file")
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"{path} is longer than {MOST_BYTES} bytes")
    return content


class ReloadedFile(Generic[T]):
    """The value of a file, or of several that belong together. Used by one thread; any thread may
    read `value`.

    `parse` takes the contents in the order of the paths, and raises for bad ones. `on_change` takes
    a new value before it is in use; if it raises, the old value stays. `on_problem` is called once
    for each problem.
    """

    def __init__(
        self,
        parse: Callable[..., T],
        *paths: Path,
        on_change: Callable[[T], None] = lambda _: None,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        """Read the files for the first time. Raises ConfigurationError, the errors of `parse`."""
        self.paths = paths
        self._parse = parse
        self._on_change = on_change
        self._on_problem = on_problem or self._log
        contents = tuple(read_all(path) for path in paths)
        #: The contents that were parsed last, and those of the last check.
        self._judged: _Found = contents
        self._seen: _Found = contents
        self._good = contents
        #: How often a new content came into use ("ok"), or was rejected ("failed").
        self.outcomes = Counter(ok=0, failed=0)
        #: Why the latest content is not in use; empty if it is.
        self.problem = ""
        #: The value in use.
        self.value = parse(*contents)

    def __repr__(self) -> str:
        return f"<ReloadedFile {', '.join(map(str, self.paths))}{': ' if self.problem else ''}{self.problem}>"

    def look(self, at_once: bool = False) -> bool:
        """Check the files. Returns True if the value changed.

        `at_once`: a new content counts although the previous check did not find it, and a bad one
        is reported again.
        """
        found = self._find()
        settled, self._seen = found == self._seen, found
        if not (at_once or settled) or (found == self._judged and not (at_once and self.problem)):
            return False
        self._judged = found
        return self._judge(found)

    def _find(self) -> _Found:
        try:
            return tuple(read_all(path) for path in self.paths)
        except ConfigurationError as error:
            return error.in_a_line()

    def _judge(self, found: _Found) -> bool:
        if isinstance(found, str):
            return self._complain(found)
        if found == self._good:
            logger.info("%s: unchanged, and in use", self._named())
            self.problem = ""
            return False
        try:
            value = self._parse(*found)
            self._on_change(value)
        except HeliographError as error:
            return self._complain(error.in_a_line())
        except Exception as error:  # no error may end a serving daemon
            logger.debug("reading %s", self._named(), exc_info=error)
            return self._complain(f"{type(error).__name__}: {error}")
        self.problem, self._good, self.value = "", found, value
        self.outcomes["ok"] += 1
        return True

    def _complain(self, problem: str) -> bool:
        self.problem = problem
        self.outcomes["failed"] += 1
        self._on_problem(problem)
        return False

    def _log(self, problem: str) -> None:
        named = "" if self._named() in problem else f"{self._named()}: "
        logger.error("%s%s; the previous content stays in use", named, problem)

    def _named(self) -> str:
        return ", ".join(map(str, self.paths))


class Watched(Protocol):
    """A file that may change, or several that belong together."""

    #: How often a new content came into use ("ok"), or was rejected ("failed").
    outcomes: Counter[str]
    #: Why the latest content is not in use; empty if it is.
    problem: str

    def look(self, at_once: bool = False) -> object:
        """Check for a change. `at_once`: also one that the previous check did not find."""


#: The kinds of files, in metrics.
KINDS = ("configuration", "tokens", "certificates")


class FileWatch:
    """The files that a daemon checks from time to time, on its event loop, each with its kind."""

    def __init__(
        self,
        seconds: float = LOOK_SECONDS,
        on_reload: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        """`on_reload` is called after each reload, with the kind, the outcome and the problem."""
        self._seconds, self._on_reload = seconds, on_reload
        #: The outcomes that were reported.
        self._reported: list[Counter[str]] = []
        self._files: list[tuple[str, Watched]] = []
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Watch of {self._files}>"

    def outcomes(self) -> dict[tuple[str, str], int]:
        """The number of reloads by kind and outcome. Callable from any thread."""
        found = dict.fromkeys(itertools.product(KINDS, ("ok", "failed")), 0)
        for kind, file in tuple(self._files):
            for outcome, count in file.outcomes.copy().items():
                found[kind, outcome] += count
        return found

    def failing(self) -> dict[str, bool]:
        """By kind, whether the latest content of a file is not in use. Callable from any thread."""
        files = tuple(self._files)
        return {kind: any(one.problem for its, one in files if its == kind) for kind in KINDS}

    def add(self, kind: str, file: Watched) -> None:
        """Check a further file."""
        self._reported.append(file.outcomes.copy())
        self._files.append((kind, file))

    def look(self, at_once: bool = False) -> None:
        """Check all files; see `ReloadedFile.look`."""
        for _, file in self._files:
            try:
                file.look(at_once)
            except Exception:  # of `on_problem`; the other files are still checked
                logger.exception("cannot check %s", file)
        for number, (kind, file) in enumerate(self._files):
            now, before = file.outcomes.copy(), self._reported[number]
            self._reported[number] = now
            for outcome in (now - before).elements():
                self._on_reload(kind, outcome, file.problem if outcome == "failed" else "")

    def start(self) -> None:
        """Start the checks on the running event loop."""
        self._looking = asyncio.get_running_loop().create_task(self._look_on())

    async def stop(self) -> None:
        """End the checks."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            self.look()


class Configuration:
    """The configuration in use. `apply` takes the next one; if it raises, nothing changes."""

    def __init__(self, config: ServerConfig, apply: Callable[[ServerConfig], None]) -> None:
        self.now = config
        self._apply = apply

    def __repr__(self) -> str:
        return f"<Configuration {self.now}>"

    def follow(self, sources: Sources, watch: FileWatch) -> None:
        """Follow the changes of the file; other sources stay. Raises ConfigurationError."""
        if sources.path is None or not sources.path.is_file():
            # A pipe cannot be read again.
            return
        file = ReloadedFile(sources.parse, sources.path, on_change=self.change)
        # The file may have changed since the start of the daemon.
        if file.value != self.now:
            self.change(file.value)
        watch.add("configuration", file)

    def change(self, new: ServerConfig) -> None:
        """Apply the live settings, and log the names of the others that changed."""
        found = changes(self.now, new)
        config = with_live(self.now, new)
        self._apply(config)
        if config.log_level != self.now.log_level:
            set_log_level(config.log_level)
        self.now = config
        for one in found:
            if one.entry.setting.live:
                logger.info("%s", one)
        if later := [one.entry.key for one in found if not one.entry.setting.live]:
            logger.warning("changed, but used only after a restart: %s", ", ".join(later))
