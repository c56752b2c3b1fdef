"""What the blocking and the asyncio API share: what the API needs of a shell, and handles.

The classes of `_buffers`, `_devices`, `_plans`, `_sessions`, `_streams` and `_tensors` send commands and
check arguments; their subclasses in `session`, `plan`, `tensor`, `buffer`, `stream` (blocking) and `aio`
add the methods that wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from heliograph.core.future import Pending
from heliograph.core.inline_run import InlinePlan
from heliograph.core.protocol import ClientCore
from heliograph.core.watching import Watchers
from heliograph.graph.arguments import refuse_pickle
from heliograph_proto.addresses import Address
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.errors import UnknownHandleError
from heliograph_proto.sessions import SessionInfo

T = TypeVar("T")


class Shell(Protocol):
    """What the API needs of a shell to send commands without waiting."""

    address: Address
    info: SessionInfo
    core: ClientCore
    watchers: Watchers

    def advance(self, step: Callable[[], T]) -> T:
        """One step of the core, and what follows from it."""

    def release(self, handle: int) -> None:
        """Frees a handle soon; safe in destructors."""

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        """Sends an inline run, at once if somebody `waits`; None where it must go the ordinary way."""

    def let_go(self, pending: Pending) -> None:
        """A run waits at no observed node any more; safe in destructors."""


class Handle:
    """Something of the session that has a handle, and is freed when it is collected."""

    _kind = "handle"

    def __init__(self, shell: Shell, handle: int, *, owned: bool = True) -> None:
        self._shell = shell
        self._handle = handle
        #: Whether freeing it is up to this object, and was not done yet.
        self._owned = owned
        self._freed = False

    @property
    def freed(self) -> bool:
        """Whether somebody has freed it."""
        return self._freed

    def free(self) -> None:
        """Frees it on the server, once earlier commands no longer need it. Idempotent."""
        self._freed = True
        if self._owned:
            self._owned = False
            self._shell.release(self._handle)
            self._shell.core.order_frees()

    def __reduce__(self) -> NoReturn:
        advice = "pass its elements on: tensor.get()" if self._kind == "tensor" else "make it anew there"
        raise refuse_pickle(self._kind, advice)

    def __del__(self) -> None:
        if getattr(self, "_owned", False):
            self._owned = False
            self._shell.release(self._handle)

    def _used_in(self, shell: Shell) -> int:
        """The handle, for a command of a session. Raises UnknownHandleError."""
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
