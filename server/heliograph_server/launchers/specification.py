"""The specification and the status of a pool of an engine: plain data that any process can read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NoReturn

from heliograph_proto.addresses import DEFAULT_PORT
from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.config import add_serve_arguments, config_from_arguments
from heliograph_server.launchers.supervisor import SupervisorPhase

DEFAULT_NAME = "heliograph"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
#: The time without a report after which a member is shown as silent.
SILENT_SECONDS = 3.0
#: The time without a report after which a member is no longer listed. Its daemon may still serve:
#: its clients and head detect a loss sooner, and by themselves.
FORGOTTEN_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class PoolSpecification:
    """A pool as requested. All its members are alike."""

    name: str = DEFAULT_NAME
    #: The number of daemons, each on a node of its own; 0: as many as there are nodes with room.
    members: int = 0
    #: The arguments of `heliograph serve`, without the address.
    serve: tuple[str, ...] = ()
    #: The resources that each member reserves on its node.
    cpus: float = 1.0
    gpus: float = 0.0
    #: The port of each member at its node's address; 0: any free port, a new one after each
    #: restart.
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        check_name(self.name)
        if not (self.members >= 0 and self.cpus >= 0 and self.gpus >= 0 and 0 <= self.port < 2**16):
            raise ConfigurationError(
                f"a pool cannot have {self.members} members with {self.cpus:g} CPUs and {self.gpus:g} GPUs "
                f"each, at port {self.port}"
            )

    @property
    def may_be_reached(self) -> bool:
        """True if the operator allows other hosts to connect in plain text."""
        return any(one.partition("=")[0] == "--insecure" for one in self.serve)

    def difference(self, other: PoolSpecification) -> str:
        """The differences of another specification, for people; empty without any. 0 members match
        any number."""
        mine = self if self.members else replace(self, members=other.members)
        named = [one.name for one in fields(self) if getattr(mine, one.name) != getattr(other, one.name)]
        return ", ".join(f"{name}: {getattr(other, name)!r}, not {getattr(mine, name)!r}" for name in named)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member, by its rank in the pool, which stays when it is moved or restarted."""

    rank: int
    #: The phase of its daemon; "lost" while it has no node, "silent" while its supervisor does not
    #: report. `heliograph pool status` shows "draining" for one that takes no new sessions.
    state: str
    #: The address of its daemon; empty unless it serves.
    url: str = ""
    #: The address of its node.
    node: str = ""
    pid: int = 0
    #: The number of daemons started by this supervisor, and how the last one ended.
    starts: int = 0
    why: str = ""

    @property
    def is_serving(self) -> bool:
        return self.state == SupervisorPhase.SERVING


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The status of a pool."""

    specification: PoolSpecification
    #: The engine's state of the placement: for Ray, the state of the placement group.
    placement: str
    members: tuple[MemberStatus, ...]

    @property
    def serving(self) -> int:
        """The number of serving members."""
        return sum(one.is_serving for one in self.members)

    def as_json(self) -> dict[str, Any]:
        """The data that `pool_from_json` reads."""
        return asdict(self)


def pool_from_json(found: Mapping[str, Any]) -> PoolStatus:
    """Read a status from `PoolStatus.as_json`."""
    members = tuple(MemberStatus(**one) for one in found["members"])
    return PoolStatus(specification_from_json(found["specification"]), found["placement"], members)


def specification_from_json(found: Mapping[str, Any]) -> PoolSpecification:
    """Read a specification from its `asdict`."""
    return PoolSpecification(**{**found, "serve": tuple(found["serve"])})


def check_name(name: str) -> None:
    """Raise ConfigurationError for an invalid name of a pool."""
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r:.80} is not a valid name of a pool", advice="use up to 63 letters, digits and _.-"
        )


def check_serve_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError for arguments that `heliograph serve` would refuse on every node."""
    parser = _Parser(prog="heliograph serve", add_help=False, allow_abbrev=False)
    add_serve_arguments(parser)
    parsed = parser.parse_args(list(arguments))
    for name, advice in (
        ("listen", "the engine sets the address of each member: see --port"),
        ("pool", "members offer only their own devices; start the head separately"),
    ):
        if getattr(parsed, name, None):
            raise ConfigurationError(f"a member of a pool takes no --{name}", advice=advice)
    if parsed.config is None:
        # A file and variables would be those of the nodes.
        config_from_arguments(parsed, environment={})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"--serve: {message}", advice="`heliograph serve --help` lists the options")
