"""Whether a device computes, so that a short run can be done at once, in the thread that brought it.

Two changes of thread cost more than a small plan computes. Doing it at once is safe for an event loop
only if it cannot wait for somebody else's long run on the same workers. So all who compute on a device
sign in; what is done at once holds the door shut meanwhile, and is not begun while anybody is inside.

Among those who have signed in, tenants have the device in turns (`fair`): a `FairShare` is the device as
one of them sees it. A turn is held only while one device computes what has all that it needs. Whoever holds
it waits for nothing, neither for another device, nor for values, nor for a client; so plans over several
devices cannot lock each other up.

Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from heliograph_backends.contract import Abort, Device
from heliograph_proto.errors import CancelledError
from heliograph_server.resources.fair_queue import FairFlow, FairQueue, Ticket

#: A plan that is expected to take longer than this goes to its device's thread.
SHORT_US = 50.0
#: How often one who waits looks whether a run that is waited for did not come.
LOOK_SECONDS = 0.02
#: So much of a device's time may be had at once before it counts.
UNCOUNTED_SECONDS = 1e-3


class DeviceLock:
    """Who computes on one device. Used as a context by those who compute in threads of their own."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._inside = 0
        #: Of those who left; and since when somebody is inside without a break.
        self._busy_seconds = 0.0
        self._since = 0.0
        #: The thread that holds the door shut; 0: none.
        self._shut_by = 0
        #: Whose turn it is among tenants.
        self.turns = DeviceTurns()

    @property
    def busy_seconds(self) -> float:
        """For how long somebody computed, so far."""
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
        """One of those who compute does not, for a while: it waits for its client."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def computing(self, abort: Abort, device: Device | None = None) -> AbstractContextManager[object]:
        """Held while this device computes. Raises CancelledError where that has to wait for others. `device`:
        if it may work on after the call that has it compute."""
        return nullcontext() if self.is_mine else self

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the door shut: what it does at once signs in nowhere."""
        return self._shut_by == threading.get_ident()

    def run_queued(self) -> None:
        """A run on this device alone waits in a queue."""

    def run_done(self) -> None:
        """It is done, or will not be."""

    def at_once(self, work: Callable[[], None]) -> bool:
        """Does short work here and now, unless somebody computes. Whether it did."""
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

    __slots__ = ("woken",)

    def __init__(self, flow: FairFlow) -> None:
        self.flow = flow
        self.has_begun = False
        #: Set when it begins; made under the lock if it has to wait.
        self.woken: threading.Event | None = None


class DeviceTurns:
    """A device's fair queue, and the threads that wait there."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock = threading.Lock()
        self._queue = FairQueue()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<DeviceTurns {self._queue!r}>"

    @property
    def is_shared(self) -> bool:
        """Whether several tenants want the device."""
        return self._queue.is_shared

    def begin(self, flow: FairFlow, abort: Abort) -> Ticket:
        """Waits for a turn; `end` it. Raises CancelledError after an abort."""
        ticket = _Waiting(flow)
        with self._lock:
            begun = self._queue.arrive(ticket, self._clock())
            if ticket.has_begun and len(begun) == 1:
                return ticket
            self._wake(begun)
            if ticket.has_begun:
                return ticket
            woken = ticket.woken = threading.Event()
        with abort.watch(woken.set):
            while not woken.wait(LOOK_SECONDS):
                self.look()
        with self._lock:
            if not ticket.has_begun:
                self._wake(self._queue.withdraw(ticket, self._clock()))
                raise CancelledError("the run was cancelled")
        return ticket

    def end(self, ticket: Ticket, queued: int = 0) -> None:
        """The device has computed; `queued`: how many runs of the tenant are to come or have come, this one
        among them."""
        with self._lock:
            has_more = queued > self._queue.count(ticket.flow)
            if begun := self._queue.end(ticket, self._clock(), has_more=has_more):
                self._wake(begun)

    def count(self, flow: FairFlow) -> int:
        """The runs of a tenant that want the device, or have it."""
        with self._lock:
            return self._queue.count(flow)

    def look(self, flow: FairFlow | None = None) -> None:
        """Time has passed, or no run of a tenant is about to come any more."""
        with self._lock:
            self._wake(self._queue.look(self._clock(), flow))

    def charge(self, flow: FairFlow, seconds: float) -> None:
        """A tenant had the device for so long without a turn, since nobody else wanted it."""
        with self._lock:
            self._queue.charge(flow, seconds, self._clock())

    @staticmethod
    def _wake(begun: list[Ticket]) -> None:
        for ticket in begun:
            if isinstance(ticket, _Waiting) and ticket.woken is not None:
                ticket.woken.set()


class FairShare(DeviceLock):
    """A device as one tenant's sessions see it: signing in is the same for all, turns are the tenant's."""

    def __init__(self, whole: DeviceLock, flow: FairFlow) -> None:
        self.whole = whole
        self.flow = flow
        self.turns = whole.turns
        #: What was done at once and is not charged yet.
        self._uncounted = 0.0
        self._counting = threading.Lock()
        #: Runs that were queued and are not done.
        self.queued = 0

    def __repr__(self) -> str:
        return f"<DeviceShare of {self.whole!r}>"

    def __enter__(self) -> None:
        self.whole.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.whole.__exit__(*exc)

    def computing(self, abort: Abort, device: Device | None = None) -> AbstractContextManager[object]:
        return nullcontext() if self.whole.is_mine else _Turn(self, abort, device)

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
        # Counted one by one, such runs would cost a good part of what they take.
        self._uncounted += time.perf_counter() - began
        if self._uncounted > UNCOUNTED_SECONDS:
            seconds, self._uncounted = self._uncounted, 0.0
            self.turns.charge(self.flow, seconds)
        return True


class _Turn:
    """While it is entered, the device is one tenant's."""

    __slots__ = ("_abort", "_device", "_share", "_ticket")

    def __init__(self, share: FairShare, abort: Abort, device: Device | None) -> None:
        self._share = share
        self._abort = abort
        self._device = device
        self._ticket: Ticket | None = None

    def __enter__(self) -> None:
        share = self._share
        share.whole.__enter__()
        try:
            self._ticket = share.turns.begin(share.flow, self._abort)
        except BaseException:
            share.whole.__exit__()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        share = self._share
        assert self._ticket is not None
        try:
            if kind is None and self._device is not None and share.turns.is_shared:
                # Else a device that works asynchronously would have the turn's work in its queue.
                self._device.finish()
        finally:
            share.turns.end(self._ticket, share.queued)
            share.whole.__exit__()


class DeviceShares(Mapping[str, DeviceLock]):
    """A tenant's shares of devices by name, made as they are asked for. `wholes`: those of the host."""

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


def computing(
    device_lock: AbstractContextManager[object] | None, abort: Abort, device: Device
) -> AbstractContextManager[object]:
    """Held while a device computes, by whoever need not sign in, too."""
    if isinstance(device_lock, DeviceLock):
        return device_lock.computing(abort, device)
    return device_lock or nullcontext()
