"""The work of one command, on the thread of its device queue or on the thread that submitted it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from heliograph_backends.contract import Abort
from heliograph_proto.commands import Completion
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.multi_device import MultiDevicePlan
from heliograph_server.plans.stepwise import Stepwise
from heliograph_server.resources.checks import len_bytes
from heliograph_server.resources.device_queue import SHORT_US, DeviceLock
from heliograph_server.resources.handles import DeviceQueue, HandleStorage, TensorHandle
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import CopyTask, ReadTask, RunTask, WriteTask

if TYPE_CHECKING:
    from heliograph_server.session.executor import Executor


#: A copy of more bytes than these has its turn on its device's thread.
QUICK_BYTES = 64 * 1024


class CommandWork:
    """One command on its queue. Its methods report to the executor."""

    __slots__ = ("abort", "came", "executor", "is_queued", "device_lock", "queue", "result", "state")

    def __init__(
        self, executor: Executor, state: CommandState, queue: DeviceQueue, device_lock: DeviceLock
    ) -> None:
        self.executor = executor
        self.state = state
        self.queue = queue
        self.device_lock = device_lock
        self.abort = Abort()
        #: True while the device lock counts it as a queued run.
        self.is_queued = False
        self.result = Completion(state.sequence)
        #: When it entered its queue.
        self.came = time.perf_counter()

    def run(self) -> None:
        """Perform the work on the queue's thread."""
        if self.executor.begin_work(self):
            task = self.state.task
            if isinstance(task, RunTask):
                loaded: LoadedPlan = task.plan.plan
                loaded.copies[task.slot].times.waited_us += (time.perf_counter() - self.came) * 1e6
            # Work that waits for its client occupies none of the device's workers.
            with nullcontext() if self.state.waits_for_client else self.device_lock:
                self.executor.do_work(self)

    def enqueue(self, here: list[Callable[[], None]] | None) -> None:
        """Queue the work; in `here`, if given, where the submitting thread does it itself."""
        task, done = self.state.task, partial(self.executor.work_done, self)
        # A run on several devices reaches each of them at its own time.
        if isinstance(task, RunTask) and not isinstance(task.plan.plan.plan, MultiDevicePlan):
            self.is_queued = True
            self.device_lock.run_queued()
        # One that waits for its client would keep the client's own thread.
        if here is not None and not self.state.waits_for_client:
            mine = self.queue.stream.submit_here(self.run, done)
            if mine is not None:
                here.append(mine)
                return
        self.queue.stream.submit(self.run, done)

    def done_at_once(self) -> bool:
        """Perform short work on the submitting thread, which holds the session's lock. False if it
        is long, or its device computes."""
        if not (is_short(self) and self.device_lock.at_once(self._run_at_once)):
            return False
        self.executor.work_done(self, None)
        return True

    def _run_at_once(self) -> None:
        if self.executor.begin_work(self):
            self.executor.do_work(self)


def stepwise_of(task: RunTask) -> Stepwise | None:
    """Return the steps of a partition whose splits are all short, if the run touches no
    tensors."""
    if not task.command.exchange_run or task.command.loop is not None:
        return None
    if any(isinstance(one, TensorHandle) for one in task.inputs):
        return None
    if any(one.tensor is not None or one.into is not None for one in task.outputs):
        return None
    loaded: LoadedPlan = task.plan.plan
    return loaded.copies[task.slot].stepwise()


def is_short(work: CommandWork) -> bool:
    """True if work is quick and on the host, so that it is performed at once."""
    task = work.state.task
    if not isinstance(task, RunTask):
        return isinstance(task, (WriteTask, ReadTask, CopyTask)) and _copies_little(task)
    # The number of steps of a loop is unknown, however short they are.
    if task.command.loop is not None:
        return False
    loaded: LoadedPlan = task.plan.plan
    if loaded.expected_us >= SHORT_US or not loaded.is_on_host:
        return False
    bound = (*task.inputs, *(one.into for one in task.outputs))
    storages = (one.storage for one in bound if isinstance(one, TensorHandle))
    return all(one is None or _is_ready(one, work.queue.device) for one in storages)


def _is_ready(storage: HandleStorage, device: str) -> bool:
    """True if a run on a device uses bytes where they are and as they are.

    Copying a tensor from another device may take long, and so may waiting for its own order.
    """
    return storage.device == device and storage.buffer is not None and storage.buffer.is_plain


def _copies_little(task: WriteTask | ReadTask | CopyTask) -> bool:
    """True if a task copies few bytes within the host's memory, and waits for no others."""
    if isinstance(task, CopyTask):
        size = task.source.type.nbytes
        return size <= QUICK_BYTES and _is_on_host(task.source) and _is_on_host(task.destination)
    if task.place is not None or task.command.transfer:
        return False
    size = len_bytes(task.command.data or b"") if isinstance(task, WriteTask) else task.command.size_bytes
    return size <= QUICK_BYTES and _is_on_host(task.tensor)


def _is_on_host(tensor: TensorHandle) -> bool:
    """True if a tensor's bytes are where the host reads and writes them in one piece, at once.

    Others may wait until a plan that is loaded has put a whole weight in order, or touch a page for
    each element.
    """
    buffer = None if tensor.storage is None else tensor.storage.buffer
    if buffer is None or not (buffer.buffer_type.is_host and buffer.is_plain):
        return False
    return tensor.layout.is_contiguous
