"""`heliograph log-level`: set the log level of a running daemon."""

from __future__ import annotations

import argparse

from heliograph import admin
from heliograph.cli.common.arguments import add_server_argument
from heliograph_proto.sessions import LEVELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, LEVEL."""
    add_server_argument(parser)
    parser.add_argument("level", choices=LEVELS, metavar="LEVEL", help=f"one of {', '.join(LEVELS)}")


def run(arguments: argparse.Namespace) -> int:
    """Set the level, and print the previous one."""
    with admin.connect(arguments.server) as daemon:
        previous = daemon.set_log_level(arguments.level)
    print(f"the level is {arguments.level} now; it was {previous}")
    return 0
