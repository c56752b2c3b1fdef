"""What is known of a run when it has ended, for those who count and trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from heliograph_proto.errors import HeliographError
from heliograph_server.core.principals import ANYBODY, Principal


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """One split of a run over several devices or hosts. Times as a RunRecord has them."""

    device: str
    #: When it began to wait for what it reads, had that, and had computed.
    began: float
    computing: float
    ended: float


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
    #: Of a portion: which run of the whole it is; 0: of none.
    exchange_run: int = 0
    #: Of a run that is traced, where this host ran several splits or some for others.
    splits: tuple[SplitRecord, ...] = ()


class RunObserver(Protocol):
    """Told of every run, from the thread that ended it: to be quick, and to raise nothing."""

    def run_ended(self, run: RunRecord) -> None: ...
