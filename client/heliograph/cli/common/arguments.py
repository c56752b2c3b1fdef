"""Arguments of several commands."""

from __future__ import annotations

import argparse


def add_server_argument(parser: argparse.ArgumentParser) -> None:
    """Add --server URL."""
    parser.add_argument(
        "--server",
        metavar="URL",
        help="URL of the server: local:, unix:///path or grpc[s]://host:port[?token=TOKEN] "
        "(default: $HELIOGRAPH_SERVER, else grpc://127.0.0.1:7070)",
    )


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
