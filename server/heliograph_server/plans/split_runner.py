"""Running the splits of a plan: one after the other, or concurrently where their dependencies allow
it.

Runs of a plan may overlap. On each device one run computes at a time, and the oldest one goes
first. So a younger run fills the gaps of an older one and delays it by at most its present split.

Device threads, and threads of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

from heliograph_backends.contract import Abort
from heliograph_proto.errors import CancelledError
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.splits import Clock, is_serial

#: Runs one split, given its number. Raises what the split's plan does.
Work: TypeAlias = Callable[[int, Abort], None]


class SplitRunner:
    """Runs the splits of one device in their order, each when those that it depends on have ended.

    The last split's device computes in the thread that calls `run`. Each other device has a thread,
    which lives as long as the runner. If no two splits can overlap there are no threads.
    """

    def __init__(self, schedule: Schedule, ended: Sequence[Clock]) -> None:
        self._ended = ended
        self._count = len(schedule.splits)
        self._chains: dict[int, list[int]] = {}
        for number, split in enumerate(schedule.splits):
            self._chains.setdefault(split.device, []).append(number)
        self._own = schedule.main
        self._threads: ThreadPoolExecutor | None = None
        if not is_serial(schedule, ended):
            self._threads = ThreadPoolExecutor(len(self._chains) - 1, "heliograph-split")

    def __repr__(self) -> str:
        return f"<SplitRunner of {self._count} splits on {len(self._chains)} devices>"

    def run(self, work: Work, abort: Abort) -> None:
        """Run all splits. The first failure ends the others; raises its error, or
        CancelledError."""
        if self._threads is None:
            for number in range(self._count):
                if abort.is_set:
                    raise CancelledError("the run was cancelled")
                work(number, abort)
            return
        run = _Run(self._ended, work, abort)
        with abort.watch(run.stop.set), run.stop.watch(run.wake):
            threads = list(self._start(self._threads, run))
            run.chain(self._own, self._chains[self._own])
            wait(threads)
        if run.error is not None:
            raise run.error

    def _start(self, threads: ThreadPoolExecutor, run: _Run) -> Iterator[Future[None]]:
        """Start the other devices' chains. If the system cannot start a thread, the run fails."""
        try:
            for device, numbers in self._chains.items():
                if device != self._own:
                    yield threads.submit(run.chain, device, numbers)
        except RuntimeError as error:
            run.fail(error)

    def close(self) -> None:
        """End the threads. Not to be called during `run`."""
        if self._threads is not None:
            self._threads.shutdown()


class _Run:
    """One run in progress."""

    def __init__(self, ended: Sequence[Clock], work: Work, abort: Abort) -> None:
        self._needed = ended
        self._work = work
        self._changed = threading.Condition()
        #: By device: the last split that has ended.
        self._ended = [-1] * (len(ended[0]) if ended else 0)
        self.stop = Abort(within=abort)
        #: The error that ended the run early.
        self.error: BaseException | None = None

    def chain(self, device: int, numbers: Sequence[int]) -> None:
        """Run the splits of one device. Raises nothing: see `error`."""
        for number in numbers:
            try:
                self._await(number)
                self._work(number, self.stop)
            except BaseException as error:
                self.fail(error)
                return
            with self._changed:
                self._ended[device] = number
                self._changed.notify_all()

    def wake(self) -> None:
        """Wake all waiting threads to check whether the run is to stop."""
        with self._changed:
            self._changed.notify_all()

    def _await(self, number: int) -> None:
        """Wait for the splits that one depends on. Raises CancelledError if the run stops."""
        needed = self._needed[number]
        with self._changed:
            self._changed.wait_for(lambda: self.stop.is_set or self._have_ended(needed))
        if self.stop.is_set:
            raise CancelledError("the run was cancelled")

    def _have_ended(self, needed: Clock) -> bool:
        return all(map(int.__ge__, self._ended, needed))

    def fail(self, error: BaseException) -> None:
        """End the run early. The first error counts."""
        with self._changed:
            if self.error is None:
                self.error = error
        self.stop.set()


class Precedence:
    """The turns of runs on one device. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        #: Ranks of the waiting runs, as a heap; a run waits at most once on one device.
        self._waiting: list[int] = []
        self._gone: set[int] = set()

    def __repr__(self) -> str:
        return f"<Precedence {'taken' if self._is_taken else 'free'}, {len(self._waiting)} wait>"

    @contextmanager
    def turn(self, rank: int, abort: Abort) -> Iterator[None]:
        """Hold the device, once it is free and no run of a lower rank waits. Raises
        CancelledError."""
        with abort.watch(self._wake):
            self._take(rank, abort)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

    def _take(self, rank: int, abort: Abort) -> None:
        with self._changed:
            heappush(self._waiting, rank)
            self._changed.wait_for(lambda: abort.is_set or (not self._is_taken and self._first() == rank))
            if abort.is_set:
                self._gone.add(rank)
                self._first()
                self._changed.notify_all()
                raise CancelledError("the run was cancelled")
            heappop(self._waiting)
            self._is_taken = True

    def _first(self) -> int:
        """Return the lowest rank that waits; -1 for none."""
        while self._waiting and self._waiting[0] in self._gone:
            self._gone.remove(heappop(self._waiting))
        return self._waiting[0] if self._waiting else -1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Precedences:
    """The turns on the devices of one plan, for all of its copies."""

    def __init__(self, devices: int) -> None:
        self.of = tuple(Precedence() for _ in range(devices))
        self._ranks = count()

    def rank(self) -> int:
        """Return the rank of a run that begins now: higher than all before."""
        return next(self._ranks)
