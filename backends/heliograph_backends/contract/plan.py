"""Plans: graphs compiled for a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heliograph_backends.contract.memory import Tensor
from heliograph_backends.contract.stream import Abort
from heliograph_proto.graph import Graph

if TYPE_CHECKING:
    from heliograph_backends.contract.device import Device


@dataclass(frozen=True, slots=True)
class LeafBindings:
    """Where a graph's constant and lasting leaves lie, by value number. Inputs come with each run.

    The bytes of weights do not change while a plan is bound to them.
    """

    weights: Mapping[int, Tensor]
    variables: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class DeviceCompileOptions:
    """How to compile; none of these changes a result."""

    fusion: bool = True
    #: The most threads of the device that a run uses; 0: all of them.
    threads: int = 0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What compiling a graph would take of a device, in bytes."""

    #: Of each buffer for intermediate results.
    compute_bytes: tuple[int, ...]
    #: What is kept beside weights, such as their packed form.
    extra_bytes: int = 0
    #: Blocks of an arena in which the plan fits but for its constants; empty: it takes memory of its own.
    arena_bytes: tuple[int, ...] = ()


class Arena(ABC):
    """Memory of a device in which plans lie that run one after the other: each writes over the others'
    intermediate results. Made by `Device.arena`.
    """

    #: What it takes of the device.
    size_bytes: int

    @abstractmethod
    def free(self) -> None:
        """Gives the memory back. Idempotent; the plans that lie there were freed before."""


class Plan(ABC):
    """A graph compiled for a device, ready to run many times. Runs of one plan are serial."""

    device: Device
    graph: Graph
    #: Bytes taken for intermediate results.
    compute_bytes: int
    #: What the nodes became.
    steps: int
    #: Of `compute_bytes`, those that lie in an arena.
    arena_bytes: int = 0
    #: Whether inputs may lie in any memory, and outputs are written wherever they are wanted: of a plan that
    #: another host runs, to which what lies in this one's memory goes with the run.
    takes_anything: bool = False

    @property
    def held_bytes(self) -> int:
        """What it takes of its device's memory now, beside an arena. Default: what it took when it was
        made."""
        return self.compute_bytes - self.arena_bytes

    @property
    def note(self) -> str:
        """What there is to say about how it runs, in words, such as why runs are not replayed. Default:
        nothing."""
        return ""

    @abstractmethod
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        """Runs once, from inside a stream's work. Tensors in the graph's order; None: not wanted.

        Outputs overlap neither inputs nor variables nor each other. An output that is a variable itself
        has the value that the run leaves in it. Raises CancelledError after an abort, OutOfRangeError for
        an index outside, and ComputeFailedError, with the node as origin; InvalidInputError for tensors
        of other types than the graph's; UnknownHandleError once the plan was freed.
        """

    def short_run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Callable[[], None], float] | None:
        """A function that computes on these tensors, in the calling thread, each time it is called, as long
        as they and the plan live; and about how many microseconds that takes. None unless it is quick and
        always the same, so that nobody would want to abort it. It raises what `compute` does. Default: None.
        """
        return None

    @abstractmethod
    def free(self) -> None:
        """Gives its memory back. Idempotent; never during `compute`."""

    def concurrency(self) -> Sequence[int]:
        """For each node of the graph the number, from 1, of the set of steps that it runs in at the same time
        as others; 0: alone. Default: all alone."""
        return (0,) * len(self.graph.nodes)

    def update(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        """A plan for another graph, which takes over this one's memory where that suffices. Frees this one.

        Raises what `Device.compile` does, and leaves this plan as it was then. Default: compiles anew.
        """
        made = self.device.compile(graph, bindings, options)
        self.free()
        return made
