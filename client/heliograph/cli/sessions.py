"""`heliograph sessions`: list the sessions of a daemon, or end one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from heliograph import admin
from heliograph.cli.common.arguments import add_json_argument, add_server_argument
from heliograph.cli.common.status_view import session_rows
from heliograph.cli.common.tables import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions ls and end."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the sessions of all tenants")
    add_json_argument(listing)
    ending = actions.add_parser("end", help="end a session: cancel its work and notify its client")
    ending.add_argument("number", type=int, metavar="ID", help="the id that ls shows")
    ending.add_argument("--reason", default="", metavar="TEXT", help="reason to send to the client")
    for action in (listing, ending):
        add_server_argument(action)


def run(arguments: argparse.Namespace) -> int:
    """List the sessions, or end one. Raises SessionClosedError for a missing session, and errors of
    calls."""
    with admin.connect(arguments.server) as daemon:
        if arguments.action == "end":
            daemon.end_session(arguments.number, arguments.reason)
            print(f"session {arguments.number} has ended")
            return 0
        sessions = daemon.sessions()
    if arguments.json:
        print(json.dumps({"sessions": [asdict(one) for one in sessions]}, indent=2))
        return 0
    header, *rows = session_rows(sessions)
    print_table(header, rows)
    return 0
