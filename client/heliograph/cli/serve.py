"""`heliograph serve`: the daemon."""

from __future__ import annotations

import argparse

from heliograph.cli import missing_extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the server."""
    from heliograph_server.config import add_serve_arguments

    add_serve_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Raises ConfigurationError."""
    from heliograph_server.config import config_from_arguments

    config = config_from_arguments(arguments)
    try:
        from heliograph_server.main import run as serve
    except ModuleNotFoundError as error:
        raise missing_extra(error, "server") from None
    return serve(config)
