"""`heliograph token`: create, list and revoke tokens (`serve --tokens`). The daemon may be
running."""

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
#: The longest lifetime of a token.
_MOST_SECONDS = 100 * _SECONDS["y"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions new, ls and rm."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    making = actions.add_parser("new", help="create a token and print it, once")
    making.add_argument("--name", required=True, help="name for logs and `ls`")
    making.add_argument("--tenant", default="default", help="tenant of the token (default: %(default)s)")
    making.add_argument(
        "--right",
        action="append",
        dest="rights",
        choices=RIGHTS,
        help="use: open sessions; admin: operate the daemon; pool: form a pool with this daemon (a head "
        "needs use, too); repeatable (default: use)",
    )
    making.add_argument("--expires", metavar="TIME", help="lifetime, such as 12h, 30d or 1y (default: none)")
    listing = actions.add_parser("ls", help="list the tokens by name, without their secrets")
    removing = actions.add_parser("rm", help="revoke tokens: calls fail at once, sessions end in seconds")
    removing.add_argument("names", nargs="+", metavar="NAME", help="name of a token")
    for action in (making, listing, removing):
        action.add_argument(
            "--file",
            type=Path,
            default=os.environ.get(FILE_VARIABLE),
            help=f"file of `heliograph serve --tokens` (default: ${FILE_VARIABLE})",
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Raises ConfigurationError."""
    if not arguments.file:
        raise ConfigurationError("no file is given", advice=f"give --file FILE, or set ${FILE_VARIABLE}")
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
    print("this is printed once; clients pass it as token=... or $HELIOGRAPH_TOKEN", file=sys.stderr)
    return 0


def seconds_of(text: str) -> float:
    """Parse a duration such as "30d" into seconds. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d{1,9})([smhdy])", text.strip())
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _MOST_SECONDS:
        raise ConfigurationError(f"--expires {text!r:.40} is not a time", advice="give 12h, 30d or 1y")
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
    print(f"{len(names)} revoked", file=sys.stderr)
    return 0
