"""The interface of a shell, and handles, for both APIs.

The classes in `_base` send commands and check arguments; their subclasses (blocking, and in `aio`)
add the methods that wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from heliograph.core.connection_state import ConnectionState
from heliograph.core.future import Pending
from heliograph.core.inline_run import InlinePlan
from heliograph.core.protocol import ClientCore
from heliograph.core.watching import Watchers
from heliograph.graph.arguments import refuse_pickle
from heliograph_proto.addresses import Address
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.errors import (
    HeliographError,
    SessionClosedError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.sessions import SessionInfo

T = TypeVar("T")


class Shell(Protocol):
    """The methods of a shell that send commands without waiting."""

    address: Address
    info: SessionInfo
    core: ClientCore
    watchers: Watchers
    #: Functions to call with the error whenever the connection breaks.
    when_disconnected: list[Callable[[HeliographError], None]]
    #: True if `drive` waits in the caller's thread.
    can_wait: bool

    @property
    def connection_state(self) -> ConnectionState:
        """The state of the connection."""

    def advance(self, step: Callable[[], T]) -> T:
        """Perform one step of the core and its consequences."""

    def release(self, handle: int) -> None:
        """Free a handle soon; safe in destructors."""

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        """Send an inline run, at once if the caller `waits`.

        Returns None if it must take the general path.
        """

    def let_go(self, pending: Pending) -> None:
        """Let a run go on at observed nodes without waiting any more; safe in destructors."""


def forked() -> SessionClosedError:
    """Return the error of a session in the child of a fork."""
    return SessionClosedError(
        "the session belongs to the process that forked",
        advice="spawn the process instead, multiprocessing.get_context('spawn'), and connect there",
    )


def local_stays() -> UnsupportedError:
    """Return the error of a session that is not a daemon's, and is to move."""
    return UnsupportedError(
        "a session within this process cannot move", advice="connect to a daemon: heliograph serve"
    )


class Handle:
    """An object of the session with a handle. It is freed when it is garbage collected."""

    _kind = "handle"

    def __init__(self, shell: Shell, handle: int, *, owned: bool = True) -> None:
        self._shell = shell
        self._handle = handle
        #: True if this object must free the handle and has not done so yet.
        self._owned = owned
        self._freed = False

    @property
    def freed(self) -> bool:
        """True if it was freed."""
        return self._freed

    def free(self) -> None:
        """Free it on the server once earlier commands no longer need it. Idempotent."""
        self._freed = True
        if self._owned:
            self._owned = False
            self._shell.release(self._handle)
            self._shell.core.order_frees()

    def __reduce__(self) -> NoReturn:
        advice = "pass its elements: tensor.get()" if self._kind == "tensor" else "create it there"
        raise refuse_pickle(self._kind, advice)

    def __del__(self) -> None:
        if getattr(self, "_owned", False):
            self._owned = False
            self._shell.release(self._handle)

    def _used_in(self, shell: Shell) -> int:
        """Return the handle, for a command of a session. Raises UnknownHandleError."""
        if self._freed:
            raise UnknownHandleError(f"the {self._kind} was freed")
        if shell is not self._shell:
            raise UnknownHandleError(
                f"the {self._kind} belongs to another session", advice="handles are of one session alone"
            )
        return self._handle

    @property
    def _live_handle(self) -> int:
        return self._used_in(self._shell)

    @property
    def _state(self) -> str:
        if self._freed:
            return "freed"
        return "lost" if self._shell.core.lost is not None else "live"


class BoundTensor(Protocol):
    """A tensor of the session that is a leaf of a plan."""

    _handle: int

    @property
    def freed(self) -> bool: ...

    @property
    def device(self) -> str: ...
