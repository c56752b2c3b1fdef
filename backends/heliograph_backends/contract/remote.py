"""Hosts that run partitions of a graph by themselves, and exchange values with each other meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heliograph_backends.contract.memory import Tensor
from heliograph_backends.contract.plan import DeviceCompileOptions, LeafBindings
from heliograph_proto.errors import HeliographError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import ContentOffer, Partition, PlanReport

if TYPE_CHECKING:
    from heliograph_backends.contract.device import Device
    from heliograph_backends.contract.memory import Buffer


@dataclass(frozen=True, slots=True)
class SiteWork:
    """A partition that a site is to compile."""

    graph: Graph
    partition: Partition
    #: Of the site: that of each node.
    devices: tuple[Device, ...]
    bindings: LeafBindings
    options: DeviceCompileOptions
    #: How many of its runs may be under way at once.
    pipeline: int = 1


class SiteRun(ABC):
    """A run of a partition: prepared, then started, then over."""

    @abstractmethod
    def start(self, number: int, ended: Callable[[], None]) -> None:
        """Sends it: the whole's run of this number. Does not wait; raises where it cannot be sent. `ended` is
        called once when it has ended, from any thread, and must not wait."""

    @property
    @abstractmethod
    def error(self) -> HeliographError | None:
        """What it failed with, once it has ended."""

    @abstractmethod
    def cancel(self) -> None:
        """Asks for its end, from any thread; does not wait."""

    @abstractmethod
    def finish(self) -> None:
        """Once it has ended well: all outputs are where they are wanted. May wait for bytes."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what was made for it. Idempotent."""


class SitePlan(ABC):
    """A partition, compiled on its site."""

    compute_bytes: int
    steps: int

    @abstractmethod
    def prepare(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> SiteRun:
        """A run on these tensors, of the partition's inputs that do not arrive, and its outputs; None: not
        wanted. Those that lie there are used in place. May wait for bytes on their way there."""

    @abstractmethod
    def report(self) -> PlanReport:
        """Where its nodes run, and how long the last run took; nodes and splits of the partition."""

    @abstractmethod
    def free(self) -> None:
        """Gives its memory back. Idempotent; never during a run."""


class Site(ABC):
    """A host with devices of its own that runs partitions. `Device.site` names it."""

    name: str

    @property
    @abstractmethod
    def address(self) -> str:
        """Where other sites reach it."""

    @property
    @abstractmethod
    def incarnation(self) -> bytes:
        """Which life of it."""

    @property
    @abstractmethod
    def why_not(self) -> str:
        """Why it cannot run partitions, in words; empty if it can."""

    @abstractmethod
    def compile(self, work: SiteWork) -> SitePlan:
        """Raises what `Device.compile` does, with the partition's node as origin."""

    @abstractmethod
    def check(self) -> None:
        """Raises MemberLostError when it is gone."""

    def confirm(self) -> None:
        """Waits, within a bound, until it has answered or is known to be gone. Default: that is known."""

    def can_reach(self, other: Site) -> bool:
        """Whether it can fetch values from another site, as far as is known. Default: yes."""
        return True

    def cannot_reach(self, other: Site) -> None:
        """It just could not. Default: nothing."""


@dataclass(frozen=True, slots=True)
class UploadNews:
    """What became of a content: an upload broke off after so many bytes, or it is over."""

    received_bytes: int
    is_over: bool
    #: Why it will not come.
    error: HeliographError | None = None


#: Called from any thread, also before `admit` returns, with the place of a content. Must not block long.
Tell: TypeAlias = Callable[[int, UploadNews], None]


class Intake(ABC):
    """Of all devices of one daemon: the same object."""

    @abstractmethod
    def admit(self, wanted: Sequence[tuple[bytes, Buffer]], tell: Tell) -> Admittance:
        """Announces contents by their digests, and the buffers of exactly their sizes, none of them empty, to
        which they go. Nobody else may write there until each is over. Raises what the daemon refuses it with,
        and MemberLostError or ConnectionError."""


class Admittance(ABC):
    """Contents that were announced together."""

    #: In their order.
    offers: tuple[ContentOffer, ...]

    @abstractmethod
    def relay(self, place: int) -> Relay:
        """Brings one of them from here. Raises as an upload does, and ConnectionError."""

    @abstractmethod
    def cancel(self) -> None:
        """What is not over will not come: its offers are void. Nothing is told from now on. Idempotent."""


class Relay(ABC):
    """Bytes on their way from here to the daemon."""

    #: How many are there already: the first piece begins there.
    received_bytes: int

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """The next piece, which is copied. Waits while much is on its way. Raises why it broke off."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until the content is there. Raises ContentMismatchError, or why it broke off."""

    @abstractmethod
    def cancel(self) -> None:
        """Breaks it off; what came stays for another. Idempotent."""
