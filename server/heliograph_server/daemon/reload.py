"""Files that are read again when they change; what they said before stays in force when the new is bad.

    tokens = Reloading(parse_tokens, Path("/etc/heliograph/tokens"))   # raises if it is bad at the start
    watch.add(tokens)
    tokens.value                                                       # what the last good content said

Contents are compared, not times: a file may be replaced by renaming, a link to its folder may be turned to
another one, as Kubernetes does with what it mounts, and a time may be as before. A new content counts once
two looks in a row have found it, since some write in several steps; one that somebody asked for, with SIGHUP,
counts at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from heliograph_proto.errors import ConfigurationError, HeliographError
from heliograph_server.config.config import ServerConfig, Sources
from heliograph_server.config.schema import changes, with_live
from heliograph_server.telemetry.logs import set_log_level

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long there is between two looks.
LOOK_SECONDS = 1.0
#: No file of settings is longer; what is, is another file.
MOST_BYTES = 16 * 2**20

#: What a look finds: the content of each file, or why they cannot be read.
_Found: TypeAlias = "tuple[bytes, ...] | str"


def read_all(path: Path) -> bytes:
    """A file's content. Raises ConfigurationError for what is missing, too long, or no file."""
    try:
        # A pipe would not answer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigurationError(f"cannot read {path}: it is no file")
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"{path} is longer than {MOST_BYTES} bytes")
    return content


class ReloadedFile(Generic[T]):
    """What one file says, or several that belong together. All calls come from one thread; `value` may be
    read from any.

    `parse` gets the contents, in the order of the paths, and raises for bad ones. `on_change` gets what is
    new, before it is in force: if it raises, the old stays. `on_problem` is told once what is wrong.
    """

    def __init__(
        self,
        parse: Callable[..., T],
        *paths: Path,
        on_change: Callable[[T], None] = lambda _: None,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        """Reads for the first time. Raises ConfigurationError, and what `parse` raises."""
        self.paths = paths
        self._parse = parse
        self._on_change = on_change
        self._on_problem = on_problem or self._log
        contents = tuple(read_all(path) for path in paths)
        #: What was found when this was last judged, and by the last look.
        self._judged: _Found = contents
        self._seen: _Found = contents
        self._good = contents
        #: How often something new came into force ("ok"), or did not ("failed").
        self.outcomes = Counter(ok=0, failed=0)
        #: Why the latest content is not in force; empty: it is.
        self.problem = ""
        #: What is in force.
        self.value = parse(*contents)

    def __repr__(self) -> str:
        return f"<Reloading {', '.join(map(str, self.paths))}{': ' if self.problem else ''}{self.problem}>"

    def look(self, at_once: bool = False) -> bool:
        """Reads again. Whether something else is in force now. `at_once`: what is found counts although the
        look before this one did not find it, and is judged, and complained about, again if it is still bad.
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
            logger.info("%s: as it was before, and in force", self._named())
            self.problem = ""
            return False
        try:
            value = self._parse(*found)
            self._on_change(value)
        except HeliographError as error:
            return self._complain(error.in_a_line())
        except Exception as error:  # whatever it is, a daemon that serves goes on
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
        named = "" if problem.startswith(self._named()) else f"{self._named()}: "
        logger.error("%s%s; what it said before stays in force", named, problem)

    def _named(self) -> str:
        return ", ".join(map(str, self.paths))


class FileWatch:
    """The files that one daemon looks at now and then, on its event loop."""

    def __init__(self, seconds: float = LOOK_SECONDS) -> None:
        self._seconds = seconds
        self._files: list[ReloadedFile[Any]] = []
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Watch of {self._files}>"

    @property
    def outcomes(self) -> Counter[str]:
        """Of all files; see `ReloadedFile.outcomes`. From any thread."""
        return sum((file.outcomes.copy() for file in tuple(self._files)), Counter())

    def add(self, file: ReloadedFile[Any]) -> None:
        """From now on it is looked at, too."""
        self._files.append(file)

    def look(self, at_once: bool = False) -> None:
        """Reads all of them again: now and then, or `at_once` because somebody asked."""
        for file in self._files:
            try:
                file.look(at_once)
            except Exception:  # of `on_problem`: the others are still looked at
                logger.exception("looking at %s", file)

    def look_at_once(self) -> None:
        """Reads all of them again, because somebody asked."""
        self.look(at_once=True)

    def start(self) -> None:
        """Looks from now on, on the running event loop, until `stop`."""
        self._looking = asyncio.get_running_loop().create_task(self._look_on())

    async def stop(self) -> None:
        """Looks no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            self.look()


class Configuration:
    """What is in force. `apply` gets what is to be in force next; if it raises, nothing changes."""

    def __init__(self, config: ServerConfig, apply: Callable[[ServerConfig], None]) -> None:
        self.now = config
        self._apply = apply

    def __repr__(self) -> str:
        return f"<Configuration {self.now}>"

    def follow(self, sources: Sources, watch: FileWatch) -> None:
        """From now on the file is looked at; what else was said stays. Raises ConfigurationError."""
        if sources.path is None or not sources.path.is_file():
            # Of a pipe there is nothing more to read.
            return
        file = ReloadedFile(sources.parse, sources.path, on_change=self.change)
        # It may be another one than when the daemon began.
        if file.value != self.now:
            self.change(file.value)
        watch.add(file)

    def change(self, wanted: ServerConfig) -> None:
        """Puts into force what may change while a daemon runs, and names the rest."""
        found = changes(self.now, wanted)
        config = with_live(self.now, wanted)
        self._apply(config)
        if config.log_level != self.now.log_level:
            set_log_level(config.log_level)
        self.now = config
        for one in found:
            if one.entry.setting.live:
                logger.info("%s", one)
        if later := [one.entry.key for one in found if not one.entry.setting.live]:
            logger.warning("changed, and in force after a restart only: %s", ", ".join(later))
