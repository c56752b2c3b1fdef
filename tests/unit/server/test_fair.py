"""The fair queue of a device, on a virtual clock: time is shared by weight, and nobody starves."""

from __future__ import annotations

from math import inf

import pytest
from fair_sharing import Sharing, Tenant
from hypothesis import given, settings
from hypothesis import strategies as st

from heliograph_server.resources.fair_queue import (
    LINGER_SECONDS,
    PATIENCE_SECONDS,
    SLICE_SECONDS,
    FairQueue,
    Ticket,
)

RUN = 0.01


def shares(*tenants: Tenant, seconds: float = 20.0) -> list[float]:
    Sharing(list(tenants)).until(seconds)
    total = sum(one.device_seconds for one in tenants)
    return [one.device_seconds / total for one in tenants]


def test_one_run_in_flight_has_as_much_of_the_device_as_fifty() -> None:
    thinking = RUN / 10
    found = shares(Tenant(RUN, 1, think_seconds=thinking), Tenant(RUN, 50, think_seconds=thinking))
    assert found[0] == pytest.approx(0.5, abs=0.02)


def test_who_has_long_runs_has_no_more_than_who_has_short_ones() -> None:
    assert shares(Tenant(10 * RUN, 4), Tenant(RUN, 4))[0] == pytest.approx(0.5, abs=0.02)


def test_weights_say_how_time_is_shared() -> None:
    assert shares(Tenant(RUN, 8), Tenant(RUN, 8, weight=3.0))[1] == pytest.approx(0.75, abs=0.02)


def test_one_alone_is_never_held_back() -> None:
    greedy = Tenant(RUN, 50)
    sharing = Sharing([greedy])
    sharing.until(1.0)
    assert not any(greedy.waits) and sharing.most == 50


def test_one_alone_again_is_held_back_for_a_moment_only() -> None:
    greedy, late = Tenant(RUN, 50), Tenant(RUN, 1, comes_at=1.0, think_seconds=1e9)
    sharing = Sharing([greedy, late])
    sharing.until(2.0)
    greedy.waits.clear()
    # The waits of those that were queued when the other came are over by now.
    sharing.until(3.0)
    assert not any(greedy.waits)
    assert late.waits[0] <= RUN


def test_idle_tenants_save_nothing_up() -> None:
    busy, late = Tenant(RUN, 4), Tenant(RUN, 4, comes_at=10.0)
    sharing = Sharing([busy, late])
    sharing.until(10.0)
    before = busy.device_seconds
    sharing.until(12.0)
    assert busy.device_seconds - before == pytest.approx(1.0, abs=5 * RUN)


def test_what_was_done_at_once_counts() -> None:
    queue, quick, slow = FairQueue(), Tenant(RUN), Tenant(RUN)
    for number in range(100):
        queue.charge(quick, RUN, number * RUN)
    assert quick.device_seconds == pytest.approx(100 * RUN)
    # But who comes only now has nothing to make up for.
    first, second = Ticket(slow), Ticket(quick)
    queue.arrive(first, 1.0)
    queue.arrive(second, 1.0)
    assert (first.has_begun, second.has_begun) == (True, False)
    again = Ticket(slow)
    queue.arrive(again, 1.0 + RUN)
    assert queue.end(first, 1.0 + 3 * RUN) == [second]


def test_a_run_that_gives_up_waiting_leaves_its_turn_to_the_next() -> None:
    queue, one, other = FairQueue(), Tenant(RUN), Tenant(RUN)
    running, gone, next_one = Ticket(one), Ticket(other), Ticket(other)
    queue.arrive(running, 0.0)
    queue.arrive(gone, 0.1)
    queue.arrive(next_one, 0.2)
    assert queue.withdraw(gone, 0.3) == []
    assert queue.end(running, 0.4) == [next_one]


def test_a_tenant_that_comes_during_a_long_run_moves_none_that_waits() -> None:
    queue, long, short, late = FairQueue(), Tenant(1.0), Tenant(RUN), Tenant(RUN)
    running, waiting, arrival = Ticket(long), Ticket(short), Ticket(late)
    queue.arrive(running, 0.0)
    queue.arrive(waiting, 0.0)
    queue.arrive(arrival, 1.0)
    again = Ticket(long)
    assert queue.end(running, 1.0) == [waiting]
    queue.arrive(again, 1.0)
    # The short one is between two runs for a moment, and keeps its place before the long one.
    assert queue.end(waiting, 1.0 + RUN, has_more=True) == [arrival]
    queue.arrive(Ticket(short), 1.0 + RUN)
    assert [one.flow for one in queue.end(arrival, 1.0 + 2 * RUN)] == [short]


