"""The queue of a loaded model, and the threads that run it.

Requests come on the event loop, wait in a `BatchQueue`, and run on threads, as many as the model
has instances. Each answer goes back to the loop that asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from heliograph_proto.errors import (
    DeadlineExceededError,
    HeliographError,
    InvalidInputError,
    UnavailableError,
)
from heliograph_server.gateways.kserve.batching import BatchPolicy, BatchQueue, QueuedRequest
from heliograph_server.gateways.kserve.statistics import ModelStatistics, RunTimes
from heliograph_server.gateways.kserve.tensors import Array
from heliograph_server.resources.failures import typed

logger = logging.getLogger(__name__)

#: The longest wait of an idle thread.
IDLE_SECONDS = 60.0

RunModel = Callable[[Mapping[str, Array]], dict[str, Array]]
Answer = tuple["asyncio.Future[dict[str, Array]]", "dict[str, Array] | HeliographError"]


class _Work:
    """The inputs of a request, and where its answer goes."""

    __slots__ = ("feeds", "future", "loop")

    def __init__(self, feeds: Mapping[str, Array]) -> None:
        self.feeds = feeds
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[dict[str, Array]] = self.loop.create_future()


class Dispatcher:
    """Runs the requests of a model; see the module. Thread-safe."""

    def __init__(
        self,
        name: str,
        run: RunModel,
        policy: BatchPolicy,
        instances: int,
        statistics: ModelStatistics | None = None,
    ) -> None:
        """`statistics`: those that count its requests, if it has none of its own."""
        self._name, self._run, self._policy = name, run, policy
        self.statistics = statistics or ModelStatistics()
        self._queue = BatchQueue(policy)
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"heliograph-model-{number}", daemon=True)
            for number in range(instances)
        ]
        for thread in self._threads:
            thread.start()

    async def infer(
        self, feeds: Mapping[str, Array], priority: int = 0, seconds: float = math.inf, tenant: str = ""
    ) -> dict[str, Array]:
        """Run the model, perhaps with other requests, and return the outputs.

        Args:
            feeds: Arrays of all inputs.
            priority: From 1, the most urgent; 0 is the model's default.
            seconds: The most time until the run begins.
            tenant: Tenants take turns.

        Raises InvalidInputError for rows that do not fit, LimitExceededError for a full queue,
        DeadlineExceededError, UnavailableError once the model is unloaded, and the errors of the
        run.
        """
        began = time.monotonic()
        request = self._queued(feeds, priority, began, tenant)
        with self._changed:
            if self._closed:
                raise unloaded(self._name)
            # A thread that wakes for nothing takes the interpreter from the loop.
            if self._queue.add(request):
                self._changed.notify()
        expiry = None
        if seconds < math.inf:
            expiry = request.work.loop.call_later(seconds, self._expire, request, seconds)
        is_answered = False
        try:
            found: dict[str, Array] = await request.work.future
            is_answered = True
            return found
        finally:
            if expiry is not None:
                expiry.cancel()
            if request.work.future.cancelled():
                with self._changed:
                    self._queue.remove(request)
            self.statistics.answered(time.monotonic() - began, failed=not is_answered)

    def _queued(self, feeds: Mapping[str, Array], priority: int, now: float, tenant: str) -> QueuedRequest:
        rows, form = 1, None
        if most := self._policy.most_rows:
            counts = {len(one) for one in feeds.values()}
            rows = max(counts)
            if len(counts) != 1 or not 0 < rows <= most:
                raise InvalidInputError(
                    f"the inputs have {', '.join(map(str, sorted(counts)))} rows",
                    advice=f"dimension 0 is the batch, the same of all inputs, from 1 to {most}",
                )
            form = tuple((name, feeds[name].shape[1:]) for name in sorted(feeds))
        return QueuedRequest(rows, form, self._policy.priority_of(priority), now, _Work(feeds), tenant)

    def _expire(self, request: QueuedRequest, seconds: float) -> None:
        """Fail a request whose run has not begun in time."""
        with self._changed:
            was_waiting = self._queue.remove(request)
        if was_waiting and not request.work.future.done():
            request.work.future.set_exception(late(seconds))

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their run."""
        return len(self._queue)

    def close(self) -> None:
        """Take no further requests, answer those that wait, and end the threads. Blocks for as long
        as that takes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._compute(batch)
            finally:
                with self._changed:
                    self._queue.ended(time.monotonic())

    def _next(self) -> list[QueuedRequest] | None:
        """Wait for the requests of the next run; None at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                if batch := self._queue.take(now):
                    if self._queue.looks_again() < math.inf:
                        # This thread was the one that looked after those that are left.
                        self._changed.notify()
                    return batch
                again = self._queue.looks_again()
                if self._closed and again == math.inf:
                    return None
                self._changed.wait(min(max(again - now, 0.0), IDLE_SECONDS))

    def _compute(self, batch: Sequence[QueuedRequest]) -> None:
        began = time.monotonic()
        try:
            feeds = _joined([one.work.feeds for one in batch])
            joined = time.monotonic()
            outputs = self._run(feeds)
            computed = time.monotonic()
            parts = _parted(outputs, [one.rows for one in batch])
        except Exception as error:
            # A shared run of several requests may have failed for one of them.
            if len(batch) > 1 and isinstance(error, HeliographError):
                for one in batch:
                    self._compute([one])
                return
            refused = typed(error, f"running the model {self._name}").anew()
            _settle([(one.work, refused) for one in batch])
            return
        times = RunTimes(joined - began, computed - joined, time.monotonic() - computed)
        rows = sum(one.rows for one in batch)
        # Clients find their run in the statistics. The queue needs its time for the next run alone.
        self.statistics.ran(rows, [began - one.arrived for one in batch], times)
        _settle([(one.work, part) for one, part in zip(batch, parts, strict=True)])
        with self._changed:
            self._queue.ran(batch[0].form, rows, times.compute)


def _joined(feeds: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """The inputs of requests as those of one."""
    if len(feeds) == 1:
        return feeds[0]
    return {name: np.concatenate([one[name] for one in feeds]) for name in feeds[0]}


def _parted(outputs: dict[str, Array], rows: Sequence[int]) -> list[dict[str, Array]]:
    """The outputs of a run as those of its requests."""
    if len(rows) == 1:
        return [outputs]
    ends = np.cumsum(rows).tolist()
    return [
        {name: one[end - count : end] for name, one in outputs.items()}
        for count, end in zip(rows, ends, strict=True)
    ]


def _settle(answers: Sequence[tuple[_Work, dict[str, Array] | HeliographError]]) -> None:
    """Hand over answers, with one call for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = {}
    for work, answer in answers:
        by_loop.setdefault(work.loop, []).append((work.future, answer))
    for loop, found in by_loop.items():
        # A loop that has ended has no one who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_hand_over, found)


def _hand_over(answers: Sequence[Answer]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, HeliographError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def late(seconds: float) -> DeadlineExceededError:
    """The error of a request whose run has not begun in time."""
    return DeadlineExceededError(
        f"the run did not begin within the request's {seconds * 1e3:g} ms",
        advice="give a longer timeout, or a more urgent priority",
    )


def unloaded(name: str) -> UnavailableError:
    """The error of a request that comes too late for its model."""
    return UnavailableError(f"the model {name!r} is being unloaded", advice="load it again")
