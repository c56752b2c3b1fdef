"""A daemon that takes contents straight into its memory from others: for devices of other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.description import ContentOffer
from heliograph_proto.errors import HeliographError

if TYPE_CHECKING:
    from heliograph_backends.contract.memory import Buffer


@dataclass(frozen=True, slots=True)
class News:
    """What became of a content: an upload broke off after so many bytes, or it is over."""

    received_bytes: int
    is_over: bool
    #: Why it will not come.
    error: HeliographError | None = None


#: Called from any thread, also before `admit` returns, with the place of a content. Must not block long.
Tell: TypeAlias = Callable[[int, News], None]


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