def test_a_tenant_that_leaves_ahead_of_the_others_moves_none_of_them() -> None:
    queue, long, short, other = FairQueue(), Tenant(1.0), Tenant(RUN), Tenant(RUN)
    first, one, two, three = Ticket(long), Ticket(short), Ticket(other), Ticket(other)
    queue.arrive(first, 0.0)
    for waiting in (one, two, three):
        queue.arrive(waiting, 0.0)
    assert queue.end(first, 1.0) == [one]
    # The long one is forgotten here; the short one is between two runs.
    now = 1.0 + 2 * LINGER_SECONDS
    assert queue.end(one, now, has_more=True) == [two]
    back, again = Ticket(long), Ticket(short)
    queue.arrive(back, now)
    queue.arrive(again, now)
    assert queue.end(two, now + RUN) == [three]
    assert queue.end(three, now + 10 * RUN) == [again]
    assert queue.end(again, now + 11 * RUN) == [back]


def test_a_long_run_gives_its_turn_to_one_that_is_behind_and_goes_on_after_it() -> None:
    queue, long, short = FairQueue(), Tenant(1.0), Tenant(RUN)
    running, behind, quick = Ticket(long), Ticket(long), Ticket(short)
    queue.arrive(running, 0.0)
    assert queue.overdue(0.5) == ((), inf)
    queue.arrive(quick, 0.5)
    queue.arrive(behind, 0.5)
    assert queue.overdue(0.51) == ((running,), inf)
    assert queue.pause(running, 0.51) == [quick] and not running.has_begun
    assert queue.end(quick, 0.52) == [running]
    assert queue.end(running, 0.6) == [behind]


def test_a_run_has_a_slice_of_time_before_it_is_paused() -> None:
    queue, one, other = FairQueue(), Tenant(1.0), Tenant(1.0)
    first, second = Ticket(one), Ticket(other)
    queue.arrive(first, 0.0)
    queue.arrive(second, 0.0)
    assert queue.overdue(0.0) == ((), SLICE_SECONDS)
    now = SLICE_SECONDS
    assert queue.overdue(now) == ((first,), inf)
    assert queue.pause(first, now) == [second]
    assert queue.overdue(now) == ((), SLICE_SECONDS)
    # It may get as far ahead as it was behind.
    assert queue.overdue(2 * now) == ((second,), inf)


def test_a_tenant_with_a_larger_share_is_paused_later() -> None:
    queue, heavy, light = FairQueue(), Tenant(1.0, weight=4.0), Tenant(1.0)
    first, second = Ticket(heavy), Ticket(light)
    queue.arrive(second, 0.0)
    queue.arrive(first, 0.0)
    assert queue.pause(second, 0.01) == [first]
    found, seconds = queue.overdue(0.01)
    assert not found and seconds == pytest.approx(0.04)


def test_runs_of_one_tenant_are_all_paused_before_another_has_its_turn() -> None:
    queue, long, short = FairQueue(), Tenant(1.0), Tenant(RUN)
    first, second, quick = Ticket(long), Ticket(long), Ticket(short)
    queue.arrive(first, 0.0)
    queue.arrive(second, 0.0)
    queue.arrive(quick, 0.1)
    found, _ = queue.overdue(0.2)
    assert set(found) == {first, second}
    assert queue.pause(first, 0.2) == []
    assert queue.pause(second, 0.2) == [quick]
    # While another tenant is about, each has one run at a time.
    assert queue.end(quick, 0.3) == [second]
    assert queue.end(second, 0.4) == [first]


def test_a_paused_run_goes_on_while_another_tenants_run_is_only_expected() -> None:
    queue, long, short = FairQueue(), Tenant(1.0), Tenant(RUN)
    running, quick = Ticket(long), Ticket(short)
    queue.arrive(running, 0.0)
    queue.arrive(quick, 0.1)
    queue.pause(running, 0.2)
    assert queue.end(quick, 0.21, has_more=True) == [running]


