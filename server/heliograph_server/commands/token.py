"""`heliograph token`: who may connect to a daemon (`serve --tokens`). The daemon may run meanwhile."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from heliograph.cli.common.tables import print_table
from heliograph_proto.errors import ConfigurationError
from heliograph_server.auth import tokens

#: The environment variable that names the file, for the daemon too.
FILE_VARIABLE = "HELIOGRAPH_TOKENS"
RIGHTS = ("use", "admin", "pool")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "y": 365 * 86_400}
#: A time after which nobody asks any more.
_MOST_SECONDS = 100 * _SECONDS["y"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """new, ls and rm."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    making = actions.add_parser("new", help="add a token, and print it this once")
    making.add_argument("--name", required=True, help="what logs and `ls` call it")
    making.add_argument("--tenant", default="default", help="whose it is: tenants share nothing (default)")
    making.add_argument(
        "--right",
        action="append",
        dest="rights",
        choices=RIGHTS,
        help="use: sessions; admin: what an operator does; pool: be a head (which "
        "needs use, too) or a member of a pool with this daemon; repeat for several (use)",
    )
    making.add_argument("--expires", metavar="TIME", help="such as 12h, 30d or 1y from now (never)")
    listing = actions.add_parser("ls", help="list the tokens by name; nobody can list what they are")
    removing = actions.add_parser("rm", help="take tokens back: calls at once, sessions within seconds")
    removing.add_argument("names", nargs="+", metavar="NAME")
    for action in (making, listing, removing):
        action.add_argument(
            "--file",
            type=Path,
            default=os.environ.get(FILE_VARIABLE),
            help=f"the file that `heliograph serve --tokens` names (default: ${FILE_VARIABLE})",
        )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    if not arguments.file:
        raise ConfigurationError("no file is named", advice=f"say --file FILE, or set ${FILE_VARIABLE}")
    path = Path(arguments.file)
    if arguments.action == "new":
        return _make(path, arguments)
    return _list(path) if arguments.action == "ls" else _remove(path, arguments.names)


def _make(path: Path, arguments: argparse.Namespace) -> int:
    made = tokens.new_token()
    added = tokens.Token(
        tokens.check_name(arguments.name, "--name"),
        tokens.hash_of(made),
        tokens.check_name(arguments.tenant, "--tenant"),
        tokens.parse_rights(arguments.rights or ["use"], "--right"),
        time.time() + seconds_of(arguments.expires) if arguments.expires else None,
    )
    tokens.add_token(path, added)
    print(made, flush=True)
    print("this is shown once; clients take it as token=..., or as $HELIOGRAPH_TOKEN", file=sys.stderr)
    return 0


def seconds_of(text: str) -> float:
    """How long "30d" is. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d{1,9})([smhdy])", text.strip())
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _MOST_SECONDS:
        raise ConfigurationError(f"--expires {text!r:.40} is no time", advice="such as 12h, 30d or 1y")
    return float(seconds)


def _list(path: Path) -> int:
    now = time.time()
    rows = [
        (one.name, one.tenant, " ".join(sorted(one.rights)), _until(one.expires, now))
        for one in tokens.read_tokens(str(path))
    ]
    print_table(("name", "tenant", "rights", "expires"), rows)
    return 0


def _until(expires: float | None, now: float) -> str:
    if expires is None:
        return "never"
    moment = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{moment} (expired)" if expires <= now else moment


def _remove(path: Path, names: list[str]) -> int:
    for name in names:
        tokens.remove_token(path, name)
    print(f"{len(names)} taken back", file=sys.stderr)
    return 0
