"""Copies of plans in other sessions, for both APIs: compiling them, and copying their variables."""

from __future__ import annotations

from collections.abc import Iterator

from heliograph._base.device import DevicesArgument, device_names
from heliograph._base.plan import PlanBase
from heliograph._base.session import SessionBase
from heliograph.core.effects import Procedure
from heliograph.procedures.compile import Compilation, FrozenGraph, compile_frozen
from heliograph.procedures.run import PlanSpec
from heliograph.procedures.transfer import Sending, read, split_pieces, write
from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.plans import PlanOptions
from heliograph_proto.types import DTYPES

#: The largest element or block of any data type.
_MOST_ITEM_BYTES = max(dtype.block_bytes for dtype in DTYPES.values())


def recompiling(plan: PlanBase, session: SessionBase, devices: DevicesArgument) -> Procedure[PlanSpec]:
    """Compile a plan's graph in another session, uploading the weights that it lacks."""
    if not isinstance(plan, PlanBase) or not isinstance(session, SessionBase):
        raise InvalidArgumentError(
            f"cannot copy {type(plan).__name__} to {type(session).__name__}",
            advice="a plan is copied to a session: hg.copy_plan(plan, session)",
        )
    plan._live_handle  # noqa: B018 - raises when it was freed
    recipe, shell = plan._spec.recipe, session._shell
    if recipe is None or recipe.is_bound:
        raise InvalidArgumentError(
            "leaves of the plan are tensors of its session, which another session does not have",
            advice="create tensors there and compile: session.compile(graph, weights={...}, variables={...})",
        )
    how = Compilation(PlanOptions(device_names(shell, devices), recipe.fusion, recipe.threads))
    source = FrozenGraph(
        recipe.graph, recipe.contents, plan._spec.source_of, session._progress, recipe.initial
    )
    return compile_frozen(shell.core, source, how)


class Carrying:
    """The copying of a plan's variables to those of its copy, a piece at a time.

    Pieces pass through one buffer here. If both plans share a session, their variables are the same
    and nothing is copied.
    """

    def __init__(self, plan: PlanBase, copy: PlanBase) -> None:
        self._source, self._target = plan._shell, copy._shell
        here = {one.port.name: one.tensor for one in plan._spec.info.variables}
        self._pairs = [
            (here[one.port.name], one.tensor, one.port.type)
            for one in (copy._spec.info.variables if self._source is not self._target else ())
        ]
        most = min(self._source.core.limits.piece_bytes, self._target.core.limits.piece_bytes)
        # At least an item of any type.
        self._piece_bytes = max(most, _MOST_ITEM_BYTES)

    def pieces(self) -> Iterator[tuple[Procedure[None], Procedure[object]]]:
        """Yield, for each piece, the procedure that reads it and the one that then writes it."""
        largest = max((type_.nbytes for *_, type_ in self._pairs), default=0)
        room = memoryview(bytearray(min(self._piece_bytes, largest)))
        for source, target, type_ in self._pairs:
            item_bytes = type_.dtype.block_bytes
            for offset, size in split_pieces(type_.nbytes, len(room), item_bytes):
                data = room[:size]
                reading = read(self._source.core, c.GetTensor(source, offset, size), data, item_bytes)
                writing = write(self._target.core, c.SetTensor(target, offset), data, item_bytes, Sending())
                yield reading, writing