def test_the_end_of_the_wait_for_an_expected_run_is_known() -> None:
    queue, long, short = FairQueue(), Tenant(1.0), Tenant(RUN)
    first, again, quick = Ticket(long), Ticket(long), Ticket(short)
    queue.arrive(first, 0.0)
    queue.arrive(quick, 0.1)
    queue.arrive(again, 0.1)
    queue.end(first, 1.0)
    assert queue.end(quick, 1.01, has_more=True) == []
    asked, seconds = queue.overdue(1.01)
    assert not asked and seconds == pytest.approx(PATIENCE_SECONDS)
    assert queue.look(1.01 + PATIENCE_SECONDS) == [again]


def test_a_paused_run_can_be_withdrawn() -> None:
    queue, long, short = FairQueue(), Tenant(1.0), Tenant(RUN)
    running, quick = Ticket(long), Ticket(short)
    queue.arrive(running, 0.0)
    queue.arrive(quick, 0.1)
    queue.pause(running, 0.2)
    assert queue.withdraw(running, 0.21) == []
    assert queue.end(quick, 0.22) == [] and queue.count(long) == 0


tenants = st.builds(
    Tenant,
    run_seconds=st.floats(0.001, 0.02),
    in_flight=st.integers(1, 20),
    weight=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    comes_at=st.floats(0.0, 0.05),
)


@settings(deadline=None)
@given(st.lists(tenants, min_size=2, max_size=5))
@pytest.mark.slow
def test_nobody_starves_and_no_time_is_lost(some: list[Tenant]) -> None:
    sharing = Sharing(some)
    sharing.until(3.0)
    assert sharing.is_busy
    # All time since the first came was given to somebody, up to the last event.
    first = min(one.comes_at for one in some)
    assert sum(one.device_seconds for one in some) == pytest.approx(sharing.now - first, rel=1e-6)
    # Who has many runs waits for its own; for the others, for no more than their share of the time.
    weights, longest = sum(one.weight for one in some), max(one.run_seconds for one in some)
    for one in some:
        turn = one.run_seconds * weights / one.weight + len(some) * longest
        alone = sum(other.run_seconds * other.in_flight for other in some)
        assert max(one.waits) <= one.in_flight * turn + alone + LINGER_SECONDS


@settings(deadline=None)
@given(st.lists(tenants, min_size=2, max_size=4))
@pytest.mark.slow
def test_shares_converge_to_the_weights_of_those_that_always_want_more(some: list[Tenant]) -> None:
    for one in some:
        one.in_flight, one.comes_at = max(one.in_flight, 8), 0.0
    sharing = Sharing(some)
    sharing.until(1.0)
    before = [one.device_seconds for one in some]
    sharing.until(11.0)
    weights = sum(one.weight for one in some)
    for one, had in zip(some, before, strict=True):
        assert one.device_seconds - had == pytest.approx(10.0 * one.weight / weights, abs=0.3)


@settings(deadline=None)
@pytest.mark.slow
@given(st.data())
def test_whatever_happens_turns_are_given_once_and_none_is_forgotten(data: st.DataObject) -> None:
    queue, now = FairQueue(), 0.0
    flows = [Tenant(RUN, weight=weight) for weight in (1.0, 2.0, 0.5)]
    waiting: list[Ticket] = []
    running: list[Ticket] = []

    def begun(tickets: list[Ticket]) -> None:
        for ticket in tickets:
            assert ticket.has_begun
            if ticket in waiting:
                waiting.remove(ticket)
            running.append(ticket)

    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.floats(0.0, 0.2))
        what = data.draw(st.sampled_from(["arrive", "end", "withdraw", "charge", "pause"]))
        if what == "arrive":
            ticket = Ticket(data.draw(st.sampled_from(flows)))
            waiting.append(ticket)
            begun(queue.arrive(ticket, now))
        elif what == "end" and running:
            begun(queue.end(running.pop(data.draw(st.integers(0, len(running) - 1))), now))
        elif what == "withdraw" and waiting:
            begun(queue.withdraw(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))), now))
        elif what == "pause" and running:
            ticket = running.pop(data.draw(st.integers(0, len(running) - 1)))
            waiting.append(ticket)
            begun(queue.pause(ticket, now))
        elif what == "charge":
            queue.charge(data.draw(st.sampled_from(flows)), RUN, now)
        assert len(set(map(id, running))) == len(running)
        assert running or not waiting, "somebody waits for a device that nobody has"
    while running:
        now += RUN
        begun(queue.end(running.pop(), now))
    assert not waiting
