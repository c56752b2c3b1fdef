"""Plans over several devices, put together: within this process, over several hosts, or as a part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from heliograph_backends.contract import CompileOptions, LeafBindings, Plan
from heliograph_proto.errors import UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.portions import Portion
from heliograph_server.core.exchanging import LiveExchange
from heliograph_server.core.known_graphs import KnownGraph
from heliograph_server.core.loaded import LoadedPlan
from heliograph_server.core.measurements import Recorder
from heliograph_server.core.occupancy import Occupancy
from heliograph_server.core.pooled import Blueprint, Pooled, PooledPlan, portions_of
from heliograph_server.core.portioning import Exchanging
from heliograph_server.core.precedence import Precedences
from heliograph_server.core.reservation import NOTHING, Share
from heliograph_server.core.scheduled import ScheduledPlan
from heliograph_server.core.scheduling import Schedule
from heliograph_server.core.scheduling.portions import Portions
from heliograph_server.core.targets import Target


@dataclass(frozen=True, slots=True)
class Asked:
    """How a plan is to be made."""

    options: CompileOptions
    #: As many copies as runs may be under way at once.
    pipeline: int = 1
    #: What it exchanges with other daemons, if it is a part of a graph on several.
    portion: Portion | None = None
    #: What was reserved of a device, by its name.
    share: Callable[[str], Share] = lambda _: NOTHING
    #: Whether it is to lie in memory that was reserved.
    is_reserved: bool = False
    #: Takes the times of its runs.
    recorder: Recorder | None = None


class Assembler:
    """`exchange`: None: there is none with other daemons."""

    def __init__(self, occupancies: Mapping[str, Occupancy], exchange: LiveExchange | None) -> None:
        self._occupancies = occupancies
        self._exchange = exchange

    def assemble(self, known: KnownGraph, target: Target, bindings: LeafBindings, asked: Asked) -> LoadedPlan:
        """The plan of a target with a schedule. Raises what compiling does."""
        portions, why = self._portions(known.graph, target, asked)
        if portions is not None:
            plans = self._pooled(known.graph, target, bindings, asked, portions)
            return LoadedPlan(plans, target.main, divided=known.divided, recorder=asked.recorder)
        exchanging = self._exchanging(asked)
        try:
            plans = self._scheduled(known.graph, target, bindings, asked, exchanging, why)
        except BaseException:
            if exchanging is not None:
                exchanging.ports.close()
            raise
        loaded = LoadedPlan(plans, target.main, divided=known.divided, recorder=asked.recorder)
        if exchanging is not None:
            loaded.when_freed(exchanging.ports.close)
        return loaded

    def _portions(self, graph: Graph, target: Target, asked: Asked) -> tuple[Portions | None, str]:
        """The portions of a plan that other hosts take part in, or else why it is none of those, if there
        are such."""
        assert target.schedule is not None
        if asked.portion is not None or self._exchange is None:
            return None, ""
        if asked.is_reserved and any(one.site is not None for one in target.devices):
            return None, "it lies in memory that was reserved"
        try:
            return portions_of(graph, target.schedule, target.devices), ""
        except UnsupportedError as why:
            return None, why.message

    def _scheduled(
        self,
        graph: Graph,
        target: Target,
        bindings: LeafBindings,
        asked: Asked,
        exchanging: Exchanging | None,
        why_whole: str,
    ) -> list[Plan]:
        """Copies of a plan whose splits this process runs."""
        assert target.schedule is not None
        precedences = _precedences(target, asked)
        how = asked.options, precedences, self._occupancies, target.memories, asked.share, exchanging
        plans: list[Plan] = []
        try:
            for _ in range(asked.pipeline):
                made = ScheduledPlan(graph, target.schedule, target.devices, bindings, *how)
                made.why_whole = why_whole
                plans.append(made)
        except BaseException:
            for plan in plans:
                plan.free()
            raise
        return plans

    def _pooled(
        self, graph: Graph, target: Target, bindings: LeafBindings, asked: Asked, portions: Portions
    ) -> list[Plan]:
        """Copies of a plan over several hosts."""
        assert target.schedule is not None and self._exchange is not None
        blueprint = Blueprint(
            graph,
            target.schedule,
            target.memories,
            {**bindings.weights, **bindings.variables},
            asked.options,
            asked.pipeline,
            self._exchange,
            partial(self._own, target, asked.options, _precedences(target, asked)),
        )
        pooled = Pooled(blueprint, portions)
        return [PooledPlan(pooled, copy) for copy in range(asked.pipeline)]

    def _own(
        self,
        target: Target,
        options: CompileOptions,
        precedences: Precedences | None,
        graph: Graph,
        schedule: Schedule,
        bindings: LeafBindings,
        exchanging: Exchanging,
    ) -> ScheduledPlan:
        """This process's own portion."""
        how = options, precedences, self._occupancies, target.memories
        return ScheduledPlan(graph, schedule, target.devices, bindings, *how, exchanging=exchanging)

    def _exchanging(self, asked: Asked) -> Exchanging | None:
        """Opens the edges of a portion. Raises HandleExistsError, UnsupportedError."""
        if (portion := asked.portion) is None:
            return None
        if self._exchange is None:
            raise UnsupportedError("this server exchanges nothing with others")
        return Exchanging(portion, self._exchange.open(portion, asked.pipeline))


def _precedences(target: Target, asked: Asked) -> Precedences | None:
    return Precedences(len(target.devices)) if asked.pipeline > 1 else None
