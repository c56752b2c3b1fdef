"""`heliograph pool`: start, show and stop daemons on the nodes of a cluster, by an engine that
restarts them."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heliograph._probe import serves
from heliograph.cli.common.arguments import add_json_argument
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
#: The timeouts of `up` for all members, and of `status` for an answer.
UP_SECONDS = 120.0
STATUS_SECONDS = 30.0
#: The time limit for running work: the default of `serve --drain-seconds`, and a margin.
DOWN_SECONDS = 40.0
#: The most members that `status` probes at the same time.
MOST_PROBES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions up, status and down."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_up(actions.add_parser("up", help="start a daemon on each node, and wait until all serve"))
    status = actions.add_parser("status", help="show the members (exit status 1 unless all serve)")
    add_json_argument(status)
    _add_common(status, STATUS_SECONDS, "timeout for an answer")
    down = actions.add_parser("down", help="stop the daemons, and remove the pool")
    _add_common(down, DOWN_SECONDS, "time limit for running work, before daemons are killed")


def _add_common(parser: argparse.ArgumentParser, seconds: float, timeout: str) -> None:
    add = parser.add_argument
    add("--engine", choices=ENGINES, default=ENGINES[0], help="engine that places the daemons (default: ray)")
    add(
        "--address",
        default="auto",
        help="cluster: auto, HOST:PORT on one of its nodes, or ray://HOST:PORT (default: auto)",
    )
    add("--name", default=DEFAULT_NAME, help="name of the pool (default: %(default)s)")
    add("--timeout", type=float, default=seconds, metavar="SECONDS", help=f"{timeout} (default: %(default)g)")


def _add_up(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, UP_SECONDS, "timeout until all members serve")
    add = parser.add_argument
    add("--members", type=int, default=0, metavar="N", help="number of daemons (default: one a node)")
    add("--cpus", type=float, default=1.0, metavar="N", help="processors reserved for a member (default: 1)")
    gpus = "GPUs reserved for a member, which sees no others (default: 0)"
    add("--gpus", type=float, default=0.0, metavar="N", help=gpus)
    add(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port of each member; 0: any free one (default: %(default)d)",
    )
    add(
        "--serve",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARGUMENTS",
        help="pass all further arguments to `heliograph serve` on each node",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Raises ConfigurationError, UnavailableError, DeadlineExceededError, the
    errors of `RayEngine`."""
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
    specification = PoolSpecification(
        arguments.name, arguments.members, serve, arguments.cpus, arguments.gpus, arguments.port
    )
    found = _engine(arguments).up(specification, seconds=arguments.timeout, progress=_log)
    _print(found)
    name, address = arguments.name, arguments.address
    source = name if address == "auto" else f"{name}@{address}"
    _log(f"to offer all devices at one address, start a head: heliograph serve --pool ray:{source}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    found = with_drains(_engine(arguments).status(arguments.name, seconds=arguments.timeout))
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)
    return 0 if found.serving == len(found.members) else 1


def with_drains(found: PoolStatus) -> PoolStatus:
    """Return the status with "draining" for members that run and take no new sessions."""
    with ThreadPoolExecutor(MOST_PROBES) as threads:
        return replace(found, members=tuple(threads.map(_with_drain, found.members)))


def _with_drain(one: MemberStatus) -> MemberStatus:
    if one.is_serving and serves(one.url) is False:
        return replace(one, state="draining", why=one.why or "it takes no new sessions")
    return one


def _down(arguments: argparse.Namespace) -> int:
    members, killed = _engine(arguments).down(arguments.name, seconds=arguments.timeout, progress=_log)
    if not members:
        _log(f"there is no pool {arguments.name!r} in this cluster: nothing to do")
    elif killed:
        _log(f"{killed} of {members} daemons did not end in time, and were killed")
    return 0


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(found: PoolStatus) -> None:
    specification = found.specification
    header = ["member", "node", "state", "url", "pid", "starts", "last end"]
    print_table(header, [_row(one) for one in found.members])
    serve = " ".join(specification.serve) or "-"
    _log(
        f"{specification.name}: {found.serving} of {len(found.members)} members serve, placement "
        f"{found.placement.lower()}, serve: {serve}"
    )


def _row(one: MemberStatus) -> list[str]:
    known: list[Any] = [one.rank, one.node, one.state, one.url, one.pid or "", one.starts or "", one.why]
    return [str(value) or "-" for value in known]
