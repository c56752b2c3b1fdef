"""`heliograph sessions`: who uses a daemon, for its operator, who may end a session."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from heliograph import admin
from heliograph.cli.common.arguments import add_server_argument
from heliograph.cli.common.status_view import session_rows
from heliograph.cli.common.tables import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ls and end."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the sessions of all tenants")
    listing.add_argument("--json", action="store_true", help="one JSON object with everything, for programs")
    ending = actions.add_parser("end", help="end one: its running work is cancelled, and its client is told")
    ending.add_argument("number", type=int, metavar="ID", help="as ls shows it")
    ending.add_argument("--reason", default="", metavar="TEXT", help="what its client is told")
    for action in (listing, ending):
        add_server_argument(action)


def run(arguments: argparse.Namespace) -> int:
    """Raises SessionClosedError for a session that is not there, and what asking a daemon raises."""
    with admin.connect(arguments.server) as found:
        if arguments.action == "end":
            found.end_session(arguments.number, arguments.reason)
            print(f"session {arguments.number} has ended")
            return 0
        sessions = found.sessions()
    if arguments.json:
        print(json.dumps({"sessions": [asdict(one) for one in sessions]}, indent=2))
        return 0
    header, *rows = session_rows(sessions)
    print_table(header, rows)
    return 0
