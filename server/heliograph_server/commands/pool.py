"""`heliograph pool`: daemons that an engine places on the nodes of a cluster, and restarts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from heliograph.cli.common.tables import print_table
from heliograph_proto.addresses import DEFAULT_PORT
from heliograph_proto.errors import ConfigurationError
from heliograph_server.launchers.specification import (
    MemberStatus,
    PoolSpecification,
    PoolStatus,
    check_serve_arguments,
)

if TYPE_CHECKING:
    from heliograph_server.launchers.ray.engine import RayEngine

ENGINES = ("ray",)
DEFAULT_NAME = "heliograph"
#: How long `up` waits for all members, and `status` for an answer.
UP_SECONDS = 120.0
STATUS_SECONDS = 30.0
#: How long daemons may end what runs, which is what `serve --drain-seconds` is by default, and some more.
DOWN_SECONDS = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """up, status and down."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_up(actions.add_parser("up", help="place a daemon on each node, and wait until all serve"))
    status = actions.add_parser("status", help="show the members; exit status 1 unless all serve")
    status.add_argument("--json", action="store_true", help="one JSON object with everything, for programs")
    _add_common(status, STATUS_SECONDS, "how long to wait for an answer")
    down = actions.add_parser("down", help="end the daemons and take everything away")
    _add_common(down, DOWN_SECONDS, "how long daemons may end what runs, before they are killed")


def _add_common(parser: argparse.ArgumentParser, seconds: float, what: str) -> None:
    add = parser.add_argument
    add("--engine", choices=ENGINES, default=ENGINES[0], help="what places the daemons (ray)")
    add(
        "--address",
        default="auto",
        help="of the cluster: auto, HOST:PORT on a node of it, or ray://HOST:PORT (auto)",
    )
    add("--name", default=DEFAULT_NAME, help=f"of the pool; a cluster may have several ({DEFAULT_NAME})")
    add("--timeout", type=float, default=seconds, metavar="SECONDS", help=f"{what} ({seconds:.0f})")


def _add_up(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, UP_SECONDS, "how long to wait until all serve")
    add = parser.add_argument
    add("--members", type=int, default=0, metavar="N", help="how many daemons (as many as nodes have room)")
    add(
        "--cpus",
        type=float,
        default=1.0,
        metavar="N",
        help="processors that a member reserves of its node (1)",
    )
    add("--gpus", type=float, default=0.0, metavar="N", help="GPUs that it reserves; it sees no others (0)")
    add(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"where members listen; 0: any free one ({DEFAULT_PORT})",
    )
    add(
        "--serve",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARGUMENTS",
        help="all that follows is told to `heliograph serve` on each node",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError, UnavailableError, DeadlineExceededError and what `RayEngine` does."""
    if not 0 < arguments.timeout < 1e6:
        raise ConfigurationError(f"--timeout is {arguments.timeout:g}", advice="give seconds, more than 0")
    action = {"up": _up, "status": _status, "down": _down}[arguments.action]
    return action(arguments)


def _engine(arguments: argparse.Namespace) -> RayEngine:
    from heliograph_server.launchers.ray.engine import RayEngine

    return RayEngine(arguments.address)


def _up(arguments: argparse.Namespace) -> int:
    check_serve_arguments(arguments.serve)
    serve = tuple(arguments.serve)
    amounts = (arguments.cpus, arguments.gpus)
    wanted = PoolSpecification(arguments.name, arguments.members, serve, *amounts, arguments.port)
    found = _engine(arguments).up(wanted, seconds=arguments.timeout, progress=_say)
    _print(found)
    source = wanted.name if arguments.address == "auto" else f"{wanted.name}@{arguments.address}"
    _say(f"a head offers these devices as one list: heliograph serve --pool ray:{source}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    found = _engine(arguments).status(arguments.name, seconds=arguments.timeout)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)
    return 0 if found.serving == len(found.members) else 1


def _down(arguments: argparse.Namespace) -> int:
    members, killed = _engine(arguments).down(arguments.name, seconds=arguments.timeout, progress=_say)
    if not members:
        _say(f"there is no pool {arguments.name!r} in this cluster: nothing to do")
    elif killed:
        _say(f"{killed} of {members} daemons did not end by themselves, and were killed")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(found: PoolStatus) -> None:
    specification = found.specification
    header = ["member", "node", "state", "url", "pid", "starts", "last end"]
    print_table(header, [_row(one) for one in found.members])
    serve = " ".join(specification.serve) or "-"
    _say(
        f"{specification.name}: {found.serving} of {len(found.members)} members serve, placement "
        f"{found.placement.lower()}, serve: {serve}"
    )


def _row(one: MemberStatus) -> list[str]:
    known: list[Any] = [one.rank, one.node, one.state, one.url, one.pid or "", one.starts or "", one.why]
    return [str(value) or "-" for value in known]
