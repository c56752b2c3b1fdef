"""The scheduler of a model that serves many answers: decisions alone, no model."""

from __future__ import annotations

import random

import pytest

from heliograph.llm.serving.scheduler import (
    STEPS,
    STEPS_BETWEEN_CHUNKS,
    Bounds,
    Decode,
    Fill,
    Job,
    QueueFullError,
    Scheduler,
)

ROWS = 1056


def job(tenant: str = "", length: int = 5, limit: int = 40, first: int = 1) -> Job:
    return Job(tenant, list(range(first, first + length)), limit)


def filled(scheduler: Scheduler) -> Decode:
    """Fill all prompts, and return the decoding loop that follows."""
    for _ in range(1000):
        action = scheduler.next()
        if isinstance(action, Fill):
            scheduler.filled(action)
        elif isinstance(action, Decode) and all(one.is_filled for one in scheduler.jobs):
            return action
    raise AssertionError("prompts are never filled")


def test_a_prompt_is_filled_but_for_its_last_token_and_then_decoded() -> None:
    scheduler = Scheduler(Bounds(4), ROWS)
    one = job(length=700)
    scheduler.add(one)
    sizes = []
    while isinstance(action := scheduler.next(), Fill):
        sizes.append((action.chunk.start, action.chunk.count))
        scheduler.filled(action)
    assert sizes[0] == (0, 512) and sum(count for _, count in sizes) == 699
    assert action == Decode((one,), 1, STEPS)


def test_a_prompt_of_one_token_needs_no_filling() -> None:
    scheduler = Scheduler(Bounds(4), ROWS)
    scheduler.add(job(length=1))
    assert isinstance(scheduler.next(), Decode)


def test_chunks_and_short_loops_take_turns() -> None:
    scheduler = Scheduler(Bounds(4), ROWS)
    scheduler.add(job())
    filled(scheduler)
    scheduler.add(job(length=1000, first=500))
    kinds = []
    for _ in range(6):
        action = scheduler.next()
        if isinstance(action, Fill):
            scheduler.filled(action)
        elif isinstance(action, Decode) and len(action.jobs) == 1:
            assert action.steps == STEPS_BETWEEN_CHUNKS
        kinds.append(type(action))
    assert kinds[:4] == [Fill, Decode, Fill, Decode]


def test_short_prompts_are_filled_in_one_turn() -> None:
    """So that requests that come together are decoded together from the first token on."""
    scheduler = Scheduler(Bounds(16), ROWS)
    for number in range(16):
        scheduler.add(job(length=20, first=100 * number))
    for _ in range(16):
        action = scheduler.next()
        assert isinstance(action, Fill)
        scheduler.filled(action)
    action = scheduler.next()
    assert isinstance(action, Decode) and len(action.jobs) == 16


def test_plans_have_the_least_rows_that_hold_the_slots() -> None:
    for count, rows in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (32, 32)):
        scheduler = Scheduler(Bounds(32), ROWS)
        for number in range(count):
            scheduler.add(job(first=100 * number))
        assert filled(scheduler).rows == rows


def test_a_loop_ends_with_the_shortest_answer() -> None:
    scheduler = Scheduler(Bounds(4), ROWS)
    for limit in (40, 3):
        scheduler.add(job(limit=limit))
    assert filled(scheduler).steps == 3


def test_tenants_take_turns_and_requests_of_one_keep_their_order() -> None:
    scheduler = Scheduler(Bounds(1, 64), ROWS)
    greedy = [job("greedy", first=100 * number) for number in range(4)]
    modest = [job("modest", first=1000 * number) for number in range(1, 3)]
    for one in (*greedy, *modest):
        scheduler.add(one)
    order = []
    while scheduler.next() is not None:
        [one] = scheduler.jobs
        order.append(one)
        scheduler.end(one)
    assert order == [greedy[0], modest[0], greedy[1], modest[1], *greedy[2:]]


def test_a_slot_with_the_begin_of_a_prompt_is_taken_and_reused() -> None:
    scheduler = Scheduler(Bounds(4), ROWS)
    first, second = job(length=40), job(length=40, first=1000)
    for one in (first, second):
        scheduler.add(one)
    filled(scheduler)
    for token in (7, 8, 9):
        scheduler.chosen(second, token)
    for one in (first, second):
        scheduler.end(one)
    longer = Job("", [*second.prompt, 7, 8, 5], 10)
    scheduler.add(longer)
    action = scheduler.next()
    # The last token of an answer was chosen, and not computed.
    assert isinstance(action, Fill | Decode) and longer.slot == second.slot == 1
    assert (longer.reused, longer.filled) == (42, 42)


def test_the_same_prompt_again_computes_its_last_token_alone() -> None:
    scheduler = Scheduler(Bounds(2), ROWS)
    first = job(length=40)
    scheduler.add(first)
    filled(scheduler)
    scheduler.chosen(first, 3)
    scheduler.end(first)
    again = job(length=40)
    scheduler.add(again)
    assert isinstance(scheduler.next(), Decode) and again.reused == 39


def test_a_cache_that_was_lost_is_not_reused() -> None:
    scheduler = Scheduler(Bounds(2), ROWS)
    first = job(length=40)
    scheduler.add(first)
    filled(scheduler)
    scheduler.end(first)
    scheduler.forget()
    again = job(length=40)
    scheduler.add(again)
    scheduler.next()
    assert again.reused == 0


def test_a_full_queue_refuses_and_takes_requests_again_once_one_leaves() -> None:
    scheduler = Scheduler(Bounds(2, 3), ROWS)
    jobs = [job(first=100 * number) for number in range(5)]
    for one in jobs:
        scheduler.add(one)
    with pytest.raises(QueueFullError, match="requests wait already, of at most 3"):
        scheduler.add(job())
    filled(scheduler)
    assert (scheduler.waiting, len(scheduler.jobs)) == (3, 2)
    scheduler.end(jobs[-1])
    scheduler.add(job())
    with pytest.raises(QueueFullError):
        scheduler.room_for(1)


def test_whatever_comes_and_goes_every_request_is_served(seed: int = 11) -> None:
    """Random arrivals, ends and lengths: no slot is given twice, and nothing is left."""
    rng, scheduler = random.Random(seed), Scheduler(Bounds(8, 100), ROWS)
    done: set[int] = set()
    jobs: list[Job] = []
    for _ in range(4000):
        if len(jobs) < 120 and rng.random() < 0.1:
            jobs.append(job(rng.choice("abc"), rng.randint(1, 900), rng.randint(1, 50), rng.randint(1, 9)))
            scheduler.add(jobs[-1])
        if jobs and rng.random() < 0.02:
            scheduler.end(rng.choice(jobs))
        action = scheduler.next()
        slots = [one.slot for one in scheduler.jobs]
        assert len(set(slots)) == len(slots)
        if isinstance(action, Fill):
            assert action.chunk.start + action.chunk.size <= ROWS
            scheduler.filled(action)
        elif isinstance(action, Decode):
            assert action.rows > max(one.slot for one in action.jobs)
            for _ in range(action.steps):
                for one in action.jobs:
                    scheduler.chosen(one, 5)
            for one in action.jobs:
                assert len(one.answer) <= one.limit, f"seed {seed}"
                if len(one.answer) == one.limit:
                    scheduler.end(one)
                    done.add(id(one))
    while (action := scheduler.next()) is not None:
        for one in scheduler.jobs:
            scheduler.end(one)
    assert all(one.is_over for one in jobs) and len(done) > 20
    assert scheduler.waiting == 0
