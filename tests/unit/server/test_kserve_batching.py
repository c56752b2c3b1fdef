"""Requests of a model share runs, which begin when waiting gains nothing."""

from __future__ import annotations

import math
import random

import pytest

from heliograph_proto.errors import LimitExceededError
from heliograph_server.gateways.kserve.batching import BatchPolicy, BatchQueue, QueuedRequest

SIZES = (1, 2, 4, 8)
POLICY = BatchPolicy(SIZES, window_seconds=1.0, most_waiting=10, priorities=3, default_priority=2)


def request(rows: int = 1, at: float = 0.0, form: str = "a", priority: int = 2) -> QueuedRequest:
    return QueuedRequest(rows, form, priority, at)


def queue_of(*requests: QueuedRequest, policy: BatchPolicy = POLICY, shared: int = 1) -> BatchQueue:
    """A queue of these requests, whose run before had so many."""
    made = BatchQueue(policy)
    for number in range(shared if shared > 1 else 0):
        made.add(request(at=-10.0 - number))
    if shared > 1:
        assert len(made.take(0.0)) == shared
    for one in requests:
        made.add(one)
    return made


def test_a_request_alone_runs_at_once() -> None:
    only = request()
    assert queue_of(only).take(0.0) == [only]


def test_requests_that_wait_share_a_run_in_their_order() -> None:
    found = [request(at=float(number)) for number in range(4)]
    queue = queue_of(*found)
    assert queue.take(3.0) == found
    assert len(queue) == 0 and queue.take(9.0) == []


def test_a_run_waits_for_as_many_requests_as_the_one_before() -> None:
    first, second = request(at=0.0), request(at=0.5)
    queue = queue_of(first, shared=2)
    assert queue.take(0.1) == [] and queue.looks_again() == 1.0
    queue.add(second)
    assert queue.take(0.5) == [first, second]


def test_tenants_take_turns_by_their_rows() -> None:
    queue = BatchQueue(BatchPolicy((1,), window_seconds=0.0, most_waiting=6))

    def add(tenant: str, count: int) -> None:
        for _ in range(count):
            queue.add(QueuedRequest(1, "a", 2, 0.0, tenant=tenant))

    def taken(count: int) -> str:
        return "".join(queue.take(1.0)[0].tenant for _ in range(count))

    add("a", 6)
    assert taken(2) == "aa"
    add("b", 2)
    assert taken(4) == "baba"
    # One that comes again has none left over from the time before.
    add("c", 2)
    assert taken(4) == "caca"


def test_requests_that_end_early_cost_their_tenant_no_turn() -> None:
    queue, taken = BatchQueue(BatchPolicy((1,), window_seconds=0.0)), list[str]()
    for _ in range(20):
        queue.add(QueuedRequest(1, "a", 2, 0.0, tenant="busy"))
    for _ in range(40):
        late, served = (QueuedRequest(1, "a", 2, 0.0, tenant="hasty") for _ in range(2))
        queue.add(late)
        queue.add(served)
        assert queue.remove(late)
        for _ in range(2):
            taken.append(queue.take(1.0)[0].tenant)
            queue.add(QueuedRequest(1, "a", 2, 0.0, tenant="busy"))
    assert taken.count("hasty") >= 39


def test_a_tenant_that_fills_the_queue_leaves_room_for_others() -> None:
    policy = BatchPolicy((1,), most_waiting=3)
    queue = queue_of(policy=policy)
    for _ in range(3):
        queue.add(QueuedRequest(1, "a", 2, 0.0, tenant="greedy"))
    with pytest.raises(LimitExceededError):
        queue.add(QueuedRequest(1, "a", 2, 0.0, tenant="greedy"))
    queue.add(other := QueuedRequest(1, "a", 2, 0.0, tenant="other"))
    assert queue.remove(other) and len(queue) == 3


