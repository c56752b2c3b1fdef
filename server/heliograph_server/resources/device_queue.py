"""Locks and turns of a device, and whether a short run may compute at once in the calling thread.

Two thread switches cost more than a small plan computes. Computing at once is safe for an event
loop only if it cannot wait for a long run on the same workers. So every computation enters the
device's `DeviceLock`. A run at once holds the lock's mutex, and only begins while no computation is
inside.

Among the computations inside, tenants take turns (`fair_queue`): a `FairShare` is the device as one
tenant sees it. A turn is held only while one device computes with all inputs present. Its holder
waits for nothing: no other device, no value, no client. So plans over several devices cannot
deadlock.

A long run gives its turn away when it can, if a tenant that is behind waits for it
(`DeviceTurn.give`). It stays inside the device meanwhile, so that no run at once begins: that could
need what the paused run holds.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from heliograph_backends.contract import Abort, Device, Plan, Tensor, Turn
from heliograph_proto.errors import CancelledError
from heliograph_server.resources.fair_queue import FairFlow, FairQueue, Ticket

#: A plan with a longer expected time runs on its device's thread.
SHORT_US = 50.0
#: The interval at which a waiting run checks whether an expected run failed to arrive.
LOOK_SECONDS = 0.02
#: Device time of runs at once is charged in steps of this size.
UNCOUNTED_SECONDS = 1e-3


class DeviceLock:
    """The computations on one device. A context manager for those in threads of their own."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._inside = 0
        #: The time of past computations, and the start of the current busy period.
        self._busy_seconds = 0.0
        self._since = 0.0
        #: The thread that runs at once; 0: none.
        self._shut_by = 0
        #: The turns of tenants.
        self.turns = DeviceTurns()

    @property
    def busy_seconds(self) -> float:
        """The total time in seconds in which the device computed."""
        with self._door:
            running = time.monotonic() - self._since if self._inside else 0.0
            return self._busy_seconds + running

    def __repr__(self) -> str:
        return f"<DeviceLock {self._inside}>"

    def __enter__(self) -> None:
        with self._door:
            if not self._inside:
                self._since = time.monotonic()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._door:
            self._inside -= 1
            if not self._inside:
                self._busy_seconds += time.monotonic() - self._since

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave the device for a while, when a computation waits for its client."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def computing(
        self, abort: Abort, device: Device | None = None
    ) -> AbstractContextManager[DeviceTurn | None]:
        """A context in which this device computes, in a turn if there are other tenants. Raises
        CancelledError if that has to wait for others.

        `device` is set if it may still be working after the call that made it compute.
        """
        return nullcontext() if self.is_mine else self

    @property
    def is_mine(self) -> bool:
        """True if this thread runs at once; its work need not enter again."""
        return self._shut_by == threading.get_ident()

    def run_queued(self) -> None:
        """Note that a run on only this device is queued."""

    def run_done(self) -> None:
        """Note that a queued run is done, or will not run."""

    def at_once(self, work: Callable[[], None]) -> bool:
        """Do short work now in this thread, unless the device computes. Return True if it was
        done."""
        if not self._door.acquire(blocking=False):
            return False
        try:
            if self._inside:
                return False
            began = time.monotonic()
            self._shut_by = threading.get_ident()
            work()
            self._busy_seconds += time.monotonic() - began
            return True
        finally:
            self._shut_by = 0
            self._door.release()


class _Waiting(Ticket):
    """A run that waits in a thread of its own."""

    __slots__ = ("asked", "woken")

    def __init__(self, flow: FairFlow) -> None:
        super().__init__(flow)
        #: Set when the run begins. Created under the lock if it has to wait.
        self.woken: threading.Event | None = None
        #: Called when the run should give its turn to another one; None: it cannot.
        self.asked: Callable[[], None] | None = None


