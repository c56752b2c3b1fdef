"""Which plans of a session share variables, and so are placed again together."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from heliograph._effects import Procedure
from heliograph._journal import Journal
from heliograph._rebuilding import Group
from heliograph.protocol import ClientCore
from heliograph_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from heliograph._plans import PlanBase


class Groups:
    """The groups of a session, and its plans that are not rebuilt."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._groups: list[Group] = []
        #: Plans without `on_loss` that assign variables; names of variables that such plans, also gone ones,
        #: may have changed.
        self._others: weakref.WeakSet[PlanBase] = weakref.WeakSet()
        self._changed: set[str] = set()

    def admit_other(self, plan: PlanBase) -> None:
        """A plan was compiled that is not rebuilt. Raises InvalidArgumentError where it assigns a variable of
        one that is."""
        variables, watched = plan._spec.info.variables, self._core.watched
        for port in variables:
            if port.port.name in plan._assigns and port.tensor in watched:
                raise _mixed(port.port.name)
        if plan._assigns:
            self._others.add(plan)
        # Through a plan that reads a variable it can be written as well.
        self._changed |= {port.port.name for port in variables if port.tensor not in watched}

    def admit(self, plan: PlanBase, limit_bytes: int) -> Procedure[None]:
        """A plan was compiled that is rebuilt. Raises InvalidArgumentError."""
        names = {port.port.name for port in plan._spec.info.variables}
        for other in list(self._others):
            if not other.freed and (shared := other._assigns & names):
                raise _mixed(min(shared))
        self._prune()
        made = Group(self._core, Journal(limit_bytes))
        if names & self._changed:
            made.journal.spoil(
                "other plans may have changed its variables before, and there is no checkpoint"
            )
        made.add(plan)
        sharing = [one for one in self._groups if names & one.variables.keys()]
        self._groups.append(made)
        for group in sharing:
            yield from group.take_turn()
            try:
                if group in self._groups:
                    made.absorb(group)
                    self._groups.remove(group)
            finally:
                group.give_turn()

    def _prune(self) -> None:
        """Lets go of groups whose plans are gone."""
        for group in [one for one in self._groups if not one.plans]:
            self._groups.remove(group)
            self._changed |= group.changed


def _mixed(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"variable {name!r} is shared by plans of which one is rebuilt when a device is lost, and another, "
        "which assigns it, is not",
        advice="compile both with on_loss='rebuild', or name the variable otherwise",
    )
