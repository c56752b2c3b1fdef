"""When the runs of one session were where: what its host's observers are told once they have ended.

Without observers nothing is kept, and asking costs a look at an empty dictionary.

Any thread; each method says whether under the session's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from heliograph_backends.contract import Plan
from heliograph_proto.commands import Bytes, RunCommand
from heliograph_proto.errors import HeliographError
from heliograph_proto.trace_context import below
from heliograph_server.plans.multi_device import MultiDevicePlan
from heliograph_server.resources.checks import len_bytes
from heliograph_server.resources.principals import ANYBODY, Principal


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
    #: Of a partition: which run of the whole it is; 0: of none.
    exchange_run: int = 0
    #: Of a run that is traced, where this host ran several splits or some for others.
    splits: tuple[SplitRecord, ...] = ()


class RunObserver(Protocol):
    """Told of every run, from the thread that ended it: to be quick, and to raise nothing."""

    def run_ended(self, run: RunRecord) -> None: ...


class Tracing(Protocol):
    """Makes spans of what a host does."""

    @property
    def life(self) -> bytes:
        """Of the host, so that no two runs anywhere have the same span."""

    def call(self, name: str, trace_parent: str, session: int) -> AbstractContextManager[str]:
        """The span of a call, while it is answered, of a caller with this traceparent; gives its own. Where
        that is "", there is no span, and nothing is given."""


def span_of_run(life: bytes, session: int, sequence: int) -> str:
    """16 hexadecimal digits, the same each time, not all of them 0."""
    found = blake2b(b"%d.%d" % (session, sequence), digest_size=8, key=life)
    return found.hexdigest() if any(found.digest()) else "1" * 16


logger = logging.getLogger(__name__)

#: What is shorter between two splits is no waiting for another host.
LEAST_WAIT_SECONDS = 10e-6


class RunTimes:
    """One run that has not ended. Times as a RunRecord has them; 0: not yet."""

    __slots__ = (
        "began",
        "came",
        "computed",
        "devices",
        "exchange_run",
        "had_inputs",
        "received_bytes",
        "sent_bytes",
        "splits",
        "trace_parent",
    )

    def __init__(self, came: float, received_bytes: int, run: RunCommand) -> None:
        self.came, self.trace_parent, self.exchange_run = came, run.trace_parent, run.exchange_run
        self.received_bytes, self.sent_bytes = received_bytes, 0
        self.began = self.had_inputs = self.computed = 0.0
        self.devices: tuple[str, ...] = ()
        self.splits: tuple[SplitRecord, ...] = ()


class RunBook:
    """Of one session. `came`, `ended`, `did` and `take` are called under its lock, the others from the thread
    that does the run."""

    def __init__(
        self,
        session: int,
        principal: Principal,
        observers: Sequence[RunObserver],
        tracing: Tracing | None = None,
    ) -> None:
        """`observers` may change later, but for runs that are under way then. `tracing`: what makes spans of
        them."""
        self._session, self._principal, self._observers = session, principal, observers
        self._tracing = tracing
        self._under_way: dict[int, RunTimes] = {}
        self._records: list[RunRecord] = []

    def __repr__(self) -> str:
        return f"<RunBook of session {self._session}: {len(self._under_way)} under way>"

    @property
    def is_kept(self) -> bool:
        """Whether somebody wants to know."""
        return bool(self._observers)

    @property
    def under_way(self) -> Container[int]:
        """The runs whose ends are to be told, by sequence number; always the same object."""
        return self._under_way

    @property
    def counts(self) -> tuple[int, int]:
        """How many runs wait for their turn, and how many have had it and not ended. From any thread."""
        found = list(self._under_way.values())
        waiting = sum(1 for one in found if not one.began)
        return waiting, len(found) - waiting

    def came(self, sequence: int, run: RunCommand) -> None:
        """A run's command is here."""
        if self._observers:
            carried = sum(len_bytes(one.data) for one in run.inputs if one.data is not None)
            self._under_way[sequence] = RunTimes(time.monotonic(), carried, run)

    def began(self, sequence: int, devices: Sequence[str]) -> None:
        """Its turn has come; on these devices."""
        if (times := self._under_way.get(sequence)) is not None:
            times.began, times.devices = time.monotonic(), tuple(devices)

    def had_inputs(self, sequence: int) -> None:
        """Its inputs and its outputs' memory are there."""
        if (times := self._under_way.get(sequence)) is not None:
            times.had_inputs = time.monotonic()

    def computed(self, sequence: int, plan: Plan | None = None) -> None:
        """Devices have done what there was to do; by this plan, which may tell of its splits."""
        if (times := self._under_way.get(sequence)) is not None:
            times.computed = time.monotonic()
            if times.trace_parent and isinstance(plan, MultiDevicePlan):
                times.splits = _splits_of(plan, times)

    def trace_of(self, sequence: int) -> str:
        """The traceparent of a run that has not ended, or ""."""
        times = self._under_way.get(sequence)
        return "" if times is None else times.trace_parent

    def gave(self, sequence: int, outputs: Iterable[tuple[int, Bytes]]) -> None:
        """Its completion carries these."""
        if (times := self._under_way.get(sequence)) is not None:
            times.sent_bytes += sum(len_bytes(data) for _, data in outputs)

    def ended(self, sequence: int, error: HeliographError | None) -> None:
        """Its client is told. What it never came to has the time of its end, and so has what it failed in."""
        times, end = self._under_way.pop(sequence), time.monotonic()
        began = times.began or end
        inputs = times.had_inputs or end
        self._records.append(
            RunRecord(
                self._session,
                sequence,
                times.devices,
                times.came,
                began,
                inputs,
                times.computed or end,
                end,
                self._principal,
                times.received_bytes,
                times.sent_bytes,
                times.trace_parent,
                error,
                times.exchange_run,
                times.splits,
            )
        )

    def did(
        self,
        sequence: int,
        devices: tuple[str, ...],
        began: float,
        carried: tuple[int, int],
        trace_parent: str = "",
        error: HeliographError | None = None,
    ) -> None:
        """A run was done where its command came: all of it is computing. `carried`: bytes in and out."""
        end, (received, sent) = time.monotonic(), carried
        self._records.append(
            RunRecord(
                self._session,
                sequence,
                devices,
                began,
                began,
                began,
                end,
                end,
                self._principal,
                received,
                sent,
                trace_parent,
                error,
            )
        )

    def below(self, trace_parent: str, sequence: int) -> str:
        """The traceparent of what a run asks of other daemons. Where nobody makes spans here, it is the run's
        own, so that there is no gap."""
        if self._tracing is None:
            return trace_parent
        return below(trace_parent, span_of_run(self._tracing.life, self._session, sequence))

    def take(self) -> Callable[[], None] | None:
        """What tells of those that have ended since, to be called without the lock; None: there are none."""
        if not self._records:
            return None
        records, self._records = self._records, []
        return lambda: self._tell(records)

    def _tell(self, records: Sequence[RunRecord]) -> None:
        for observer in tuple(self._observers):
            for record in records:
                try:
                    observer.run_ended(record)
                except Exception:
                    logger.exception("an observer of runs failed")


def _splits_of(plan: MultiDevicePlan, times: RunTimes) -> tuple[SplitRecord, ...]:
    """The splits of the run that ended last, in the order in which they began. As long as a device of a
    partition has nothing to do, the next split of it waits."""
    found: list[SplitRecord] = []
    free: dict[str, float] = {}
    for device, (began_us, waited_us, computed_us) in sorted(plan.split_times, key=lambda one: one[1][0]):
        began = times.had_inputs + began_us / 1e6
        computing = min(began + waited_us / 1e6, times.computed)
        idle = free.get(device, times.had_inputs)
        if times.exchange_run and began - idle > LEAST_WAIT_SECONDS:
            began = idle
        ended = free[device] = min(computing + computed_us / 1e6, times.computed)
        found.append(SplitRecord(device, began, computing, ended))
    return tuple(found)