def test_threads_look_for_the_first_request_and_once_enough_wait() -> None:
    queue = queue_of(shared=4)
    assert [queue.add(request(at=float(number))) for number in range(4)] == [True, False, False, True]
    assert len(queue.take(4.0)) == 4
    assert queue.add(request(3)) and not queue.add(request(4)) and queue.add(request())


def test_a_run_waits_no_longer_than_the_window() -> None:
    first = request(at=5.0)
    queue = queue_of(first, shared=4)
    assert queue.take(5.9) == []
    assert queue.take(6.0) == [first]
    # The next one alone does not wait any more.
    later = request(at=7.0)
    queue.add(later)
    assert queue.take(7.0) == [later]


def test_a_run_has_at_most_the_rows_of_the_largest_plan() -> None:
    found = [request(rows=3) for _ in range(4)]
    queue = queue_of(*found)
    assert queue.take(0.0) == found[:2]
    assert queue.take(0.0) == found[2:]


def test_a_smaller_request_may_pass_one_that_does_not_fit() -> None:
    large, larger, small = request(rows=5), request(rows=5), request(rows=3)
    queue = queue_of(large, larger, small)
    assert queue.take(0.0) == [large, small]
    assert queue.take(9.0) == [larger]


def test_requests_of_other_shapes_have_runs_of_their_own() -> None:
    found = [request(form=form) for form in "abab"]
    queue = queue_of(*found)
    assert queue.take(0.0) == [found[0], found[2]]
    assert queue.take(0.0) == [found[1], found[3]]


def test_urgent_requests_come_first() -> None:
    last, first = request(form="late", priority=3), request(form="urgent", priority=1)
    queue = queue_of(last, first)
    assert queue.take(0.0) == [first] and queue.take(0.0) == [last]
    assert [POLICY.priority_of(given) for given in (0, 1, 3, 9)] == [2, 1, 3, 3]


@pytest.mark.parametrize(("rows", "taken"), [(3, 3), (5, 4), (6, 6), (7, 7), (8, 8)])
def test_a_run_is_cut_where_much_of_it_would_be_padding(rows: int, taken: int) -> None:
    queue = queue_of(*(request() for _ in range(rows)))
    assert len(queue.take(0.0)) == taken
    assert len(queue) == rows - taken


@pytest.mark.parametrize(
    ("seconds_of_4", "rows", "taken"),
    [(4.0, 5, 4), (4.0, 7, 4), (4.0, 8, 8), (6.0, 5, 4), (6.0, 6, 6), (6.0, 7, 7)],
)
def test_a_run_is_cut_where_the_smaller_plan_computes_more_rows_in_a_second(
    seconds_of_4: float, rows: int, taken: int
) -> None:
    queue = queue_of(*(request() for _ in range(rows)))
    form = request().form
    for _ in range(2):
        queue.ran(form, 4, seconds_of_4)
        queue.ran(form, 5, 8.0)
    assert len(queue.take(0.0)) == taken


def test_a_smaller_plan_of_unknown_time_is_tried_instead_of_padding_twice_and_then_known() -> None:
    form, takes = request().form, list[int]()
    queue = queue_of(*(request() for _ in range(7)))
    for _ in range(2):
        queue.ran(form, 7, 8.0)
    for seconds_of_4 in (6.0, 6.0, 6.0):
        takes.append(len(queue.take(0.0)))
        queue.ended(1.0)
        queue.ran(form, takes[-1], seconds_of_4)
        for _ in range(takes[-1]):
            queue.add(request())
    # Seven rows of the larger plan take 8, and four of the smaller one 6.
    assert takes == [4, 4, 7]


def test_the_first_run_of_a_plan_which_may_compile_it_tells_nothing_of_its_time() -> None:
    queue = queue_of(*(request() for _ in range(7)))
    queue.ran(request().form, 4, 1.0)
    queue.ran(request().form, 8, 1000.0)
    assert len(queue.take(0.0)) == 7


