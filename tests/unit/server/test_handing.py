"""Values that go from members that drain: the parts that need no daemons."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import until

from heliograph_proto import HAND_OVER
from heliograph_proto.errors import InvalidArgumentError, OutOfMemoryError, SnapshotFailedError
from heliograph_proto.sessions import StayingSession
from heliograph_server.resources.membership import MembershipChange
from heliograph_server.runtime.handing import (
    LONG_SECONDS,
    PAUSE_SECONDS,
    SHORT_SECONDS,
    Handing,
    _Attempts,
)
from heliograph_server.runtime.heads import MOST_STAYING, Heads

SECONDS = 20.0


def test_a_member_that_was_not_told_what_stays_is_told_again() -> None:
    device: Any = SimpleNamespace(name="m/cpu0", is_draining=True, lost=None)
    answers, told = [False, False, True], list[Sequence[StayingSession]]()

    def tell(staying: Sequence[StayingSession]) -> bool:
        told.append(staying)
        device.is_draining = len(told) < len(answers)
        return answers[len(told) - 1]

    handing = Handing(cast(Any, SimpleNamespace(sessions=(), members=(), devices=())))
    try:
        handing.begin(MembershipChange("m", leaving=(device,), tell_staying=tell))
        until(lambda: not device.is_draining, seconds=SECONDS)
    finally:
        handing.close()
    assert told == [()] * 3


class Client:
    """A session, as far as heads are concerned."""

    closed = None


def test_only_heads_say_what_stays_and_only_to_a_daemon_that_drains() -> None:
    some_heads, other = [cast(Any, Client()) for _ in range(2)], cast(Any, Client())
    owners = {one: SimpleNamespace(features=(HAND_OVER,)) for one in some_heads}
    owners[other] = SimpleNamespace(features=())
    host = SimpleNamespace(is_draining=False, images=SimpleNamespace(owners=owners))
    heads = Heads(cast(Any, host))
    staying = [StayingSession(number, "program", "no room") for number in range(1, MOST_STAYING)]
    heads.tell(some_heads[0], staying)
    host.is_draining = True
    assert not heads.staying and heads.waits_for(some_heads[0]), "it has not told since"
    with pytest.raises(InvalidArgumentError, match="hand-over"):
        heads.tell(other, staying)
    for one in some_heads:
        heads.tell(one, staying)
    assert len(heads.staying) == MOST_STAYING, "of all heads"
    heads.tell(some_heads[0], ())
    assert heads.staying == tuple(staying) and not heads.waits_for(some_heads[0])
    lost = StayingSession(1, "program", "every other device drains", final=True)
    heads.tell(some_heads[1], [lost, staying[1]])
    assert heads.waits_for(some_heads[1]), "for the other session"
    heads.tell(some_heads[1], [lost])
    assert heads.staying == (lost,) and not heads.waits_for(some_heads[1])
    host.is_draining = False
    assert not heads.staying


def test_a_session_that_is_always_at_work_is_stopped_for_little_of_its_time_and_long_enough_at_last() -> None:
    attempts, held = _Attempts(), list[float]()
    for _ in range(1000):
        held.append(attempts.hold_seconds)
        attempts.failed(SnapshotFailedError("commands are under way"), held[-1])
    assert max(held[:5]) == SHORT_SECONDS and max(held[:25]) == LONG_SECONDS
    # After each attempt comes a pause as long as it, or longer.
    paused = sum(max(PAUSE_SECONDS, one) for one in held)
    assert sum(held) < 0.25 * (sum(held) + paused)


def test_a_session_without_room_elsewhere_is_tried_less_and_less() -> None:
    attempts, pauses = _Attempts(), list[float]()
    for _ in range(6):
        pauses.append(attempts.pause_seconds)
        attempts.failed(OutOfMemoryError("no room"), 0.0)
    assert pauses == [2, 4, 8, 16, 30, 30] and not attempts.busy
