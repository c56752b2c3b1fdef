"""What is known of a run when it has ended, for those who count and trace."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from heliograph_proto.errors import HeliographError
from heliograph_server.core.principals import ANYBODY, Principal


class RunRecord(NamedTuple):
    """One run of a plan. Times are `time.monotonic()`'s, in seconds, each at least the one before. A tuple,
    since one is made for each run, and a frozen dataclass takes several times as long to make."""

    session: int
    sequence: int
    #: The devices of its plan, by name.
    devices: tuple[str, ...]
    #: When its command came, when its turn had come, when its inputs were there, when the devices had
    #: computed, and when its outputs were where they go.
    came: float
    began: float
    had_inputs: float
    computed: float
    ended: float
    principal: Principal = ANYBODY
    #: What its command and its completion carried.
    received_bytes: int = 0
    sent_bytes: int = 0
    #: As W3C's traceparent has it; "": nobody asked that it be traced.
    trace_parent: str = ""
    #: Why it failed.
    error: HeliographError | None = None


class RunObserver(Protocol):
    """Told of every run, from the thread that ended it: to be quick, and to raise nothing."""

    def run_ended(self, run: RunRecord) -> None: ...