class DeviceTurns:
    """A device's fair queue, and the threads that wait in it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock = threading.Lock()
        self._queue = FairQueue()
        self._clock = clock
        #: The run whose thread looks after the others' slices: the last that began to wait.
        self._keeper: _Waiting | None = None

    def __repr__(self) -> str:
        return f"<DeviceTurns {self._queue!r}>"

    @property
    def is_shared(self) -> bool:
        """True if several tenants need the device."""
        return self._queue.is_shared

    def begin(self, flow: FairFlow, abort: Abort) -> _Waiting:
        """Wait for a turn, and `end` it later. Raises CancelledError after an abort."""
        ticket = _Waiting(flow)
        with self._lock:
            begun = self._queue.arrive(ticket, self._clock())
            if ticket.has_begun and len(begun) == 1:
                return ticket
            self._wake(begun)
            if ticket.has_begun:
                return ticket
            woken = ticket.woken = threading.Event()
        self._await(ticket, woken, abort)
        return ticket

    def give(self, ticket: _Waiting, abort: Abort) -> None:
        """Give a turn to others that wait, and wait for the next one. Raises CancelledError after
        an abort: the turn is ended then."""
        with self._lock:
            woken = ticket.woken = threading.Event()
            self._wake(self._queue.pause(ticket, self._clock()))
            if ticket.has_begun:
                return
        self._await(ticket, woken, abort)

    def _await(self, ticket: _Waiting, woken: threading.Event, abort: Abort) -> None:
        """Wait until a run begins, and meanwhile have others give their turns to it."""
        with self._lock:
            self._keeper = ticket
        with abort.watch(woken.set):
            while not woken.wait(self._look_for(ticket)):
                pass
        with self._lock:
            if self._keeper is ticket:
                self._keeper = None
            if not ticket.has_begun:
                self._wake(self._queue.withdraw(ticket, self._clock()))
                raise CancelledError("the run was cancelled")

    def _look_for(self, ticket: _Waiting) -> float:
        """Look at the queue for a run that waits, and return the seconds until its next look.

        One waiting run looks often, so that many do not all wake up with each slice.
        """
        with self._lock:
            now = self._clock()
            self._wake(self._queue.look(now))
            if self._keeper is None:
                self._keeper = ticket
            if self._keeper is not ticket:
                return LOOK_SECONDS
            overdue, seconds = self._queue.overdue(now)
            for one in overdue:
                if isinstance(one, _Waiting) and one.asked is not None:
                    one.asked()
            return min(seconds, LOOK_SECONDS)

    @contextmanager
    def watch(self, ticket: _Waiting, hook: Callable[[], None]) -> Iterator[None]:
        """Call `hook` when this run should give its turn to others, during the block."""
        with self._lock:
            ticket.asked = hook
        try:
            yield
        finally:
            with self._lock:
                ticket.asked = None

    def end(self, ticket: Ticket, queued: int = 0) -> None:
        """End a turn. `queued` is the tenant's number of queued or arrived runs, including this
        one."""
        with self._lock:
            has_more = queued > self._queue.count(ticket.flow)
            if begun := self._queue.end(ticket, self._clock(), has_more=has_more):
                self._wake(begun)

    def count(self, flow: FairFlow) -> int:
        """The runs of a tenant that wait for the device or have it."""
        with self._lock:
            return self._queue.count(flow)

    def look(self, flow: FairFlow | None = None) -> None:
        """Update the queue after time has passed, or when a tenant has no run about to arrive."""
        with self._lock:
            self._wake(self._queue.look(self._clock(), flow))

    def charge(self, flow: FairFlow, seconds: float) -> None:
        """Charge device time that a tenant used without a turn, because no other tenant needed the
        device."""
        with self._lock:
            self._queue.charge(flow, seconds, self._clock())

    @staticmethod
    def _wake(begun: list[Ticket]) -> None:
        for ticket in begun:
            if isinstance(ticket, _Waiting) and ticket.woken is not None:
                ticket.woken.set()


class FairShare(DeviceLock):
    """A device as one tenant's sessions see it. Entering it is common to all tenants; turns are the
    tenant's."""

    def __init__(self, whole: DeviceLock, flow: FairFlow) -> None:
        self.whole = whole
        self.flow = flow
        self.turns = whole.turns
        #: Time of runs at once that is not charged yet.
        self._uncounted = 0.0
        self._counting = threading.Lock()
        #: Runs that are queued and not done.
        self.queued = 0

    def __repr__(self) -> str:
        return f"<FairShare of {self.whole!r}>"

    def __enter__(self) -> None:
        self.whole.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.whole.__exit__(*exc)

    def computing(
        self, abort: Abort, device: Device | None = None
    ) -> AbstractContextManager[DeviceTurn | None]:
        return nullcontext() if self.whole.is_mine else DeviceTurn(self, abort, device)

    def run_queued(self) -> None:
        with self._counting:
            self.queued += 1

    def run_done(self) -> None:
        with self._counting:
            self.queued -= 1
        if self.turns.is_shared and self.queued <= self.turns.count(self.flow):
            self.turns.look(self.flow)

    def at_once(self, work: Callable[[], None]) -> bool:
        began = time.perf_counter()
        if not self.whole.at_once(work):
            return False
        # Charging each run by itself would cost a large part of the run.
        self._uncounted += time.perf_counter() - began
        if self._uncounted > UNCOUNTED_SECONDS:
            seconds, self._uncounted = self._uncounted, 0.0
            self.turns.charge(self.flow, seconds)
        return True


