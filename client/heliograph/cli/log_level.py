"""`heliograph log-level`: from which level on a daemon logs, while it runs."""

from __future__ import annotations

import argparse

from heliograph import admin
from heliograph.cli.common.arguments import add_server_argument
from heliograph_proto.sessions import LEVELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--server, and the level."""
    add_server_argument(parser)
    parser.add_argument("level", choices=LEVELS, metavar="LEVEL", help=", ".join(LEVELS))


def run(arguments: argparse.Namespace) -> int:
    """Sets it, and says what it was."""
    with admin.connect(arguments.server) as daemon:
        previous = daemon.set_log_level(arguments.level)
    print(f"the level is {arguments.level} now; it was {previous}")
    return 0
