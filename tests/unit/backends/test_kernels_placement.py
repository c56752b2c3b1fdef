"""Which helpers of a run go to another processor, and to which."""

from __future__ import annotations

from heliograph_backends.cpu.kernels.runtime.workers import UNKNOWN, choices, colliding


def test_helpers_that_are_apart_stay_where_they_are() -> None:
    assert colliding(0, [1, 2, 3]) == []
    assert colliding(0, []) == []


def test_a_helper_where_the_leader_is_goes_elsewhere() -> None:
    assert colliding(0, [0, 1]) == [0]
    assert colliding(2, [1, 2, 3]) == [1]
    assert choices({0, 1, 2, 3}, 2, [1, 2, 3]) == {0}


def test_of_helpers_on_one_processor_the_first_stays() -> None:
    assert colliding(2, [1, 1, 2]) == [1, 2]
    assert colliding(0, [1, 1, 2, 1]) == [1, 3]
    assert choices(set(range(6)), 0, [1, 1, 2, 1]) == {3, 4, 5}


def test_a_helper_goes_where_no_worker_is_and_where_it_may() -> None:
    assert choices({0, 1, 2, 3}, 0, [0, 2]) == {1, 3}
    assert choices({4, 6}, 4, [4]) == {6}
    assert choices({5}, 0, [0]) == {5}
    assert choices({0}, 0, [0]) == set()


def test_with_more_workers_than_processors_helpers_stay() -> None:
    assert colliding(0, [1, 0]) == [1]
    assert choices({0, 1}, 0, [1]) == set()
    assert choices({0, 1}, 0, [1, 0]) == set()


def test_who_has_not_said_where_it_is_stays() -> None:
    assert colliding(UNKNOWN, [UNKNOWN, UNKNOWN]) == []
    assert colliding(0, [UNKNOWN, 0]) == [1]
    assert colliding(0, [UNKNOWN, UNKNOWN, 1]) == []