class DeviceTurn(Turn):
    """A context in which the device is one tenant's."""

    __slots__ = ("_abort", "_device", "_share", "_ticket", "paused_seconds")

    def __init__(self, share: FairShare, abort: Abort, device: Device | None) -> None:
        self._share = share
        self._abort = abort
        self._device = device
        self._ticket: _Waiting | None = None
        #: The time in which others had the device.
        self.paused_seconds = 0.0

    def __enter__(self) -> DeviceTurn:
        share = self._share
        share.whole.__enter__()
        try:
            self._ticket = share.turns.begin(share.flow, self._abort)
        except BaseException:
            share.whole.__exit__()
            raise
        return self

    def watch(self, hook: Callable[[], None]) -> AbstractContextManager[None]:
        assert self._ticket is not None
        return self._share.turns.watch(self._ticket, hook)

    def give(self) -> None:
        assert self._ticket is not None
        began = time.perf_counter()
        self._share.turns.give(self._ticket, self._abort)
        self.paused_seconds += time.perf_counter() - began

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        share = self._share
        assert self._ticket is not None
        try:
            if kind is None and self._device is not None and share.turns.is_shared:
                # Otherwise an asynchronous device would still have this turn's work in its queue.
                self._device.finish()
        finally:
            # A run that was cancelled while others had its turn has none.
            if self._ticket.has_begun:
                share.turns.end(self._ticket, share.queued)
            share.whole.__exit__()


class DeviceShares(Mapping[str, DeviceLock]):
    """A tenant's shares of devices by name, created on demand. `wholes` are the devices' own
    locks."""

    def __init__(self, wholes: Mapping[str, DeviceLock], flow: FairFlow) -> None:
        self.wholes = wholes
        self._flow = flow
        self._shares: dict[str, FairShare] = {}

    def __getitem__(self, name: str) -> DeviceLock:
        found = self._shares.get(name)
        if found is None:
            found = self._shares.setdefault(name, FairShare(self.wholes[name], self._flow))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.wholes)

    def __len__(self) -> int:
        return len(self.wholes)


def compute(
    plan: Plan,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    abort: Abort,
    turn: Turn | None,
) -> None:
    """Run a plan once; with `turn`, in turns with other tenants. Raises what `Plan.compute`
    does."""
    if turn is None:
        plan.compute(inputs, outputs, abort)
    else:
        plan.compute_in_turns(inputs, outputs, abort, turn)
