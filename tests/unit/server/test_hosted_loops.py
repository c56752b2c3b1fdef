"""Loops that other hosts run, as a session passes on their feeds and their end: the hosts are a
script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from core_client import SECONDS, CoreClient
from core_loops import FED, PLAN, X

from heliograph_backends.contract import HostedLoop, Plan
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import CancelledError, HeliographError, MemberLostError, ProtocolError
from heliograph_server.plans.hosted_loop import HostedLoops
from heliograph_server.plans.loop_parts import LoopParts

ONES = np.ones(4, np.float32)
COST = 16 + c.FEED_BYTES
Done = Callable[[int | HeliographError], None]


class ScriptedLoop(HostedLoop):
    """A loop that ends when the test says so, with an error or after some steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._has_ended = False
        self._steps: int | None = None
        self._error: HeliographError | None = None
        #: Values that it streams.
        self.values: list[tuple[int, int, memoryview]] = []
        #: Set once its values are read.
        self.begun = threading.Event()
        #: The feeds that it has to report, by the first element of their values.
        self._open: dict[float, Done] = {}
        self.fed: list[float] = []
        self.withdrawn: list[float] = []

    def next(self) -> tuple[int, int, memoryview] | None:
        self.begun.set()
        if self.values:
            return self.values.pop(0)
        with self._changed:
            assert self._changed.wait_for(lambda: self._has_ended, SECONDS)
        if self._error is not None:
            raise self._error
        return None

    @property
    def steps(self) -> int | None:
        return self._steps

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def when_ended(self, call: Callable[[], None]) -> None:
        """The tests need no call."""

    def feed(self, feed: c.FeedLoop, done: Done) -> Callable[[], None]:
        key = float(np.frombuffer(feed.values[0][1], np.float32)[0])
        with self._changed:
            self._open[key] = done
            self.fed.append(key)
            self._changed.notify_all()
        return partial(self._withdraw, key)

    def _withdraw(self, key: float) -> None:
        if (done := self._open.pop(key, None)) is not None:
            self.withdrawn.append(key)
            done(CancelledError("withdrawn"))

    def wait(self, *keys: float) -> None:
        """Until these feeds came, in any order."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(self.fed) >= set(keys), SECONDS)

    def take(self, key: float, step: int) -> None:
        """A step takes a feed."""
        self._open.pop(key)(step)

    def end(self, steps: int | None, error: HeliographError | None = None) -> None:
        with self._changed:
            if not self._has_ended:
                self._has_ended, self._steps, self._error = True, steps, error
            self._changed.notify_all()

    def stop(self) -> None:
        self.end(1)

    def cancel(self) -> None:
        self.end(None, CancelledError("cancelled"))

    def close(self) -> None:
        for key in list(self._open):
            self._withdraw(key)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> ScriptedLoop:
    """The hosts of every loop."""
    made = ScriptedLoop()
    monkeypatch.setattr(Plan, "hosted_loop", lambda *_: made)
    return made


def loop_of(**loop: Any) -> c.RunCommand:
    """A loop of doublings of X, whose x may be fed, with room for two feeds."""
    inputs = (c.InputBinding(0, X.tobytes()), c.InputBinding(1, np.ones(1, np.int32).tobytes()))
    how = {"carries": FED, "fed_inputs": (0,), "fed_bytes": 2 * COST, **loop}
    return c.RunCommand(PLAN, inputs, (), loop=c.Loop(9, **how))


def feed_of(loop: int, value: float) -> c.FeedLoop:
    return c.FeedLoop(loop, ((0, (ONES * value).tobytes()),), ())


def begun(client: CoreClient, hosted: ScriptedLoop) -> int:
    """A loop that has taken a feed at its hosts."""
    loop = client.send(loop_of())
    first = client.send(feed_of(loop, 1.0))
    hosted.wait(1.0)
    hosted.take(1.0, 3)
    assert client.wait(first).steps == 3
    return loop


def test_a_feed_that_is_cancelled_as_it_comes_is_withdrawn_from_the_hosts(
    client: CoreClient, hosted: ScriptedLoop
) -> None:
    loop = begun(client, hosted)
    # The cancel is decided before the feed has been handed on.
    fed, _ = client.send_all(feed_of(loop, 2.0), c.Cancel(loop + 2))
    assert isinstance(client.wait(fed).error, CancelledError)
    assert hosted.withdrawn == [2.0]
    hosted.end(5)
    assert client.wait(loop).steps == 5


def test_feeds_that_are_cancelled_before_the_loop_begins_give_their_room_back(
    client: CoreClient, hosted: ScriptedLoop, fake: FakeDevice
) -> None:
    gate = fake.script.hold("compute")
    before = client.send(replace(loop_of(), loop=None))
    assert gate.entered.wait(SECONDS)
    loop = client.send(loop_of())
    gone = [client.send(feed_of(loop, value)) for value in (1.0, 2.0)]
    for one in gone:
        client.do(c.Cancel(one))
        assert isinstance(client.wait(one).error, CancelledError)
    gate.open()
    client.wait(before)
    # It has room for two, which the hosts have not taken.
    hosted.begun.wait(SECONDS)
    fed = [client.send(feed_of(loop, value)) for value in (3.0, 4.0)]
    hosted.wait(3.0, 4.0)
    for step, (value, one) in enumerate(zip((3.0, 4.0), fed, strict=True)):
        hosted.take(value, step)
        assert client.wait(one).steps == step
    assert hosted.fed == [3.0, 4.0]
    hosted.end(5)
    assert client.wait(loop).steps == 5


def test_an_error_names_the_step_only_if_it_is_known(client: CoreClient, hosted: ScriptedLoop) -> None:
    hosted.end(None, MemberLostError("the host is gone"))
    assert client.refused(loop_of()).message == "the host is gone"


def test_an_error_without_a_step_has_that_which_the_hosts_tell(
    client: CoreClient, hosted: ScriptedLoop
) -> None:
    hosted.end(7, MemberLostError("the host is gone"))
    done = client.wait(client.send(loop_of()))
    assert done.error is not None and done.steps == 7
    assert done.error.message == "in step 7 of the loop: the host is gone"


def test_values_of_the_wrong_step_are_the_error_though_all_parts_are_cancelled_then() -> None:
    loops = [ScriptedLoop(), ScriptedLoop()]
    loops[1].values = [(1, 0, memoryview(b"1234"))]
    errors: list[tuple[int, HeliographError]] = []

    def choose(found: Sequence[tuple[int, HeliographError]]) -> HeliographError:
        errors.extend(found)
        return found[-1][1]

    parts = LoopParts((c.Loop(9), c.Loop(9)), 0, (1,), ())
    whole = HostedLoops(parts, loops, (0,), choose, ExitStack(), assigns=False)
    with pytest.raises(ProtocolError, match="a value of step 1, not of step 0"):
        whole.next()
    assert [(place, type(one)) for place, one in errors] == [
        (0, CancelledError),
        (1, CancelledError),
        (-1, ProtocolError),
    ]
    whole.close()
