"""`heliograph serve`: run a daemon. Its arguments are the settings of the configuration."""

from __future__ import annotations

import argparse

from heliograph_server.config.config import (
    add_serve_arguments as add_arguments,
)
from heliograph_server.config.config import (
    as_file,
    sources_from_arguments,
)
from heliograph_server.config.config import (
    unknown_option as unknown,
)

__all__ = ["add_arguments", "run", "unknown"]


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Raises ConfigurationError."""
    sources = sources_from_arguments(arguments)
    config = sources.load()
    if arguments.print_config:
        print(as_file(config), end="")
        return 0
    from heliograph_server.daemon.main import run as serve

    if not config.share:
        return serve(config, sources)
    from heliograph_server.auth.sharing import sharing

    with sharing(config, sources) as (share, shared):
        return serve(shared.load(), shared, share)
