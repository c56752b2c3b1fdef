"""What a procedure may ask of the shell that runs it.

A procedure is a generator: it changes the core (`ClientCore`) and yields effects; the shell performs
each and sends back its result, or throws its error in. So everything that waits is written once, and
the blocking and the asyncio shell differ in a few lines. While a procedure runs between two yields
nobody else touches the core.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from heliograph.core.future import Outcome, Pending
from heliograph.core.methods import AnswerT, Method, RequestT
from heliograph_proto.errors import UnavailableError
from heliograph_proto.plans import ContentOffer


class UnreachableError(UnavailableError):
    """A daemon to which a content could go straight is not to be reached from here."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Until an outcome is done. Gives None; does not raise the outcome's error."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Compute:
    """Work for the processor that is too long for an event loop. Gives what the function returns."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class MoveBytes:
    """Moves bytes in memory: short, and never left behind half done. Gives None."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class StartUpload:
    """Starts carrying bytes to the server. Gives a `Transfer` at once."""

    #: A number that a command names, or the digest of a content.
    target: int | bytes
    data: memoryview
    #: The bytes before this one are on the server already; contents alone.
    offset_bytes: int = 0
    #: The command that waits for the bytes; it is cancelled if the upload breaks.
    pending: Pending | None = None
    #: Told the number of bytes that were taken each time.
    progress: Callable[[int], None] | None = None
    #: The daemon to which a content goes, if that is not the server.
    offer: ContentOffer | None = None


@dataclass(frozen=True, slots=True)
class ReceiveDownload:
    """Receives a transfer's bytes into `out`. Gives None when all have come."""

    transfer: int
    out: memoryview


@dataclass(frozen=True, slots=True)
class MapMemory:
    """Maps the memory of a tensor's buffer. Gives its bytes, and where in them the tensor begins."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Call:
    """A question to the server. Gives its answer."""

    method: Method[Any, Any]
    request: Any


Effect: TypeAlias = WaitFor | Compute | MoveBytes | StartUpload | ReceiveDownload | MapMemory | Call

T = TypeVar("T")
Procedure: TypeAlias = Generator[Effect, Any, T]


def ask(method: Method[RequestT, AnswerT], request: RequestT) -> Procedure[AnswerT]:
    """The server's answer to a question."""
    answer: AnswerT = yield Call(method, request)
    return answer
