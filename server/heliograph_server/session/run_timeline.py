"""The times of one session's runs, for the run observers of its host.

Without observers nothing is kept, and each method costs a look-up in an empty dictionary.

Any thread; `RunBook` says which methods need the session's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
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
    """One split of a run over several devices or hosts. Times are as in a RunRecord."""

    device: str
    #: The times when it began to wait for its inputs, had them, and had computed.
    began: float
    computing: float
    ended: float


class RunRecord(NamedTuple):
    """One run of a plan. Times are in seconds, by `time.monotonic()`, in ascending order.

    A tuple, since one is created for each run, and a frozen dataclass takes several times as long.
    """

    session: int
    sequence: int
    #: The devices of its plan, by name.
    devices: tuple[str, ...]
    #: The times when its command was received, its turn came, its inputs were there, the devices
    #: had computed, and its outputs were written.
    came: float
    began: float
    had_inputs: float
    computed: float
    ended: float
    principal: Principal = ANYBODY
    #: Bytes carried by its command and by its completion.
    received_bytes: int = 0
    sent_bytes: int = 0
    #: A W3C traceparent; "": it is not traced.
    trace_parent: str = ""
    #: The error with which it failed.
    error: HeliographError | None = None
    #: For a partition, the number of the run of the whole graph; otherwise 0.
    exchange_run: int = 0
    #: For a traced run, and where an observer wants them: its splits on this host, if it has several
    #: or is a partition.
    splits: tuple[SplitRecord, ...] = ()


class RunObserver(Protocol):
    """Receives every run, on the thread that ended it. It must be quick and must not raise.

    One with a true attribute `wants_splits` has the splits of untraced runs too.
    """

    def run_ended(self, run: RunRecord) -> None: ...


class Tracing(Protocol):
    """Creates the spans of a host."""

    @property
    def life(self) -> bytes:
        """The host's incarnation, which makes the spans of its runs unique."""

    def call(self, name: str, trace_parent: str, session: int) -> AbstractContextManager[str]:
        """A span while a call is answered. Yields its traceparent.

        `trace_parent` is the caller's. If that is "", there is no span, and "" is yielded.
        """


def span_of_run(life: bytes, session: int, sequence: int) -> str:
    """Return the span id of a run: 16 hexadecimal digits, always the same, not all of them 0."""
    found = blake2b(b"%d.%d" % (session, sequence), digest_size=8, key=life)
    return found.hexdigest() if any(found.digest()) else "1" * 16


logger = logging.getLogger(__name__)

#: A shorter gap between two splits is not counted as waiting for another host.
LEAST_WAIT_SECONDS = 10e-6


class RunTimes:
    """One run that has not ended. Times are as in a RunRecord; 0: not yet."""

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
    """The runs of one session.

    `came`, `ended`, `did` and `take` are called under the session's lock, the other methods from
    the thread that performs the run.
    """

    def __init__(
        self,
        session: int,
        principal: Principal,
        observers: Sequence[RunObserver],
        tracing: Tracing | None = None,
    ) -> None:
        """`observers` may change later; the change does not affect runs already under way."""
        self._session, self._principal, self._observers = session, principal, observers
        self._tracing = tracing
        #: The recorded runs that have not ended, by sequence number. Never replaced.
        self.under_way: dict[int, RunTimes] = {}
        self._records: list[RunRecord] = []

    def __repr__(self) -> str:
        return f"<RunBook of session {self._session}: {len(self.under_way)} under way>"

    @property
    def is_kept(self) -> bool:
        """True if there are observers."""
        return bool(self._observers)

    @property
    def _wants_splits(self) -> bool:
        return any(getattr(one, "wants_splits", False) for one in self._observers)

    @property
    def counts(self) -> tuple[int, int]:
        """The number of runs that wait for their turn, and of those that had it and have not ended.

        From any thread.
        """
        found = list(self.under_way.values())
        waiting = sum(1 for one in found if not one.began)
        return waiting, len(found) - waiting

    def came(self, sequence: int, run: RunCommand) -> None:
        """Record that a run's command was received."""
        if self._observers:
            carried = sum(len_bytes(one.data) for one in run.inputs if one.data is not None)
            self.under_way[sequence] = RunTimes(time.monotonic(), carried, run)

    def began(self, sequence: int, devices: Sequence[str]) -> None:
        """Record that its turn came, on these devices."""
        if (times := self.under_way.get(sequence)) is not None:
            times.began, times.devices = time.monotonic(), tuple(devices)

    def had_inputs(self, sequence: int) -> None:
        """Record that its inputs are there, and memory for its outputs."""
        if (times := self.under_way.get(sequence)) is not None:
            times.had_inputs = time.monotonic()

    def computed(self, sequence: int, plan: Plan | None = None) -> None:
        """Record that the devices have computed. `plan` may have the times of its splits."""
        if (times := self.under_way.get(sequence)) is not None:
            times.computed = time.monotonic()
            if isinstance(plan, MultiDevicePlan) and (times.trace_parent or self._wants_splits):
                times.splits = _splits_of(plan, times)

    def trace_of(self, sequence: int) -> str:
        """Return the traceparent of a run that has not ended, or ""."""
        times = self.under_way.get(sequence)
        return "" if times is None else times.trace_parent

    def gave(self, sequence: int, outputs: Iterable[tuple[int, Bytes]]) -> None:
        """Record the outputs that its completion carries."""
        if (times := self.under_way.get(sequence)) is not None:
            times.sent_bytes += sum(len_bytes(data) for _, data in outputs)

    def ended(self, sequence: int, error: HeliographError | None) -> None:
        """Record the end of a run. Phases that it did not finish have the time of its end."""
        times, end = self.under_way.pop(sequence), time.monotonic()
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
        """Record a run performed at once, as computing alone. `carried`: bytes in and out."""
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
        """Return the traceparent of a run's calls to other daemons.

        Without tracing here it is the run's own, so that the trace has no gap.
        """
        if self._tracing is None:
            return trace_parent
        return below(trace_parent, span_of_run(self._tracing.life, self._session, sequence))

    def take(self) -> Callable[[], None] | None:
        """Return a call, to make without the lock, that reports ended runs; None without any."""
        if not self._records:
            return None
        records, self._records = self._records, []
        return lambda: self._report(records)

    def _report(self, records: Sequence[RunRecord]) -> None:
        for observer in tuple(self._observers):
            for record in records:
                try:
                    observer.run_ended(record)
                except Exception:
                    logger.exception("an observer of runs failed")


def _splits_of(plan: MultiDevicePlan, times: RunTimes) -> tuple[SplitRecord, ...]:
    """The splits of the run that ended last, in the order in which they began.

    While a device of a partition is idle, its next split waits.
    """
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
