"""The client's side of a move, up to the call: new commands wait until those before are answered."""

from __future__ import annotations

import numpy as np

from heliograph.core.protocol import ClientCore
from heliograph.transport.shared_memory import SharedSpace
from heliograph_proto import commands as c
from heliograph_proto.errors import SessionClosedError
from heliograph_proto.sessions import Limits


def core() -> ClientCore:
    made = ClientCore(Limits())
    made.has_lease = True
    return made


def numbers(core: ClientCore) -> list[int]:
    """Send what may leave."""
    return [one.sequence for one in core.take(2**20)]


def test_commands_after_the_gate_wait_and_those_before_are_answered_first() -> None:
    made = core()
    made.send(c.Synchronize())
    gate = made.open_gate()
    made.send(c.Synchronize())
    settled = made.when_settled(gate)
    assert not settled.done and numbers(made) == [1]
    assert not settled.done and not numbers(made)
    made.apply(c.CompletionBatch(1))
    assert settled.done and made.holds_nothing
    made.close_gate(gate)
    assert numbers(made) == [2]


def test_a_session_at_rest_is_settled_at_once_and_one_that_ends_wakes_who_waits() -> None:
    made = core()
    assert made.when_settled(made.open_gate()).done
    busy = core()
    busy.send(c.Synchronize())
    settled = busy.when_settled(busy.open_gate())
    busy.connection_lost(SessionClosedError("over"))
    assert settled.done and isinstance(settled.error, SessionClosedError)


def test_bytes_on_their_way_and_slots_in_use_hold_a_session_back() -> None:
    made = core()
    made.set_shared(SharedSpace(np.zeros(64, np.uint8), 32))
    grant = made.credit.reserve(10)
    assert grant.done and not made.holds_nothing
    made.credit.give_back(10)
    assert made.shared is not None
    slot = made.shared.take()
    assert slot is not None and not made.holds_nothing
    made.stop_sharing("about to move")
    assert made.shared is None and made.why_not_shared == "about to move"
    made.space().fill(slot, memoryview(b"abc"))
    made.give_slot(slot)
    assert made.holds_nothing
    made.share_again()
    assert made.shared is not None and not made.why_not_shared
    made.leave_shared("it moved")
    assert made.shared is None and made.why_not_shared == "it moved" and made.holds_nothing
