"""Observed runs while they compute: they send values of nodes, and may wait for their client.

Runs on device threads. Any thread resumes a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from heliograph_backends.contract import Abort, HostedLoop, Tensor, access
from heliograph_proto.commands import FeedLoop
from heliograph_proto.errors import CancelledError
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.feed_order import ToldFeeds
from heliograph_server.session.parts.edges import EdgeLoop, Edges

#: The least time between two counts of a loop's steps.
COUNT_SECONDS = 0.25


class Observer:
    """Sends the values of one run's observed nodes, one at a time: an `Observe`.

    `send` receives a node's number and its bytes, which it may keep. If it returns True, the run
    waits until `proceed`. This is the only place where a run waits for its client, and an abort of
    the run ends it. A waiting run does not occupy its device; its other splits still may.
    """

    def __init__(self, send: Callable[[int, memoryview], bool], device_lock: DeviceLock) -> None:
        self._send = send
        self._device_lock = device_lock
        self._changed = threading.Condition()
        self._is_sending = False
        self._may_proceed = False

    def __call__(self, node: int, tensor: Tensor, abort: Abort) -> None:
        """Send a node's value, on the device's thread. Raises CancelledError after an abort; a run
        that goes on to its end nevertheless waits no more."""
        data = memoryview(access.read_whole(tensor))
        # `send` takes the session's lock, whose holder may abort, so no lock is held around it.
        with abort.watch_request(self.wake), self._turn(abort):
            if self._send(node, data):
                with self._device_lock.outside():
                    self._wait(lambda: self._may_proceed, abort)

    @contextmanager
    def _turn(self, abort: Abort) -> Iterator[None]:
        """Wait until no other split sends a value."""
        with self._changed:
            self._wait(lambda: not self._is_sending, abort)
            self._is_sending, self._may_proceed = True, False
        try:
            yield
        finally:
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool], abort: Abort, seconds: float | None = None) -> bool:
        with self._changed:
            is_there = self._changed.wait_for(lambda: abort.is_requested or is_over(), seconds)
        if abort.is_set:
            raise CancelledError("the run was cancelled")
        return is_there

    def proceed(self) -> None:
        """Resume the run. May be called from any thread, and before the run waits."""
        with self._changed:
            self._may_proceed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Have a run that waits look again."""
        with self._changed:
            self._changed.notify_all()


class LoopObserver(Observer):
    """Sends the values that a loop streams, and waits while its client has too much unread.

    `stream` receives the step, a node's number or else an output's index, and the bytes. If it
    returns False, the value is sent again after `proceed`. It may raise. `take_feeds` receives the
    step, and what another partition told of its feeds; it returns the feeds that the step takes,
    and what to tell others. `host` has the loop's feeds handed on to its hosts. `tell` receives the
    number of complete steps now and then; None: the client does not want it. At `edges` the loop
    may be held between two steps.
    """

    def __init__(
        self,
        stream: Callable[[int, int, int | None, memoryview], bool],
        take_feeds: Callable[[int, ToldFeeds | None], tuple[Sequence[FeedLoop], ToldFeeds]],
        host: Callable[[], None],
        tell: Callable[[int], None] | None,
        device_lock: DeviceLock,
        edges: Edges,
        sequence: int,
    ) -> None:
        super().__init__(lambda _node, _data: False, device_lock)
        self._stream = stream
        self.take_feeds = take_feeds
        self._host = host
        self._tell, self._told_at = tell, time.monotonic()
        #: The current step.
        self.step = 0
        self._edges, self._sequence = edges, sequence
        #: The loop, if it may be held between two steps.
        self.loop: EdgeLoop | None = None
        #: The loop at other hosts, while it goes on there.
        self.hosted: HostedLoop | None = None

    def wait_until(self, is_over: Callable[[], bool], abort: Abort, seconds: float) -> bool:
        """Wait for what `proceed` reports. False if it did not come in time. Raises CancelledError
        after an abort."""
        with abort.watch_request(self.wake):
            return self._wait(lambda: is_over() or abort.is_set, abort, seconds)

    def count(self, steps: int) -> None:
        """Note complete steps. The client is told of them now and then, without waiting for it."""
        if self._tell is not None and (now := time.monotonic()) - self._told_at >= COUNT_SECONDS:
            self._told_at = now
            self._tell(steps)

    def at_edge(self, abort: Abort) -> None:
        """Wait between two steps if that is wanted. On the loop's thread."""
        if self._edges.is_wanted:
            with self._device_lock.outside():
                self._wait_at_edge(abort)

    @property
    def _is_edge_wanted(self) -> bool:
        return self._edges.is_wanted and self.loop is not None and self.loop.may_be_held

    def _wait_at_edge(self, abort: Abort, may_go: Callable[[], bool] = lambda: False) -> None:
        if self.loop is not None and self._is_edge_wanted:
            self._edges.wait(self._sequence, self.loop, abort, may_go)

    def outside(self) -> AbstractContextManager[None]:
        """A context that waits for other hosts, and does not occupy the device."""
        return self._device_lock.outside()

    @contextmanager
    def hosting(self, hosted: HostedLoop) -> Iterator[None]:
        """Hand on feeds and a stop to a loop at other hosts, during the block."""
        self.hosted = hosted
        self._host()
        try:
            yield
        finally:
            self.hosted = None

    def __call__(self, node: int, tensor: Tensor, abort: Abort) -> None:
        """Send a node's value, on the device's thread. Raises CancelledError after an abort."""
        self._send_value(node, None, memoryview(access.read_whole(tensor)), abort)

    def output(self, place: int, tensor: Tensor, abort: Abort) -> None:
        """Send an output of the current step, on the device's thread."""
        self.value(place, memoryview(access.read_whole(tensor)), abort)

    def value(self, place: int, data: memoryview, abort: Abort) -> None:
        """Send the bytes of an output of the current step."""
        self._send_value(0, place, data, abort)

    def _send_value(self, node: int, output: int | None, data: memoryview, abort: Abort) -> None:
        # Mostly there is room, and no other split sends: then it is sent whole, and nothing waits.
        if not self._is_sending and self._stream(self.step, node, output, data):
            return
        with abort.watch_request(self.wake), self._turn(abort):
            while not self._stream(self.step, node, output, data):
                if abort.is_requested:
                    break
                with self._device_lock.outside():
                    self._wait(lambda: self._may_proceed or self._is_edge_wanted, abort)
                    self._wait_at_edge(abort, lambda: self._may_proceed)
                self._may_proceed = False
