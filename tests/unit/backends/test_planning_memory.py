"""The arena: lifetimes packed into one block of memory, or into chunks of a largest size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heliograph_backends.planning.memory import UNBOUNDED, ArenaLayout, Lifetime, padded, plan_arena
from heliograph_proto.errors import OutOfMemoryError

steady = settings(derandomize=True, deadline=None, max_examples=200)


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    found = []
    for _ in range(draw(st.integers(0, 40))):
        first = draw(st.integers(0, 20))
        found.append(Lifetime(draw(st.integers(0, 1000)), first, first + draw(st.integers(0, 6))))
    return found


#: The largest size of a chunk: none, or as large as the largest lifetime, or a little larger.
limits = st.sampled_from([UNBOUNDED, 1024, 1600, 4096])


def overlap_in_time(a: Lifetime, b: Lifetime) -> bool:
    return a.first_step <= b.last_step and b.first_step <= a.last_step


def spans(given: list[Lifetime], arena: ArenaLayout, alignment: int) -> list[tuple[int, int, int]]:
    """(chunk, start, end) of each lifetime."""
    places = zip(given, arena.chunks, arena.offsets, strict=True)
    return [(chunk, start, start + padded(one.size_bytes, alignment)) for one, chunk, start in places]


def peak_bytes(given: list[Lifetime]) -> int:
    """The most bytes that live at once."""
    return max(
        sum(padded(one.size_bytes, 64) for one in given if one.first_step <= step <= one.last_step)
        for step in range(40)
    )


@steady
@given(lifetimes(), st.sampled_from([1, 64, 256]), limits)
def test_results_that_live_at_once_never_share_memory(
    given: list[Lifetime], alignment: int, limit: int
) -> None:
    found = spans(given, plan_arena(given, alignment, limit), alignment)
    for i, (chunk, start, end) in enumerate(found):
        for j, (other, begin, stop) in enumerate(found[:i]):
            if overlap_in_time(given[i], given[j]):
                assert chunk != other or end <= begin or stop <= start


@steady
@given(lifetimes(), st.sampled_from([1, 64]), limits)
def test_each_chunk_holds_all_that_lies_in_it_and_is_no_larger_than_one_may_be(
    given: list[Lifetime], alignment: int, limit: int
) -> None:
    arena = plan_arena(given, alignment, limit)
    found = spans(given, arena, alignment)
    for number, size in enumerate(arena.chunk_bytes):
        assert size == max(end for chunk, _, end in found if chunk == number)
        assert size <= limit
    assert {chunk for chunk, _, _ in found} == set(range(len(arena.chunk_bytes)))
    assert all(offset % alignment == 0 for offset in arena.offsets)


@steady
@given(lifetimes(), limits)
def test_the_arena_is_at_least_what_lives_at_once_and_at_most_everything(
    given: list[Lifetime], limit: int
) -> None:
    everything = sum(padded(one.size_bytes, 64) for one in given)
    assert peak_bytes(given) <= plan_arena(given, 64, limit).size_bytes <= everything


@steady
@given(lifetimes())
def test_without_a_limit_there_is_one_chunk(given: list[Lifetime]) -> None:
    assert len(plan_arena(given).chunk_bytes) == bool(given)


def test_random_lifetimes_take_hardly_more_than_what_lives_at_once() -> None:
    random, taken, needed = np.random.default_rng(5), 0, 0
    for _ in range(50):
        firsts = random.integers(0, 30, 60).tolist()
        sizes = (2 ** random.integers(6, 16, 60)).tolist()
        lives = random.integers(1, 8, 60).tolist()
        given = [Lifetime(size, at, at + life) for size, at, life in zip(sizes, firsts, lives, strict=True)]
        taken += plan_arena(given).size_bytes
        needed += peak_bytes(given)
    assert taken <= 1.02 * needed


def test_a_chain_takes_two_places_in_turn() -> None:
    chain = [Lifetime(100, step, step + 1) for step in range(50)]
    arena = plan_arena(chain)
    assert arena.size_bytes == 2 * 128
    assert set(arena.offsets) == {0, 128}


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    large, small, kept = Lifetime(512, 0, 0), Lifetime(128, 0, 0), Lifetime(64, 0, 9)
    arena = plan_arena([large, kept, small, kept, Lifetime(100, 1, 9)])
    assert arena.offsets[4] == arena.offsets[2] == 512 + 64


def test_free_neighbours_join_and_the_last_block_grows() -> None:
    given = [Lifetime(64, 0, 0), Lifetime(64, 0, 0), Lifetime(64, 0, 0), Lifetime(256, 1, 1)]
    assert plan_arena(given).offsets[3] == 0
    assert plan_arena(given).size_bytes == 256


def test_where_best_fit_leaves_a_gap_that_is_too_small_the_largest_go_first() -> None:
    # In the order of the steps the kept one lies behind the first, and 256 bytes fit neither before it nor
    # may they take what is free on both sides.
    first, kept, late = Lifetime(128, 0, 0), Lifetime(64, 0, 2), Lifetime(256, 1, 2)
    arena = plan_arena([first, kept, late])
    assert arena.size_bytes == 256 + 64
    assert arena.offsets == (0, 256, 0)


def test_empty_results_have_places_of_their_own() -> None:
    assert plan_arena([Lifetime(0, 0, 0), Lifetime(0, 0, 0)]).offsets == (0, 64)


def test_what_one_buffer_cannot_hold_lies_in_several() -> None:
    arena = plan_arena([Lifetime(100, 0, 1)] * 5, 64, max_size=300)
    assert arena.chunk_bytes == (256, 256, 128)
    assert arena.chunks == (0, 0, 1, 1, 2)
    assert arena.offsets == (0, 128, 0, 128, 0)


def test_what_is_free_in_an_early_chunk_is_used_again() -> None:
    given = [Lifetime(256, 0, 0), Lifetime(256, 0, 9), Lifetime(256, 1, 9)]
    arena = plan_arena(given, 64, max_size=256)
    assert arena.chunks == (0, 1, 0)


def test_an_arena_that_one_buffer_holds_is_not_cut() -> None:
    assert plan_arena([Lifetime(100, 0, 1)] * 2, 64, max_size=256).chunk_bytes == (256,)


def test_a_result_that_no_buffer_holds_is_refused() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"300 bytes; one buffer of the device has 256 at most"
    ) as error:
        plan_arena([Lifetime(10, 0, 1), Lifetime(300, 0, 1)], 64, max_size=300)
    assert error.value.advice


def test_many_results_that_live_all_the_time_are_packed_in_time_that_is_not_their_square() -> None:
    """Were every pair looked at, this alone would take longer than the whole suite may."""
    given = [Lifetime(64 * (1 + number % 7), number, 20_000) for number in range(20_000)]
    given += [Lifetime(640, number, number + 3) for number in range(20_000)]
    assert plan_arena(given).size_bytes >= sum(one.size_bytes for one in given[:20_000])
