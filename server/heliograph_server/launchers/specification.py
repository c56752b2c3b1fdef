"""What a pool of an engine is to be, and what it is: plain data that any process can read."""

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
#: A member that told nothing for so long is shown as silent.
SILENT_SECONDS = 3.0
#: After this, nobody is told of it any more. The daemon may serve all the same: who is connected to it finds
#: out sooner, and by itself.
FORGOTTEN_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class PoolSpecification:
    """A pool, as it was asked for. Members of one pool are alike."""

    name: str = DEFAULT_NAME
    #: How many daemons, each on a node of its own; 0: as many as there are nodes with room.
    members: int = 0
    #: What `heliograph serve` is told beside where to listen.
    serve: tuple[str, ...] = ()
    #: What each member reserves of its node.
    cpus: float = 1.0
    gpus: float = 0.0
    #: Where each listens on its node's address; 0: at any free port, another one after each restart.
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
        """Whether the operator lets other hosts connect: because daemons ask for tokens, or all the same."""
        return any(one.partition("=")[0] in ("--insecure", "--tokens") for one in self.serve)

    def difference(self, other: PoolSpecification) -> str:
        """What the other has otherwise, for people; empty if nothing. 0 members are any number."""
        mine = self if self.members else replace(self, members=other.members)
        named = [one.name for one in fields(self) if getattr(mine, one.name) != getattr(other, one.name)]
        return ", ".join(f"{name}: {getattr(other, name)!r}, not {getattr(mine, name)!r}" for name in named)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member, by its place in the pool, which stays when it is moved or restarted."""

    rank: int
    #: A phase of its daemon; "lost" while it has no node, "silent" while its supervisor says nothing.
    state: str
    #: Where its daemon listens; empty unless it serves.
    url: str = ""
    #: The address of its node.
    node: str = ""
    pid: int = 0
    #: Daemons started by this supervisor, and how the last one ended.
    starts: int = 0
    why: str = ""

    @property
    def is_serving(self) -> bool:
        return self.state == SupervisorPhase.SERVING


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as it is."""

    specification: PoolSpecification
    #: What the engine says of the places: for Ray, the state of the placement group.
    placement: str
    members: tuple[MemberStatus, ...]

    @property
    def serving(self) -> int:
        """How many members serve."""
        return sum(one.is_serving for one in self.members)

    def as_json(self) -> dict[str, Any]:
        """What `pool_from_json` reads."""
        return asdict(self)


def pool_from_json(found: Mapping[str, Any]) -> PoolStatus:
    """The status that `PoolStatus.as_json` told."""
    members = tuple(MemberStatus(**one) for one in found["members"])
    return PoolStatus(specification_from_json(found["specification"]), found["placement"], members)


def specification_from_json(found: Mapping[str, Any]) -> PoolSpecification:
    """The specification that `asdict` told."""
    return PoolSpecification(**{**found, "serve": tuple(found["serve"])})


def check_name(name: str) -> None:
    """Raises ConfigurationError unless a pool may be named so."""
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r:.80} is no name for a pool", advice="up to 63 letters, digits and any of _.-"
        )


def check_serve_arguments(arguments: Sequence[str]) -> None:
    """Raises ConfigurationError for what `heliograph serve` would refuse on every node."""
    parser = _Parser(prog="heliograph serve", add_help=False, allow_abbrev=False)
    add_serve_arguments(parser)
    parsed = parser.parse_args(list(arguments))
    for name, advice in (
        ("listen", "the engine says where each member listens: see --port"),
        ("pool", "a member offers its own devices; run the head by itself"),
    ):
        if getattr(parsed, name, None):
            raise ConfigurationError(f"a member of a pool takes no --{name}", advice=advice)
    if parsed.config is None:
        # A file would be the nodes', as variables are.
        config_from_arguments(parsed, environment={})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(
            f"--serve: {message}", advice="`heliograph serve --help` lists what is known"
        )
