"""Arguments that several commands take."""

from __future__ import annotations

import argparse


def add_server_argument(parser: argparse.ArgumentParser) -> None:
    """--server URL."""
    parser.add_argument(
        "--server",
        metavar="URL",
        help="local:, unix:///path, grpc[s]://host:port[?token=TOKEN] (default: $HELIOGRAPH_SERVER, else grpc://127.0.0.1:7070)",
    )
