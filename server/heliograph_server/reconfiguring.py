"""A daemon's configuration while it runs: its file is read again, and what may change then does."""

from __future__ import annotations

import logging
from collections.abc import Callable

from heliograph_server.config import ServerConfig, Sources
from heliograph_server.log_level import set_log_level
from heliograph_server.reloading import Reloading, Watch
from heliograph_server.settings.changes import changes, with_live

logger = logging.getLogger(__name__)


class Configuration:
    """What is in force. `apply` gets what is to be in force next; if it raises, nothing changes."""

    def __init__(self, config: ServerConfig, apply: Callable[[ServerConfig], None]) -> None:
        self.now = config
        self._apply = apply

    def __repr__(self) -> str:
        return f"<Configuration {self.now}>"

    def follow(self, sources: Sources, watch: Watch) -> None:
        """From now on the file is looked at; what else was said stays. Raises ConfigurationError."""
        if sources.path is None or not sources.path.is_file():
            # Of a pipe there is nothing more to read.
            return
        file = Reloading(sources.parse, sources.path, on_change=self.change)
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
