"""A loop that goes on at a member, of a whole plan or of a partition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import heliograph as hg
from heliograph.head.loops import MemberLoop, submit_loop
from heliograph_backends.contract import HostedLoop
from heliograph_proto.commands import FeedLoop, Loop
from heliograph_proto.errors import HeliographError
from heliograph_proto.graph import Graph
from heliograph_server.pool.remote.binding import BoundRun

if TYPE_CHECKING:
    from heliograph_server.pool.remote.device import RemoteDevice


class RemoteLoop(HostedLoop):
    """One loop. `number` is that of its first step among the whole graph's runs, for a
    partition."""

    def __init__(
        self,
        device: RemoteDevice,
        plan: hg.Plan,
        graph: Graph,
        loop: Loop,
        bound: BoundRun,
        number: int = 0,
    ) -> None:
        self._device, self._plan, self._bound = device, plan, bound
        self._stream = device.take_stream() if not number else None
        #: The feeds that the member has not reported.
        self._open_feeds = 0
        self._changed = threading.Condition()
        fetched = tuple(bound.fetched)
        try:
            with device.member.edge():
                self._run: MemberLoop = submit_loop(
                    plan, graph, loop, number, bound.inputs, fetched, bound.into, self._stream
                )
        except BaseException:
            self._release()
            raise

    def __repr__(self) -> str:
        return f"<RemoteLoop on {self._device.name}>"

    def next(self) -> tuple[int, int, memoryview] | None:
        with self._device.member.edge():
            found = self._run.next()
            if found is None:
                self._bound.take(self._plan, self._run)
            return found

    @property
    def steps(self) -> int | None:
        return self._run.steps

    @property
    def has_failed(self) -> bool:
        return self._run.done() and self._run.error is not None

    def when_ended(self, call: Callable[[], None]) -> None:
        self._run.add_done_callback(lambda _: call())

    def when_counted(self, call: Callable[[int], None]) -> None:
        self._run.when_counted(call)

    def feed(self, feed: FeedLoop, done: Callable[[int | HeliographError], None]) -> Callable[[], None]:
        def told(result: int | HeliographError) -> None:
            done(result)
            with self._changed:
                self._open_feeds -= 1
                self._changed.notify_all()

        with self._changed:
            self._open_feeds += 1
        return self._run.feed_bytes(feed, told)

    def stop(self) -> None:
        self._run.stop()

    def cancel(self) -> None:
        self._run.cancel()

    def close(self) -> None:
        if not self._run.done():
            self._run.cancel()
            with suppress(HeliographError):
                self._run.result()
        # The member reports all of them when the loop ends; the session's end does, too.
        with self._changed:
            self._changed.wait_for(lambda: not self._open_feeds)
        self._release()

    def _release(self) -> None:
        self._bound.close()
        if self._stream is not None:
            self._device.return_stream(self._stream)