def test_the_time_of_a_plan_falls_at_once_and_rises_slowly() -> None:
    for last, taken in ((8.0, 4), (5.0, 7)):
        queue = queue_of(*(request() for _ in range(7)))
        for seconds in (9.0, 9.0, last):
            queue.ran(request().form, 8, seconds)
        for seconds in (4.0, 4.0, 4.1):
            queue.ran(request().form, 4, seconds)
        assert len(queue.take(0.0)) == taken


def crowd_after_a_run(idle: float, rows: int = 8, times: dict[int, float] | None = None) -> BatchQueue:
    """A queue whose last run ended at 1.0, with requests that came together after an idle time."""
    queue = queue_of(shared=rows)
    for size, seconds in (times or {}).items():
        for _ in range(2):
            queue.ran(request().form, size, seconds)
    queue.ended(1.0)
    for _ in range(rows):
        queue.add(request(at=1.0 + idle))
    return queue


@pytest.mark.parametrize(
    ("idle", "times", "taken"),
    [
        (0.5, {8: 1.0, 4: 0.6}, 4),
        # The halves take longer than what nothing ran for, or half of the run.
        (0.1, {8: 1.0, 4: 0.6}, 8),
        (0.5, {8: 1.0, 4: 0.8}, 8),
        # The clients were away for another reason.
        (5.0, {8: 1.0, 4: 0.6}, 8),
        # A plan that has not run is tried.
        (0.5, {8: 1.0}, 4),
        (0.5, {}, 8),
    ],
)
def test_a_crowd_that_comes_back_together_is_halved_where_that_takes_less_time(
    idle: float, times: dict[int, float], taken: int
) -> None:
    queue = crowd_after_a_run(idle, times=times)
    assert len(queue.take(1.0 + idle)) == taken
    # The other half begins as soon as the first has ended, and is not halved again.
    queue.ended(2.0 + idle)
    assert len(queue.take(2.0 + idle)) == 8 - taken


def test_requests_that_came_while_another_run_was_in_progress_are_no_crowd() -> None:
    queue = crowd_after_a_run(0.5, rows=4, times={4: 1.0, 2: 0.5})
    assert len(queue.take(1.5)) == 2
    for _ in range(6):
        queue.add(request(at=1.6))
    queue.ended(2.0)
    assert len(queue.take(2.5)) == 8


def test_without_a_batch_each_request_has_a_run() -> None:
    found = [request() for _ in range(3)]
    queue = queue_of(*found, policy=BatchPolicy())
    assert [queue.take(0.0) for _ in range(4)] == [[one] for one in found] + [[]]


def test_a_request_can_be_removed_while_it_waits() -> None:
    left = request()
    queue = queue_of(left, shared=4)
    assert queue.looks_again() == 1.0
    assert queue.remove(left) and not queue.remove(left)
    assert queue.looks_again() == math.inf


def test_a_full_queue_refuses() -> None:
    queue = queue_of(*(request() for _ in range(10)))
    with pytest.raises(LimitExceededError, match="10 requests wait"):
        queue.add(request())


@pytest.mark.parametrize("seed", range(20))
def test_every_request_runs_once_within_the_bounds_or_leaves(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    queue, now = BatchQueue(POLICY), 0.0
    sent: list[QueuedRequest] = []
    ended: list[QueuedRequest] = []
    while len(sent) < 300 or len(queue):
        now += rng.random() / 2
        for _ in range(rng.randrange(4) if len(sent) < 300 and len(queue) < 7 else 0):
            one = request(rng.randint(1, 8), now, rng.choice("ab"), rng.randint(1, 3))
            queue.add(one)
            sent.append(one)
        if sent and rng.random() < 0.1 and queue.remove(left := rng.choice(sent)):
            ended.append(left)
        batch = queue.take(now)
        assert sum(one.rows for one in batch) <= 8 and len({one.form for one in batch}) <= 1
        ended += batch
        assert queue.looks_again() > now or batch
    assert len(set(map(id, ended))) == len(ended) == len(sent)
