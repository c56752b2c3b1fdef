"""The observers of one session's runs in progress, and what they tell the core.

A thread that computes a run calls its observer. A loop at other hosts is fed and stopped through it
by the thread that carries out the core's instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock

from heliograph_backends.contract import HostedLoop
from heliograph_proto.commands import FeedLoop
from heliograph_proto.errors import HeliographError
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.feed_order import ToldFeeds
from heliograph_server.session.parts.edges import Edges
from heliograph_server.session.protocol.core import SessionCore
from heliograph_server.session.protocol.instructions import HandOn, Proceed, RunTask, StopLoop, Withdraw
from heliograph_server.session.taps import LoopObserver, Observer


class RunObservers:
    """Observers by sequence number. Thread-safe.

    `lock` guards the core. `event` passes an event to the core, and `later` makes a call without
    the lock, in order.
    """

    def __init__(
        self,
        core: SessionCore,
        lock: RLock,
        event: Callable[[Callable[[], None]], None],
        deliver: Callable[[], None],
        later: Callable[[Callable[[], object]], None],
        edges: Edges,
    ) -> None:
        self._edges = edges
        self._core, self._lock = core, lock
        self._event, self._deliver, self._later = event, deliver, later
        self._known: dict[int, Observer] = {}
        #: Calls that withdraw feeds from hosts, by sequence number.
        self._withdrawals: dict[int, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"<RunObservers {len(self._known)}>"

    def get(self, sequence: int) -> Observer | None:
        """Return the observer of a run."""
        return self._known.get(sequence)

    def add(self, sequence: int, task: RunTask, device_lock: DeviceLock) -> None:
        """Add the observer of a run that begins, if it has something to observe."""
        loaded: LoadedPlan = task.plan.plan
        if task.command.loop is not None:
            made = self._known[sequence] = LoopObserver(
                partial(self._stream, sequence),
                partial(self._take_feeds, sequence),
                partial(self._host, sequence),
                partial(self._count, sequence) if task.command.loop.counts_steps else None,
                device_lock,
                self._edges,
                sequence,
            )
            self._edges.add(sequence, made.wake)
        elif loaded.is_observed:
            self._known[sequence] = Observer(partial(self._send, sequence), device_lock)

    def end(self, sequence: int) -> None:
        """Forget the observer of a run that has ended."""
        self._known.pop(sequence, None)
        self._edges.remove(sequence)

    # Called by runs

    def _send(self, sequence: int, node: int, data: memoryview) -> bool:
        """Send the value of an observed node. True if the run must wait."""
        with self._lock:
            waits = self._core.taps.tapped(sequence, node, data)
        self._deliver()
        return waits

    def _stream(self, sequence: int, step: int, node: int, output: int | None, data: memoryview) -> bool:
        """Send a value of a loop. False if the loop must wait and try again."""
        with self._lock:
            was_sent = self._core.taps.stream(sequence, step, node, output, data)
        self._deliver()
        return was_sent

    def _count(self, sequence: int, steps: int) -> None:
        """Tell the client of a loop's complete steps."""
        with self._lock:
            self._core.taps.counted(sequence, steps)
        self._deliver()

    def _take_feeds(
        self, sequence: int, step: int, told: ToldFeeds | None
    ) -> tuple[list[FeedLoop], ToldFeeds]:
        """Return the feeds that a step of a loop takes, and report them."""
        with self._lock:
            taken = self._core.feeds.take(sequence, step, told)
        self._deliver()
        return taken

    def _host(self, sequence: int) -> None:
        """Hand on the feeds of a loop that has begun at other hosts, from now on."""
        self._event(partial(self._core.feeds.host, sequence))

    # Instructions

    def proceed(self, instruction: Proceed) -> None:
        """Resume a run that waits for its client."""
        if (observer := self._known.get(instruction.sequence)) is not None:
            observer.proceed()

    def stop(self, instruction: StopLoop) -> None:
        """End a loop at other hosts after its present step."""
        if (hosted := self._hosted(instruction.sequence)) is not None:
            self._later(hosted.stop)

    def hand_on(self, instruction: HandOn) -> None:
        """Send a feed to the hosts of its loop."""
        self._later(partial(self._feed, instruction))

    def withdraw(self, instruction: Withdraw) -> None:
        """Withdraw a feed from the hosts of its loop."""
        # Its own call may still have to hand it on.
        self._later(partial(self._withdraw, instruction.sequence))

    def _withdraw(self, sequence: int) -> None:
        with self._lock:
            call = self._withdrawals.get(sequence)
        if call is not None:
            call()

    def _feed(self, instruction: HandOn) -> None:
        done = partial(self._fed, instruction)
        hosted = self._hosted(instruction.loop)
        # The end of the loop ends the others.
        if hosted is not None:
            withdraw = hosted.feed(instruction.feed, done)
            with self._lock:
                if self._core.is_open(instruction.sequence):
                    self._withdrawals[instruction.sequence] = withdraw

    def _fed(self, instruction: HandOn, result: int | HeliographError) -> None:
        """Report a feed that a step at other hosts took, or none. Any thread."""
        self._event(partial(self._taken, instruction.sequence, result))

    def _taken(self, sequence: int, result: int | HeliographError) -> None:
        # With the lock, so that `_feed` adds no withdrawal between the two.
        self._withdrawals.pop(sequence, None)
        self._core.feeds.taken(sequence, result)

    def _hosted(self, sequence: int) -> HostedLoop | None:
        observer = self._known.get(sequence)
        return observer.hosted if isinstance(observer, LoopObserver) else None
