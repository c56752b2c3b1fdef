"""Rules of loops that a snapshot finds between two steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heliograph_proto import commands as c
from heliograph_server.resources.handles import HandleStorage
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import RunTask


@dataclass(frozen=True, slots=True)
class RunUnderWay:
    """The handles that a run makes, and the storages that it writes."""

    makes: frozenset[int]
    writes: frozenset[HandleStorage]


def under_way(state: CommandState) -> RunUnderWay:
    """Return what an unretired run makes and writes."""
    assert isinstance(state.task, RunTask)
    makes = frozenset(one.tensor for one in state.task.command.outputs if one.tensor)
    storages = (target.storage for target in state.targets)
    return RunUnderWay(makes, frozenset(one for one in storages if one is not None))


def lone_loop(commands: Mapping[int, CommandState], lasting: int) -> int:
    """Return the number of a loop that is the only command under way, if it is the one of this
    number; else 0."""
    first = min(commands, default=0)
    if not first or first != lasting:
        return 0
    state = commands[first]
    progress = state.task.progress if isinstance(state.task, RunTask) else None
    return 0 if progress is None or state.reported or progress.stops else first


def leaves_nothing(kind: c.CommandKind) -> bool:
    """True for a command that only tells of what its client has, or that waits."""
    is_nothing = isinstance(kind, c.Cancel) and not kind.sequence
    return is_nothing or isinstance(kind, c.Continue) or (isinstance(kind, c.Skip) and kind.error is None)
