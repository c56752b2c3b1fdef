"""`heliograph serve`: the daemon."""

from __future__ import annotations

import argparse

from heliograph.cli import missing_extra
from heliograph_proto.errors import HeliographError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the server."""
    from heliograph_server.config import add_serve_arguments

    add_serve_arguments(parser)


def unknown(word: str) -> HeliographError:
    """What is said of an option that there is not."""
    from heliograph_server.config import unknown_option

    return unknown_option(word)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Raises ConfigurationError."""
    from heliograph_server.config import as_file, sources_from_arguments

    sources = sources_from_arguments(arguments)
    config = sources.load()
    if arguments.print_config:
        print(as_file(config), end="")
        return 0
    try:
        from heliograph_server.main import run as serve
    except ModuleNotFoundError as error:
        raise missing_extra(error, "server") from None
    return serve(config, sources)
