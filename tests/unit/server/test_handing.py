"""Values that go from members that drain: the parts that need no daemons."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from waiting import until

from heliograph_proto.sessions import StayingSession
from heliograph_server.resources.membership import MembershipChange
from heliograph_server.runtime.handing import Handing

SECONDS = 20.0


def test_a_member_that_was_not_told_what_stays_is_told_again() -> None:
    device: Any = SimpleNamespace(is_draining=True, lost=None)
    answers, told = [False, False, True], list[Sequence[StayingSession]]()

    def tell(staying: Sequence[StayingSession]) -> bool:
        told.append(staying)
        device.is_draining = len(told) < len(answers)
        return answers[len(told) - 1]

    handing = Handing(cast(Any, SimpleNamespace(sessions=())))
    try:
        handing.begin(MembershipChange("m", leaving=(device,), tell_staying=tell))
        until(lambda: not device.is_draining, seconds=SECONDS)
    finally:
        handing.close()
    assert told == [()] * 3
