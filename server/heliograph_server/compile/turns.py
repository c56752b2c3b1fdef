"""Turns of compiles: threads, and which compile is next.

Graphs have two lanes, by size, so that a small one never waits behind a large one. In each lane the
tenant that has had the least time, divided by its weight, is next (start-time fair queueing), and a
tenant's compiles are in the order of their arrival; each of its sessions has one at a time. A large
graph is compiled at a pace, so that other threads of the process have their turns too.

Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_proto.pace import pausing
from heliograph_server.resources.fair_queue import FairFlow

T = TypeVar("T")

#: Graphs of at most this many bytes are small: some hundred nodes, some milliseconds.
SMALL_BYTES = 16 * 1024
#: The threads of the lanes: large graphs share the interpreter with everything else.
SMALL_THREADS, LARGE_THREADS = 2, 1


#: How long a large graph is compiled between two pauses, and how long a pause is at least.
TURN_SECONDS, PAUSE_SECONDS = 0.001, 0.0001


class Pace:
    """The pace of one computation. `why_over` returns the error that ends it.

    A thread that computes in Python gives the interpreter away when another one has waited for it.
    At a pace it does so by itself, and sees that its work is no longer wanted.
    """

    def __init__(self, why_over: Callable[[], HeliographError | None]) -> None:
        self._why_over = why_over
        self._since = time.perf_counter()

    def __repr__(self) -> str:
        return f"<Pace over={self._why_over()}>"

    def give_way(self) -> None:
        """Pause if the turn is over. Raises the error that ends the computation."""
        if time.perf_counter() - self._since < TURN_SECONDS:
            return
        if (error := self._why_over()) is not None:
            raise error
        time.sleep(PAUSE_SECONDS)
        self._since = time.perf_counter()


@dataclass(eq=False, slots=True)
class CompileTurn:
    """One compile, from its request to its end."""

    flow: FairFlow
    call: Callable[[], Any]
    is_large: bool
    future: Future[Any] = field(default_factory=Future)
    #: The context of the request, with its span.
    context: Context = field(default_factory=copy_context)
    _error: HeliographError | None = None

    def cancel(self) -> None:
        """End it: at once if it waits, at the next yield point if it is large and runs."""
        self._error = CancelledError("the client no longer waits for the compile")
        self.future.cancel()

    def run(self) -> None:
        """Compute, on a thread of its lane."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.context.run(self._compute)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def _compute(self) -> Any:
        if not self.is_large:
            return self.call()
        with pausing(Pace(lambda: self._error).give_way):
            return self.call()


class _Lane:
    """Some threads, and the compiles that wait for them."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._most = name, threads
        self._changed = threading.Condition()
        self._waiting: dict[FairFlow, deque[CompileTurn]] = {}
        #: The time that each tenant has had here, divided by its weight.
        self._tags: dict[FairFlow, float] = {}
        #: The tag of the last turn that began: who comes back starts here.
        self._virtual = 0.0
        self._threads: list[threading.Thread] = []
        self._running: dict[FairFlow, int] = {}
        self._idle = 0
        self._is_closed = False

    def put(self, turn: CompileTurn) -> None:
        with self._changed:
            if self._is_closed:
                turn.future.set_exception(CancelledError("the server is closing"))
                return
            if turn.flow not in self._waiting and turn.flow not in self._running:
                self._tags[turn.flow] = max(self._tags.get(turn.flow, 0.0), self._virtual)
            self._waiting.setdefault(turn.flow, deque()).append(turn)
            # An idle thread may not have seen yet that an earlier turn waits for it.
            is_short = self._idle < sum(map(len, self._waiting.values()))
            if is_short and len(self._threads) < self._most:
                name = f"heliograph-compile-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            began = time.monotonic()
            turn.run()
            self._ended(turn.flow, time.monotonic() - began)
            # Its graph is not kept until the next turn.
            del turn

    def _next(self) -> CompileTurn | None:
        with self._changed:
            self._idle += 1
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            self._idle -= 1
            if not self._waiting:
                return None
            flow = min(self._waiting, key=self._tags.__getitem__)
            turns = self._waiting[flow]
            turn = turns.popleft()
            if not turns:
                del self._waiting[flow]
            self._running[flow] = self._running.get(flow, 0) + 1
            self._virtual = max(self._virtual, self._tags[flow])
            return turn

    def _ended(self, flow: FairFlow, seconds: float) -> None:
        with self._changed:
            self._tags[flow] += seconds / flow.weight
            self._running[flow] -= 1
            if not self._running[flow]:
                del self._running[flow]
            if not self._waiting and not self._running:
                self._tags.clear()
                self._virtual = 0.0

    def close(self) -> None:
        """End the threads once the compiles that run have ended. Others are cancelled."""
        with self._changed:
            self._is_closed = True
            left = [turn for turns in self._waiting.values() for turn in turns]
            self._waiting.clear()
            self._changed.notify_all()
        for turn in left:
            turn.cancel()
        for thread in self._threads:
            thread.join()


class CompileTurns:
    """The compiles of a daemon. Thread-safe; `close` ends its threads."""

    def __init__(self) -> None:
        self._small = _Lane("small", SMALL_THREADS)
        self._large = _Lane("large", LARGE_THREADS)

    def __repr__(self) -> str:
        return f"<CompileTurns {self._small!r}, {self._large!r}>"

    def submit(self, flow: FairFlow, size_bytes: int, call: Callable[[], T]) -> CompileTurn:
        """Compute something about a graph whose message has so many bytes, in the flow's turn."""
        is_large = size_bytes > SMALL_BYTES
        turn = CompileTurn(flow, call, is_large)
        (self._large if is_large else self._small).put(turn)
        return turn

    def close(self) -> None:
        """End all compiles and threads."""
        self._small.close()
        self._large.close()
