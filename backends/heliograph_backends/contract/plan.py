"""Plans: graphs compiled for a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heliograph_backends.contract.memory import Tensor
from heliograph_backends.contract.stream import Abort, Turn
from heliograph_proto.commands import FeedLoop, Loop
from heliograph_proto.errors import HeliographError
from heliograph_proto.graph import Graph

if TYPE_CHECKING:
    from heliograph_backends.contract.device import Device


@dataclass(frozen=True, slots=True)
class LeafBindings:
    """The tensors of a graph's weights and variables, by value number. Inputs come with each run.

    The bytes of weights never change during a run. Between runs they may: `Buffer.written` tells.
    """

    weights: Mapping[int, Tensor]
    variables: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class DeviceCompileOptions:
    """Options of compiling; none of them changes a result."""

    fusion: bool = True
    #: The maximum threads of the device in a run; 0: all.
    threads: int = 0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The bytes that compiling a graph would take of a device."""

    #: The size of each buffer for intermediate results.
    compute_bytes: tuple[int, ...]
    #: Data kept beside weights, such as another form of them.
    extra_bytes: int = 0
    #: Blocks of an arena that holds the plan except its constants; empty: it takes memory of its
    #: own.
    arena_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The memory of a node's result: a part of a block, in some steps of a run."""

    node: int
    block: int
    offset_bytes: int
    size_bytes: int
    #: The first and the last step that need it, from 0. Steps that run at the same time have one
    #: number.
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The blocks of memory that a plan computes in, and the results there."""

    #: The sizes of the blocks; those from `constants` on hold results that are computed once.
    block_bytes: tuple[int, ...] = ()
    constants: int = 0
    results: tuple[StoredResult, ...] = ()
    #: The number of steps.
    steps: int = 0


class Arena(ABC):
    """Memory of a device for plans that run one after another, made by `Device.arena`.

    Each plan overwrites the others' intermediate results.
    """

    #: Its bytes on the device.
    size_bytes: int

    @abstractmethod
    def free(self) -> None:
        """Free the memory. Idempotent; its plans were freed before."""


class HostedLoop(ABC):
    """A loop whose steps go on at other hosts, without this process between them.

    It was sent when it was made. `next` and `close` are called by one thread, the other methods by
    any thread; these do not wait.
    """

    #: True if the hosts must stop after the same step for variables to be whole, which `cancel`
    #: alone does not ensure.
    stops_together = False

    @abstractmethod
    def next(self) -> tuple[int, int, memoryview] | None:
        """Wait for the next value that the loop streams: its step, the output's index, its bytes.

        None: the loop has ended, and all wanted outputs are in their tensors. Raises the loop's
        error.
        """

    @property
    @abstractmethod
    def steps(self) -> int | None:
        """The number of completed steps, once the loop has ended; None if it is unknown."""

    @property
    @abstractmethod
    def has_failed(self) -> bool:
        """True if it has ended with an error."""

    @abstractmethod
    def when_ended(self, call: Callable[[], None]) -> None:
        """Call `call` once when it has ended, from any thread; at once if it has."""

    def when_counted(self, call: Callable[[int], None]) -> None:
        """Call `call` now and then with the number of complete steps, from any thread. Default:
        never."""

    @abstractmethod
    def feed(self, feed: FeedLoop, done: Callable[[int | HeliographError], None]) -> Callable[[], None]:
        """Send new values of inputs. `done` is called once, from any thread, with the step that
        took them or the reason why none did. Return a call that withdraws them if no step took
        them."""

    @abstractmethod
    def stop(self) -> None:
        """Request its end after its present step."""

    @abstractmethod
    def cancel(self) -> None:
        """Request its end."""

    @abstractmethod
    def close(self) -> None:
        """Cancel it if it goes on, wait for its end, and release what it has allocated."""


class Plan(ABC):
    """A graph compiled for a device, ready to run many times. Runs of one plan are serial.

    The plan itself ensures that, for example by a lock: streams may start one plan at once, and its
    intermediate results have one place. The first four attributes are required.
    """

    #: The device that compiled it.
    device: Device
    #: The graph as it was given to `Device.compile`.
    graph: Graph
    #: The bytes of its intermediate results: the sum that `Device.estimate` gives.
    compute_bytes: int
    #: The number of steps (kernel calls) of a run, for reports: fusion makes them fewer than nodes.
    steps: int
    #: The part of `compute_bytes` in an arena.
    arena_bytes: int = 0
    #: True if `compute` itself calls `abort.begin_writes` before the first write of a variable.
    #: Otherwise its caller does, before all work, so that a run with assignments is never broken
    #: off.
    begins_writes: bool = False
    #: True if inputs and outputs may lie in any memory: for a plan that another host runs, whose
    #: runs carry the bytes in this host's memory.
    takes_anything: bool = False

    @property
    def held_bytes(self) -> int:
        """The device memory that it holds now, outside an arena. Default: that of its
        compilation."""
        return self.compute_bytes - self.arena_bytes

    @property
    def note(self) -> str:
        """A note on how it runs, such as the reason why runs are not replayed. Default: empty."""
        return ""

    @abstractmethod
    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        """Run once, inside a stream's work. Tensors are in the graph's order; None: output not
        needed.

        Outputs overlap neither inputs nor variables nor each other. An output that is a variable
        itself has its value after the run. A node that reads a variable before an assignment, also
        through a view, has the old value (docs/decisions/0004).

        Raises CancelledError after an abort, which it polls between nodes; OutOfRangeError for an
        index out of range, and ComputeFailedError, each with the node as origin:
        `error.at(graph.origin(number))`; InvalidInputError for tensors of other types than the
        graph's; UnknownHandleError once the plan was freed.
        """

    def compute_in_turns(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort, turn: Turn
    ) -> None:
        """As `compute`; where it can stop for a while, it gives its turn to others that wait.

        Default: it keeps the device until its end.
        """
        self.compute(inputs, outputs, abort)

    def short_run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Callable[[], None], float] | None:
        """Return a function that runs on these tensors in the calling thread, and its time in
        microseconds.

        It may be called repeatedly while the tensors and the plan live, and raises the errors of
        `compute`. None unless a run is short and its duration constant, so that it needs no abort.
        Default: None.
        """
        return None

    def hosted_loop(
        self, loop: Loop, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> HostedLoop | None:
        """Start a loop whose steps go on at other hosts, and return it. None: the caller runs each
        step.

        Tensors are those of `compute`: inputs of the first step and outputs of the last one.
        Default: None.
        """
        return None

    @abstractmethod
    def free(self) -> None:
        """Free its memory. Idempotent; never called during `compute`."""

    def concurrency(self) -> Sequence[int]:
        """Return the number, from 1, of each node's set of concurrent steps. Default: all 0,
        alone."""
        return (0,) * len(self.graph.nodes)

    def measure(self, *, on: bool) -> None:
        """Measure the time of each step in the runs from now on, or end that.

        It may be called during a run, of which a part is then measured. Runs that are not measured
        take no longer for it. Default: nothing is measured.
        """

    def steps_and_times(self) -> tuple[Sequence[int], Sequence[float]]:
        """Return for each node the number, from 1, of the step that computes it, and the mean time
        of that step in the last measured runs, in microseconds. Default: all 0, not told."""
        count = len(self.graph.nodes)
        return (0,) * count, (0.0,) * count

    def memory_map(self) -> MemoryMap:
        """Return where its intermediate results lie, and when. Default: empty, not told."""
        return MemoryMap()

    def update(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        """Return a plan for another graph that takes over this one's memory where it suffices; free
        this one.

        Raises the errors of `Device.compile`, and then leaves this plan unchanged. Default:
        compiles afresh.
        """
        made = self.device.compile(graph, bindings, options)
        self.free()
        return made
