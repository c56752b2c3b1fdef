"""Observed runs while they compute: they send values of nodes, and may wait for their client.

Runs on device threads. Any thread resumes a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.commands import FeedLoop
from heliograph_proto.errors import CancelledError
from heliograph_server.resources.device_queue import DeviceLock


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
        with abort.watch_request(self._wake), self._turn(abort):
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

    def _wait(self, is_over: Callable[[], bool], abort: Abort) -> None:
        with self._changed:
            self._changed.wait_for(lambda: abort.is_requested or is_over())
        if abort.is_set:
            raise CancelledError("the run was cancelled")

    def proceed(self) -> None:
        """Resume the run. May be called from any thread, and before the run waits."""
        with self._changed:
            self._may_proceed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class LoopObserver(Observer):
    """Sends the values that a loop streams, and waits while its client has too much unread.

    `stream` receives the step, a node's number or else an output's index, and the bytes. If it
    returns False, the value is sent again after `proceed`. It may raise. `take_feeds` receives the
    step, and returns the feeds that it takes.
    """

    def __init__(
        self,
        stream: Callable[[int, int, int | None, memoryview], bool],
        take_feeds: Callable[[int], Sequence[FeedLoop]],
        device_lock: DeviceLock,
    ) -> None:
        super().__init__(lambda _node, _data: False, device_lock)
        self._stream = stream
        self.take_feeds = take_feeds
        #: The current step.
        self.step = 0

    def __call__(self, node: int, tensor: Tensor, abort: Abort) -> None:
        """Send a node's value, on the device's thread. Raises CancelledError after an abort."""
        self._send_value(node, None, tensor, abort)

    def output(self, place: int, tensor: Tensor, abort: Abort) -> None:
        """Send an output of the current step, on the device's thread."""
        self._send_value(0, place, tensor, abort)

    def _send_value(self, node: int, output: int | None, tensor: Tensor, abort: Abort) -> None:
        data = memoryview(access.read_whole(tensor))
        with abort.watch_request(self._wake), self._turn(abort):
            while not self._stream(self.step, node, output, data):
                if abort.is_requested:
                    break
                with self._device_lock.outside():
                    self._wait(lambda: self._may_proceed, abort)
                self._may_proceed = False
