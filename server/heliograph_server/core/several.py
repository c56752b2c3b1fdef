"""What is common to plans over several devices, however their values travel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from heliograph_backends.contract import Abort, CompileOptions, Device, LeafBindings, Plan, Tensor
from heliograph_proto.description import PlanReport
from heliograph_proto.errors import UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_server.core.scheduling import Schedule
from heliograph_server.core.stepwise import Stepwise

#: Told of each observed node of a run, with its value, when its split has run; may hold the run up. The value
#: is there until it returns. Called from several threads where splits overlap.
Observe: TypeAlias = Callable[[int, Tensor, Abort], None]


class SeveralPlan(Plan):
    """A plan over several devices: those of the schedule's problem, in its order."""

    schedule: Schedule
    devices: tuple[Device, ...]

    @abstractmethod
    def compute(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        abort: Abort,
        observe: Observe | None = None,
        exchange_run: int = 0,
    ) -> None:
        """As `Plan.compute`; `observe` is told of the nodes of `schedule.taps`; `exchange_run`: of a portion,
        the number of the whole's run."""

    def stepwise(self) -> Stepwise | None:
        """A run of it in steps, each done by whoever brings what it waits for. Default: none."""
        return None

    @property
    def computed_us(self) -> Sequence[float]:
        """How long each split of the last run computed; empty where only a report tells. Default: so."""
        return ()

    @property
    def split_times(self) -> Sequence[tuple[str, tuple[float, float, float]]]:
        """Of each split of the last run that is known here: its device; when it began in the run, how long it
        waited for what it reads, and how long it computed, in microseconds. Default: none."""
        return ()

    @abstractmethod
    def report(self) -> PlanReport:
        """Where its nodes run and why, and how long the last run took."""

    @abstractmethod
    def held_by_device(self) -> Mapping[str, int]:
        """What it takes of each device now, by name."""

    @abstractmethod
    def forget_times(self) -> None:
        """As if it had not run yet."""

    def update(self, graph: Graph, bindings: LeafBindings, options: CompileOptions) -> Plan:
        raise UnsupportedError("a plan over several devices is compiled anew")
