"""A run that is observed, while it computes: what it tells of nodes, and where it waits for its client.

Device threads; any thread lets a run go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.errors import CancelledError
from heliograph_server.resources.device_queue import DeviceLock


class Observer:
    """Passes on the values of one run's observed nodes, one at a time: an `Observe`.

    `tell` takes a node's number and its bytes, which it may keep, and says whether the run is to wait now,
    until `proceed`. Nothing else waits for anybody outside, and whoever waits here ends with the run's abort.
    The run is no occupant of its device meanwhile; other splits of it that compute sign in themselves.
    """

    def __init__(self, tell: Callable[[int, memoryview], bool], device_lock: DeviceLock) -> None:
        self._tell = tell
        self._device_lock = device_lock
        self._changed = threading.Condition()
        self._is_telling = False
        self._may_proceed = False

    def __call__(self, node: int, tensor: Tensor, abort: Abort) -> None:
        """On the device's thread. Raises CancelledError after an abort."""
        data = memoryview(access.read_whole(tensor))
        # `tell` takes the session's lock, whose holder may abort: so none of ours is held around it.
        with abort.watch(self._wake), self._turn(abort):
            if self._tell(node, data):
                with self._device_lock.outside():
                    self._wait(lambda: self._may_proceed, abort)

    @contextmanager
    def _turn(self, abort: Abort) -> Iterator[None]:
        """Waits until no other split's node is told of."""
        with self._changed:
            self._wait(lambda: not self._is_telling, abort)
            self._is_telling, self._may_proceed = True, False
        try:
            yield
        finally:
            with self._changed:
                self._is_telling = False
                self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool], abort: Abort) -> None:
        with self._changed:
            self._changed.wait_for(lambda: abort.is_set or is_over())
        if abort.is_set:
            raise CancelledError("the run was cancelled")

    def proceed(self) -> None:
        """Lets the run go on. From any thread, also before it waits."""
        with self._changed:
            self._may_proceed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class LoopObserver(Observer):
    """Passes on what a loop streams, one value at a time, and waits while its client has too much unread.

    `stream` takes the step, a node's number or else an output's place, and the bytes; False: they are to be
    given again after `proceed`. It may raise.
    """

    def __init__(
        self, stream: Callable[[int, int, int | None, memoryview], bool], device_lock: DeviceLock
    ) -> None:
        super().__init__(lambda _node, _data: False, device_lock)
        self._stream = stream
        #: That which computes now.
        self.step = 0

    def __call__(self, node: int, tensor: Tensor, abort: Abort) -> None:
        self._pass_on(node, None, tensor, abort)

    def output(self, place: int, tensor: Tensor, abort: Abort) -> None:
        """An output of the step that was computed. On the device's thread, as a node."""
        self._pass_on(0, place, tensor, abort)

    def _pass_on(self, node: int, output: int | None, tensor: Tensor, abort: Abort) -> None:
        data = memoryview(access.read_whole(tensor))
        with abort.watch(self._wake), self._turn(abort):
            while not self._stream(self.step, node, output, data):
                with self._device_lock.outside():
                    self._wait(lambda: self._may_proceed, abort)
                self._may_proceed = False
