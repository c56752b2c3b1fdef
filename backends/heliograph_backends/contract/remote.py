"""Hosts that run partitions of a graph and exchange values with each other during a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heliograph_backends.contract.memory import Tensor
from heliograph_backends.contract.plan import DeviceCompileOptions, HostedLoop, LeafBindings
from heliograph_proto.commands import Loop
from heliograph_proto.errors import HeliographError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import ContentOffer, Partition, PlanReport

if TYPE_CHECKING:
    from heliograph_backends.contract.device import Device
    from heliograph_backends.contract.memory import Buffer


@dataclass(frozen=True, slots=True)
class SiteWork:
    """A partition for a site to compile."""

    graph: Graph
    partition: Partition
    #: The site's device of each node.
    devices: tuple[Device, ...]
    bindings: LeafBindings
    options: DeviceCompileOptions
    #: The number of its runs that may be in flight at once.
    pipeline: int = 1


class SiteRun(ABC):
    """A run of a partition: prepared, then started, then ended."""

    @abstractmethod
    def start(self, number: int, ended: Callable[[], None]) -> None:
        """Send it as the whole graph's run `number`, without waiting. Raises if it cannot be sent.

        `ended` is called once when the run has ended, from any thread, and must not block.
        """

    @property
    @abstractmethod
    def error(self) -> HeliographError | None:
        """The error with which it ended; None if it succeeded."""

    @abstractmethod
    def cancel(self) -> None:
        """Request its end, from any thread, without waiting."""

    @abstractmethod
    def finish(self) -> None:
        """Wait, after success, until all outputs are in their tensors."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the run. Idempotent."""


class SitePlan(ABC):
    """A partition, compiled on its site."""

    compute_bytes: int
    steps: int

    @abstractmethod
    def prepare(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> SiteRun:
        """Prepare a run on tensors of the partition's inputs that do not arrive, and of its
        outputs.

        None: output not needed. Tensors on the site are used in place. May wait for bytes on their
        way there.
        """

    def prepare_loop(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], stack: ExitStack
    ) -> Callable[[Loop, int], HostedLoop]:
        """Prepare a loop as `prepare` does a run; `stack` is closed at its end. Return a call that
        starts this partition's part, as the whole graph's runs from a number on.

        The call does not wait. It raises LimitExceededError if there is no room for more loops that
        stream. Default: raises UnsupportedError.
        """
        raise UnsupportedError("a loop of a partition")

    def measure(self, *, on: bool) -> None:
        """Measure the time of each step in the runs from now on, or end that. Default: nothing is
        measured."""

    @abstractmethod
    def report(self) -> PlanReport:
        """Return the placement of the partition's nodes and the times of the last run."""

    @abstractmethod
    def free(self) -> None:
        """Free its memory. Idempotent; never called during a run."""


class Site(ABC):
    """A host with devices that runs partitions. `Device.site` refers to it."""

    name: str

    @property
    @abstractmethod
    def address(self) -> str:
        """The address at which other sites reach it."""

    @property
    @abstractmethod
    def incarnation(self) -> bytes:
        """Its current incarnation."""

    @property
    @abstractmethod
    def why_not(self) -> str:
        """The reason why it cannot run partitions; empty if it can."""

    @property
    def exchanges_loops(self) -> bool:
        """True if loops of its partitions exchange values with other sites between two steps.
        Default: True."""
        return True

    @abstractmethod
    def compile(self, work: SiteWork) -> SitePlan:
        """Compile a partition. Raises errors as `Device.compile`, with the partition's node as
        origin."""

    @abstractmethod
    def check(self) -> None:
        """Raise MemberLostError if it is lost."""

    def confirm(self) -> None:
        """Wait, for a bounded time, until it answers or is known to be lost. Default: no wait."""

    def can_reach(self, other: Site) -> bool:
        """True if it can fetch values from another site, as far as known. Default: True."""
        return True

    def look_again(self, other: Site) -> None:
        """Probe another site that it could not reach, unless that was done just now. Blocks for a
        few seconds at most. Default: nothing."""

    def cannot_reach(self, other: Site) -> None:
        """Report that a fetch from another site just failed. Default: nothing."""


@dataclass(frozen=True, slots=True)
class UploadNews:
    """The progress of a content: its upload broke off after some bytes, or it has ended."""

    received_bytes: int
    is_over: bool
    #: The reason why it failed for good.
    error: HeliographError | None = None


#: Called with the place of a content, from any thread, perhaps before `admit` returns. Must not
#: block long.
Tell: TypeAlias = Callable[[int, UploadNews], None]


class Intake(ABC):
    """The direct path for contents into another daemon's devices: one object for all of them."""

    @abstractmethod
    def admit(self, contents: Sequence[tuple[bytes, Buffer]], tell: Tell) -> Admittance:
        """Announce contents by digest, with the buffers for them, which have exactly their sizes,
        not 0.

        The caller must not write these buffers until each content has ended. Raises the daemon's
        refusal, MemberLostError or ConnectionError.
        """


class Admittance(ABC):
    """Contents announced together."""

    #: In the order of the contents.
    offers: tuple[ContentOffer, ...]

    @abstractmethod
    def relay(self, place: int) -> Relay:
        """Start to upload one content from here. Raises an upload's errors and ConnectionError."""

    @abstractmethod
    def cancel(self) -> None:
        """Void the offers of unfinished contents; `tell` is not called again. Idempotent."""


class Relay(ABC):
    """An upload from here to the daemon."""

    #: The bytes that the daemon already has: the first piece starts there.
    received_bytes: int

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Send a copy of the next piece. Blocks while much is in flight. Raises why it broke off."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the content is complete. Raises ContentMismatchError, or why it broke off."""

    @abstractmethod
    def cancel(self) -> None:
        """Break it off; another upload may continue from the received bytes. Idempotent."""
