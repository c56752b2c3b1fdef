"""The scheduler of a model that serves many answers: decisions alone, no model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from heliograph.llm.serving.pages import PAGE, Table
from heliograph.llm.serving.scheduler import (
    STEPS,
    STEPS_BETWEEN_CHUNKS,
    Bounds,
    Decode,
    Fill,
    Job,
    QueueFullError,
    Scheduler,
    places_of,
    table_sizes,
)

CONTEXT = 1024
ENDING = 0


def job(tenant: str = "", length: int = 5, limit: int = 40, first: int = 1) -> Job:
    return Job(tenant, list(range(first, first + length)), limit)


def in_pages(pages: int, answers: int = 32) -> Scheduler:
    """A scheduler with so many pages."""
    return Scheduler(Bounds(answers, 1000, pages * PAGE), CONTEXT)


@dataclass
class Row:
    """A row of a running loop: what the device knows of an answer."""

    job: Job
    numbers: list[int]
    tokens: list[int]
    limit: int

    @property
    def is_active(self) -> bool:
        return self.tokens[-1] != ENDING and len(self.tokens) - 1 < self.limit


@dataclass
class Device:
    """A cache that has, at each place, all tokens up to that one, and the scheduler's work on it."""

    scheduler: Scheduler
    #: The steps after which its loops end.
    steps: int = 1 << 30
    rows: dict[int, int] = field(default_factory=dict)

    def run(self, action: Fill | Decode, rng: random.Random | None = None) -> list[Job]:
        """Compute an action, and return the answers that ended with it. With `rng`, some end in the
        middle, and their rows of the loop go on."""
        if isinstance(action, Fill):
            self._fill(action)
            return []
        assert len(action.jobs) <= action.rows
        rows = [Row(one, list(one.pages), list(one.tokens), one.end) for one in action.jobs]
        assert all(len(one.numbers) <= action.pages for one in rows)
        left = min(action.steps, self.steps)
        while left and any(one.is_active for one in rows):
            self._step(rows, rng)
            for number, one in self.scheduler.grow(action):
                rows[number].numbers, rows[number].limit = list(one.pages), one.end
                assert len(one.pages) <= action.pages
            left -= 1
            if self.scheduler.ends(action):
                # The loop hears of it a little later.
                left = min(left, rng.randint(0, 3) if rng else 0)
        return [one for one in action.jobs if one.is_over]

    def _step(self, rows: list[Row], rng: random.Random | None) -> None:
        # A row that writes into a page which another one reads would change what is checked here.
        active = [one for one in rows if one.is_active]
        for one in active:
            self._write(one.numbers, one.tokens, len(one.tokens) - 1)
        for one in active:
            if not one.job.is_over:
                self._check(one.numbers, one.tokens, len(one.tokens))
            one.tokens.append(following(one.tokens))
            if one.job.is_over:
                continue
            self.scheduler.chosen(one.job, one.tokens[-1])
            if one.tokens[-1] == ENDING or not one.job.left or (rng and rng.random() < 0.01):
                self.scheduler.end(one.job)

    def _fill(self, action: Fill) -> None:
        numbers, tokens, chunk = action.job.pages, action.job.tokens, action.chunk
        places = places_of(numbers, chunk, self.scheduler.pages.total)
        assert len(places) == chunk.size
        assert min(places[chunk.count :], default=1 << 40) >= self.scheduler.pages.total * PAGE
        self._check(numbers, tokens, chunk.start)
        for place in range(chunk.start, chunk.start + chunk.count):
            self._write(numbers, tokens, place)
        assert places[: chunk.count] == [
            numbers[place // PAGE] * PAGE + place % PAGE
            for place in range(chunk.start, chunk.start + chunk.count)
        ]
        assert chunk.start + chunk.count <= action.pages * PAGE
        self.scheduler.filled(action)

    def _write(self, numbers: list[int], tokens: list[int], place: int) -> None:
        self.rows[numbers[place // PAGE] * PAGE + place % PAGE] = hash(tuple(tokens[: place + 1]))

    def _check(self, numbers: list[int], tokens: list[int], count: int) -> None:
        for place in range(count):
            found = self.rows.get(numbers[place // PAGE] * PAGE + place % PAGE)
            assert found == hash(tuple(tokens[: place + 1]))


def following(tokens: list[int]) -> int:
    """The token that the model chooses after others: it depends on all of them."""
    return hash(tuple(tokens)) % 50


def alone(prompt: Sequence[int], limit: int) -> list[int]:
    """The answer to a prompt of a model that has nothing else to do."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit and (len(tokens) == len(prompt) or tokens[-1] != ENDING):
        tokens.append(following(tokens))
    return tokens


def check_pages(scheduler: Scheduler) -> None:
    """Check who has which page: each is free, kept, or in tables, and one table alone may write
    it."""
    pages, tables = scheduler.pages, [one.table for one in scheduler.jobs if one.table is not None]
    listed = [page for table in tables for page in table.pages]
    readers = {page: listed.count(page) for page in listed}
    assert all(page.readers == count for page, count in readers.items())
    assert len({page.number for page in readers}) == len(readers) == pages.used
    assert pages.used + pages.kept + pages.free == pages.total
    assert pages.shared == sum(count > 1 for count in readers.values())
    assert all(readers[page] == 1 and page.key is None for page in writable(tables))
    assert all(one.table is None for one in scheduler.all_jobs if one not in scheduler.jobs)


def writable(tables: list[Table]) -> list[object]:
    return [page for table in tables for page in table.pages[table.found :]]


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
    scheduler = Scheduler(Bounds(4), CONTEXT)
    one = job(length=700)
    scheduler.add(one)
    sizes = []
    while isinstance(action := scheduler.next(), Fill):
        sizes.append((action.chunk.start, action.chunk.count))
        scheduler.filled(action)
    assert sizes[0] == (0, 512) and sum(count for _, count in sizes) == 699
    assert action == Decode((one,), 1, 32, STEPS)


def test_a_prompt_of_one_token_needs_no_filling() -> None:
    scheduler = Scheduler(Bounds(4), CONTEXT)
    scheduler.add(job(length=1))
    assert isinstance(scheduler.next(), Decode)


def test_chunks_and_short_loops_take_turns() -> None:
    scheduler = Scheduler(Bounds(4), CONTEXT)
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


@pytest.mark.parametrize(("turn", "sizes"), [(1, [32]), (100, [32] * 3), (140, [128]), (9999, [512])])
def test_answers_that_have_begun_wait_for_no_more_tokens_of_prompts_than_a_turn(
    turn: int, sizes: list[int]
) -> None:
    scheduler = Scheduler(Bounds(4), CONTEXT)
    first = job()
    scheduler.add(first)
    filled(scheduler)
    scheduler.chosen(first, 1)
    scheduler.turn = turn
    scheduler.add(job(length=1000, first=500))
    for _ in range(1 if turn > 500 else 2):
        found = []
        while isinstance(action := scheduler.next(), Fill):
            found.append(action.chunk.size)
            scheduler.filled(action)
        assert isinstance(action, Decode) and action.jobs == (first,)
        assert found == sizes


def test_answers_that_have_not_begun_wait_for_prompts_that_came_with_theirs() -> None:
    scheduler = Scheduler(Bounds(4), CONTEXT)
    scheduler.turn = 1
    for first in (1, 1000, 2000, 3000):
        scheduler.add(job(length=20, first=first))
    kinds = []
    while isinstance(action := scheduler.next(), Fill):
        kinds.append(action.chunk.size)
        scheduler.filled(action)
    assert kinds == [32] * 4 and isinstance(action, Decode)


def test_short_prompts_are_filled_in_one_turn() -> None:
    """So that requests that come together are decoded together from the first token on."""
    scheduler = Scheduler(Bounds(16), CONTEXT)
    for number in range(16):
        scheduler.add(job(length=20, first=100 * number))
    for _ in range(16):
        action = scheduler.next()
        assert isinstance(action, Fill)
        scheduler.filled(action)
    action = scheduler.next()
    assert isinstance(action, Decode) and len(action.jobs) == 16


def test_plans_have_the_least_rows_that_hold_the_answers() -> None:
    for count, rows in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (32, 32)):
        scheduler = Scheduler(Bounds(32), CONTEXT)
        for number in range(count):
            scheduler.add(job(first=100 * number))
        assert filled(scheduler).rows == rows


def test_plans_have_the_least_tables_that_hold_the_pages_of_the_answers() -> None:
    assert table_sizes(600) == [32, 128, 512, 600]
    assert table_sizes(128) == [32, 128] and table_sizes(3) == [3]
    for length, pages in ((5, 32), (1000, 32), (1020, 128), (4050, 128)):
        scheduler = Scheduler(Bounds(4), 4 * CONTEXT)
        scheduler.add(job(length=length))
        assert filled(scheduler).pages == pages, length


def test_answers_of_different_kinds_take_turns() -> None:
    scheduler = Scheduler(Bounds(8), CONTEXT)
    jobs = [Job("", [number], 40, kind) for number, kind in enumerate((0, 1, 0, 2))]
    for one in jobs:
        scheduler.add(one)
    found = [scheduler.next() for _ in range(4)]
    assert [one.jobs for one in found if isinstance(one, Decode)] == [
        (jobs[1],),
        (jobs[3],),
        (jobs[0], jobs[2]),
        (jobs[1],),
    ]


def test_a_loop_goes_on_when_an_answer_ends_unless_a_smaller_plan_has_room() -> None:
    scheduler = Scheduler(Bounds(4), CONTEXT)
    for limit in (40, 3, 5, 40):
        scheduler.add(job(limit=limit))
    loop = filled(scheduler)
    for count, ends in ((3, False), (2, True)):
        scheduler.end(scheduler.jobs[0])
        assert (len(scheduler.jobs), scheduler.ends(loop)) == (count, ends)


def test_a_loop_goes_on_while_its_answers_get_pages() -> None:
    scheduler = in_pages(6)
    for first in (1, 1000):
        scheduler.add(job(length=20, limit=500, first=first))
    loop, written = filled(scheduler), 0
    while not scheduler.ends(loop):
        for one in loop.jobs:
            scheduler.chosen(one, written)
        scheduler.grow(loop)
        written += 1
    assert 20 + written == 3 * PAGE + 1
    assert all(not one.room for one in loop.jobs)


def test_a_loop_ends_after_its_present_step_when_a_request_could_begin() -> None:
    scheduler = Scheduler(Bounds(1), CONTEXT)
    first, second = job(), job(first=100)
    scheduler.add(first)
    loop = filled(scheduler)
    scheduler.add(second)
    assert not scheduler.ends(loop)
    scheduler = Scheduler(Bounds(2), CONTEXT)
    scheduler.add(job())
    loop = filled(scheduler)
    scheduler.add(job(first=100))
    assert scheduler.ends(loop)


def test_pages_that_a_running_loop_may_write_to_are_given_away_when_it_has_ended() -> None:
    scheduler = in_pages(4)
    gone, other = job(length=20, limit=90), job(length=20, limit=90, first=1000)
    for one in (gone, other):
        scheduler.add(one)
    loop, own = filled(scheduler), gone.pages
    scheduler.end(gone)
    for token in range(45):
        scheduler.chosen(other, token)
        assert not set(other.pages) & set(own)
        scheduler.grow(loop)
    assert not other.room and scheduler.ends(loop)
    assert isinstance(scheduler.next(), Decode) and other.room


def test_tenants_take_turns_and_requests_of_one_keep_their_order() -> None:
    scheduler = Scheduler(Bounds(1, 64), CONTEXT)
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


def test_the_full_pages_of_an_answer_serve_a_prompt_that_continues_it() -> None:
    scheduler = in_pages(100)
    first = job(length=60, limit=100)
    scheduler.add(first)
    device = Device(scheduler, 16)
    for _ in range(5):
        action = scheduler.next()
        assert action is not None
        device.run(action)
    assert len(first.tokens) > 3 * PAGE
    scheduler.end(first)
    longer = Job("", [*first.tokens[:-1], 999], 10)
    scheduler.add(longer)
    scheduler.next()
    # The last token of an answer was chosen, and not computed.
    assert longer.reused == longer.filled == (len(first.tokens) - 1) // PAGE * PAGE


@pytest.mark.parametrize(("length", "reused"), [(40, 32), (64, 32), (65, 64), (32, 0), (31, 0)])
def test_the_page_of_a_prompts_last_token_is_computed_again(length: int, reused: int) -> None:
    """Since the decoding step writes that token."""
    scheduler = in_pages(100)
    for _ in range(2):
        one = job(length=length)
        scheduler.add(one)
        filled(scheduler)
        for token in range(40):
            scheduler.chosen(one, token)
        scheduler.end(one)
    assert one.reused == reused


def test_prompts_that_come_together_compute_what_they_share_once() -> None:
    scheduler = in_pages(200)
    shared = list(range(1000, 1300))
    jobs = [Job("", [*shared, number, number], 20) for number in range(16)]
    for one in jobs:
        scheduler.add(one)
    device, computed = Device(scheduler), 0
    while not all(one.is_filled for one in jobs):
        action = scheduler.next()
        assert action is not None
        computed += action.chunk.count if isinstance(action, Fill) else 0
        device.run(action)
        check_pages(scheduler)
    whole = len(shared) // PAGE * PAGE
    assert [one.reused for one in jobs] == [0, *[whole] * 15]
    assert computed == 301 + 15 * (301 - whole)
    assert scheduler.pages.shared == whole // PAGE


def test_two_answers_that_write_the_same_tokens_end_up_with_one_page() -> None:
    scheduler = in_pages(100)
    first = next(n for n in range(1000) if len(alone(job(length=20, first=n).prompt, 60)) == 80)
    jobs = [job(length=20, limit=60, first=first) for _ in range(2)]
    for one in jobs:
        scheduler.add(one)
    device = Device(scheduler, 16)
    while len(jobs[0].tokens) < 66:
        action = scheduler.next()
        assert action is not None
        device.run(action)
        check_pages(scheduler)
    assert jobs[0].tokens == jobs[1].tokens and scheduler.pages.shared == 2


def test_pages_whose_tokens_have_the_same_hash_are_not_taken_for_each_other() -> None:
    scheduler = in_pages(100)
    prompts = [[0] * 70, [2**61 - 1] * 70]
    assert hash(tuple(prompts[0])) == hash(tuple(prompts[1]))
    for prompt in prompts:
        one = Job("", prompt, 5)
        scheduler.add(one)
        filled(scheduler)
        scheduler.end(one)
        assert one.reused == 0


def test_tenants_do_not_find_each_others_pages() -> None:
    scheduler = in_pages(100)
    for tenant in "ab":
        one = job(tenant, length=100)
        scheduler.add(one)
        filled(scheduler)
        scheduler.end(one)
        assert one.reused == 0
    assert scheduler.pages.kept == 6


def test_the_pages_that_were_not_used_for_the_longest_time_go_first() -> None:
    scheduler = in_pages(8)

    def reused(first: int, length: int = 70) -> int:
        one = job(length=length, first=first)
        scheduler.add(one)
        filled(scheduler)
        scheduler.end(one)
        return one.reused

    for first in (1000, 2000, 3000):
        assert reused(first) == 0
    assert reused(1000) == 64
    # Three pages for this one: a page that was free, and those of 2000.
    assert reused(4000, 140) == 0
    assert scheduler.pages.evictions >= 2
    assert reused(1000) == 64


def test_a_page_goes_before_the_one_that_it_continues() -> None:
    """Else the rest could not be found."""
    scheduler = in_pages(5)
    one = job(length=140)
    scheduler.add(one)
    filled(scheduler)
    scheduler.end(one)
    other = job(length=70, first=5000)
    scheduler.add(other)
    filled(scheduler)
    assert scheduler.pages.evictions == 2
    scheduler.end(other)
    again = job(length=140)
    scheduler.add(again)
    scheduler.next()
    assert again.reused == 64


def test_a_cache_that_was_lost_is_not_reused() -> None:
    scheduler = in_pages(100)
    first = job(length=40)
    scheduler.add(first)
    filled(scheduler)
    scheduler.end(first)
    scheduler.forget()
    again = job(length=40)
    scheduler.add(again)
    scheduler.next()
    assert again.reused == 0 and scheduler.pages.kept == 0
    check_pages(scheduler)


def test_short_answers_take_the_pages_that_they_need_alone() -> None:
    """In the memory of two answers of a whole context."""
    scheduler = Scheduler(Bounds(32, 64, 2 * CONTEXT), CONTEXT)
    for number in range(32):
        scheduler.add(job(length=20, first=100 * number))
    assert len(filled(scheduler).jobs) == 32


def test_a_prompt_waits_until_its_pages_fit_and_none_overtakes_it() -> None:
    scheduler = in_pages(12)
    first, large, small = job(length=200), job(length=300, first=1000), job(length=5, first=2000)
    for one in (first, large, small):
        scheduler.add(one)
    filled(scheduler)
    assert scheduler.jobs == [first] and scheduler.waiting == 2 and not scheduler.could_admit
    scheduler.end(first)
    assert scheduler.could_admit
    scheduler.next()
    assert scheduler.jobs == [large, small]


def test_without_a_page_the_youngest_answer_waits_again_and_goes_on_later() -> None:
    scheduler = in_pages(7)
    old, young = job(length=60, limit=100), job("other", length=60, limit=100, first=1000)
    expected = [alone(one.prompt, one.limit) for one in (old, young)]
    for one in (old, young):
        scheduler.add(one)
    device = Device(scheduler)
    put_back = 0
    while (action := scheduler.next()) is not None:
        check_pages(scheduler)
        if scheduler.puts_back > put_back:
            put_back = scheduler.puts_back
            assert scheduler.jobs == [old] and list(scheduler.all_jobs) == [old, young]
            assert len(young.tokens) > 60
        device.run(action)
        check_pages(scheduler)
    assert put_back and [old.tokens, young.tokens] == expected
    assert young.reused == 0, "what a second time finds is not the prompt's"


def test_an_answer_that_waits_again_is_before_those_that_never_began() -> None:
    scheduler = in_pages(7, answers=2)
    jobs = [job(str(number), length=60, limit=100, first=1000 * number) for number in range(4)]
    for one in jobs:
        scheduler.add(one)
    device, order = Device(scheduler), []
    while (action := scheduler.next()) is not None:
        order += [one for one in scheduler.jobs if one not in order]
        device.run(action)
    assert scheduler.puts_back and order == jobs


def test_a_full_queue_refuses_and_takes_requests_again_once_one_leaves() -> None:
    scheduler = Scheduler(Bounds(2, 3), CONTEXT)
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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("pages", "answers"), [(10, 4), (24, 32), (80, 8)])
def test_whatever_comes_and_goes_every_answer_is_what_it_is_alone(
    seed: int, pages: int, answers: int
) -> None:
    """Random arrivals, ends and lengths, prompts that share their beginnings, and too few pages."""
    rng, scheduler = random.Random(seed), in_pages(pages, answers)
    device, jobs = Device(scheduler), list[Job]()
    expected: dict[Job, list[int]] = {}
    most = pages * PAGE
    for _ in range(500):
        if len(jobs) < 100 and rng.random() < 0.3:
            length = rng.randint(1, min(300, most - 60))
            prompt = [*range(100 * rng.randint(1, 3), 2000)][: rng.randint(0, length)]
            prompt += [rng.randint(1, 50) for _ in range(length - len(prompt))]
            one = Job(rng.choice("aab"), prompt, rng.randint(1, 60), rng.randint(0, 1))
            expected[one] = alone(prompt, one.limit)
            jobs.append(one)
            scheduler.add(one)
        if jobs and rng.random() < 0.02:
            scheduler.end(rng.choice(jobs))
        if (action := scheduler.next()) is not None:
            device.run(action, rng)
        check_pages(scheduler)
    while (action := scheduler.next()) is not None:
        device.run(action)
        check_pages(scheduler)
    print(f"seed {seed}: {scheduler.puts_back} put back, {scheduler.pages.evictions} evicted")
    assert all(one.is_over for one in jobs) and scheduler.waiting == 0
    for one in jobs:
        assert one.tokens == expected[one][: len(one.tokens)], f"seed {seed}"
    assert sum(one.tokens == expected[one] for one in jobs) > len(jobs) // 2
    assert scheduler.pages.used == 0 and scheduler.pages.shared == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_tenant_that_asks_for_everything_does_not_hold_up_another(seed: int) -> None:
    """With too few pages for all: the requests of the modest tenant begin in every other turn."""
    rng, scheduler = random.Random(seed), in_pages(16, 8)
    device, order = Device(scheduler), list[Job]()
    greedy = [job("greedy", rng.randint(60, 200), 60, 1000 * n) for n in range(1, 40)]
    modest = [job("modest", rng.randint(5, 200), 60, 100_000 * n) for n in range(1, 6)]
    for one in (*greedy, *modest):
        scheduler.add(one)
    while (action := scheduler.next()) is not None:
        order += [one for one in scheduler.jobs if one not in order]
        device.run(action)
    assert order[:10] == [one for pair in zip(greedy, modest, strict=False) for one in pair], f"seed {seed}"
    assert [one for one in order if one.tenant == "greedy"] == greedy
