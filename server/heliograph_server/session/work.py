"""One command's work: on the thread of its device queue, or at once on the thread that brought it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from heliograph_backends.contract import Abort
from heliograph_proto.commands import Completion
from heliograph_server.plans.multi_device import MultiDevicePlan
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.handles import DeviceQueue
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import RunTask

if TYPE_CHECKING:
    from heliograph_server.session.executor import Executor


class CommandWork:
    """One command on its queue. Its methods report to the executor as they go."""

    __slots__ = ("abort", "executor", "is_queued", "device_lock", "queue", "result", "state")

    def __init__(
        self, executor: Executor, state: CommandState, queue: DeviceQueue, device_lock: DeviceLock
    ) -> None:
        self.executor = executor
        self.state = state
        self.queue = queue
        self.device_lock = device_lock
        self.abort = Abort()
        self.is_queued = False
        self.result = Completion(state.sequence)

    def note_queued(self) -> None:
        """It waits in its queue. One on several devices comes to each of them at some other time."""
        task = self.state.task
        if isinstance(task, RunTask) and not isinstance(task.plan.plan.plan, MultiDevicePlan):
            self.is_queued = True
            self.device_lock.run_queued()

    def note_done(self) -> None:
        """It is done, or will not be."""
        if self.is_queued:
            self.is_queued = False
            self.device_lock.run_done()

    def run(self) -> None:
        """On the queue's thread."""
        if self.executor.begin_work(self):
            # What waits for bytes uses none of the device's workers.
            with nullcontext() if self.state.takes_upload else self.device_lock:
                self._perform()

    def run_at_once(self) -> None:
        """On the thread that brought the command, which holds the session's lock."""
        if self.executor.begin_work(self):
            self._perform()

    def _perform(self) -> None:
        try:
            self.result = self.executor.do_work(self)
        except BaseException as error:  # it becomes the command's error
            self.executor.work_failed(self, error)
