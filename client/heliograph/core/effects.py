"""The effects that a procedure may yield to the shell that runs it.

A procedure is a generator: it changes the core (`ClientCore`) and yields effects. The shell
performs each effect and sends back its result, or throws its error into the generator. So
everything that waits is written once, and the blocking and the asyncio shell differ in a few lines.
Between two yields no other code uses the core.
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
    """A daemon to which a content could go directly cannot be reached from here."""


def do_nothing() -> None:
    """Begin no work for the time of a wait."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait until an outcome is done. Gives None; does not raise the outcome's error."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a function that would take too long for an event loop. Gives its result."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class MoveBytes:
    """Move bytes in memory: a short step that is never abandoned half done. Gives None."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class StartUpload:
    """Start to send bytes to the server. Gives a `Transfer` at once."""

    #: A number that a command names, or the digest of a content.
    target: int | bytes
    data: memoryview
    #: The bytes before this one are on the server already.
    offset_bytes: int = 0
    #: The command that waits for the bytes; it is cancelled if the upload fails.
    pending: Pending | None = None
    #: Called with the number of bytes that were taken each time.
    progress: Callable[[int], None] | None = None
    #: The daemon that receives a content, if it is not the server.
    offer: ContentOffer | None = None
    #: The attempts before this one, which broke off.
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveDownload:
    """Receive a transfer's bytes into `out`. Gives None when all have arrived."""

    transfer: int
    out: memoryview


@dataclass(frozen=True, slots=True)
class MapMemory:
    """Map the memory of a tensor's buffer. Gives its bytes, and the tensor's position in them."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the server. Gives its answer."""

    method: Method[Any, Any]
    request: Any
    #: Called when the request is on its way to another process, again if it is sent again.
    sent: Callable[[], object] = do_nothing


Effect: TypeAlias = WaitFor | Compute | MoveBytes | StartUpload | ReceiveDownload | MapMemory | Call

T = TypeVar("T")
Procedure: TypeAlias = Generator[Effect, Any, T]


def ask(method: Method[RequestT, AnswerT], request: RequestT) -> Procedure[AnswerT]:
    """Call a method of the server and return its answer."""
    answer: AnswerT = yield Call(method, request)
    return answer
