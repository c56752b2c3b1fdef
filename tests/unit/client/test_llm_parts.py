"""Language models' pure parts: chunks of a prompt, pieces of a text, settings, the largest logits."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph.graph.digests import is_frozen
from heliograph.llm.chunks import Chunk, cut, shared
from heliograph.llm.sampling import Form, Settings
from heliograph.llm.speculating import COUNTS, LONGEST_PAUSE, Lookup, Pace, agreeing
from heliograph.llm.tools.pieces import Pieces


def test_chunks_cover_a_prompt_without_a_gap_and_stay_in_the_cache() -> None:
    for start, end, rows in ((0, 1, 64), (5, 700, 736), (0, 512, 544), (37, 250, 288), (31, 32, 64)):
        chunks = list(cut(start, end, rows))
        places = [place for one in chunks for place in range(one.start, one.start + one.count)]
        assert places == list(range(start, end))
        assert all(one.count == one.size for one in chunks[:-1])
        assert all(one.start + one.size <= rows for one in chunks)


def test_a_large_chunk_is_taken_where_most_of_it_is_needed() -> None:
    assert list(cut(0, 600, 2048))[0] == Chunk(0, 512, 512)
    assert list(cut(0, 100, 2048)) == [Chunk(0, 100, 128)]
    assert [one.size for one in cut(0, 70, 2048)] == [32, 32, 32]
    assert list(cut(0, 0, 64)) == []


def test_shared_tokens_are_those_at_the_beginning() -> None:
    assert shared([1, 2, 3], [1, 2, 4, 3]) == 2
    assert shared([], [1]) == 0 == shared([2], [1, 2])
    assert shared([1, 2], [1, 2, 3]) == 2


class Letters:
    """A stream whose tokens are letters; every third one comes with the next."""

    def __init__(self) -> None:
        self.held = ""

    def put(self, *tokens: int) -> str:
        self.held += "".join(map(chr, tokens))
        if len(self.held) % 3 == 1:
            return ""
        found, self.held = self.held, ""
        return found

    def end(self) -> str:
        found, self.held = self.held, ""
        return found


def test_pieces_end_before_the_first_stop_text_however_they_are_cut() -> None:
    seed = 20261123
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 40)))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randrange(2, 6))) for _ in range(3)]
        pieces = Pieces(Letters(), stops)
        found = ""
        for letter in text:
            found += pieces.add(ord(letter))
            assert not any(stop in found for stop in stops)
            if pieces.is_stopped:
                break
        found += pieces.rest()
        places = [text.index(stop) for stop in stops if stop in text]
        # Several may end in one piece: the first to begin counts.
        assert text.startswith(found)
        assert bool(places) == pieces.is_stopped
        assert len(found) == (min(places) if places else len(text)) or len(places) > 1


def test_weights_in_a_mapped_file_are_hashed_once(tmp_path: Path) -> None:
    """A map to read is as unchangeable for this process as bytes; one to write is not."""
    (tmp_path / "weights").write_bytes(bytes(64))
    with (tmp_path / "weights").open("r+b") as file:
        for access, is_known in ((mmap.ACCESS_READ, True), (mmap.ACCESS_WRITE, False)):
            mapped = mmap.mmap(file.fileno(), 0, access=access)
            assert is_frozen(np.frombuffer(mapped, np.float32)) is is_known
    assert not is_frozen(np.frombuffer(memoryview(bytearray(64)).toreadonly(), np.float32))


def test_settings_out_of_range_are_refused_with_their_range() -> None:
    for options, match in (
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": "x"}, "min_p is 'x'"),
        ({"penalty_last": 65}, "penalty_last is 65"),
        ({"seed": -1}, "seed is -1"),
        ({"repeat_penalty": 0}, "repeat_penalty is 0"),
    ):
        with pytest.raises(hg.InvalidArgumentError, match=match):
            Settings(**options)  # type: ignore[arg-type]


def test_the_plainest_graph_that_serves_is_taken() -> None:
    assert Settings(temperature=0).form == Form(1)
    assert (
        Settings().form
        == Form(128)
        == Settings(top_k=1).form
        == Settings(temperature=0, repeat_penalty=2).form
    )
    assert Settings(top_k=0).form == Form(0) == Settings(top_k=500).form
    assert Settings(logit_bias={3: 1.0}, logprobs=True).form == Form(128, True, True)


#: Seconds of a round by its proposals, where four rows cost little more than one, and eight a lot.
ROUND = {0: 1.0, 1: 1.1, 3: 1.4, 7: 5.0}


def paced(pace: Pace, is_right: float, tokens: int, seed: int) -> tuple[float, list[int]]:
    """The seconds of an answer whose proposals are right with a chance, and the numbers of them."""
    rng, seconds, counts, written = random.Random(seed), 0.0, [], 0
    while written < tokens:
        count = pace.count(tokens - written - 1)
        counts.append(count)
        if not count:
            new = min(pace.plain, tokens - written)
            pace.wrote(new, new * ROUND[0])
            seconds += new * ROUND[0]
        else:
            run = [rng.random() < is_right for _ in range(count)]
            accepted = [*run, False].index(False)
            pace.checked(count, accepted, ROUND[count])
            seconds += ROUND[count]
            new = accepted + 1
        written += new
    assert written == tokens
    return seconds, counts


def test_good_proposals_are_made_in_the_number_that_takes_the_least_time() -> None:
    for seed in range(5):
        seconds, counts = paced(Pace(), 0.95, 1000, seed)
        assert seconds < 500, seed
        assert counts.count(3) > 0.8 * len(counts), seed


def test_proposals_that_do_not_pay_are_hardly_made() -> None:
    for seed in range(5):
        seconds, counts = paced(Pace(), 0.0, 1000, seed)
        assert seconds < 1100 and counts.count(0) < 60, seed


def test_a_pause_ends_with_a_trial_and_good_proposals_are_found_again() -> None:
    pace = Pace()
    paced(pace, 0.0, 2000, 1)
    seconds, _ = paced(pace, 1.0, 2000, 1)
    assert seconds < LONGEST_PAUSE + 1200


def test_a_fixed_number_of_proposals_stays_and_fits() -> None:
    pace = Pace(5)
    assert [pace.count(room) for room in (-1, 0, 4, 5, 100)] == [0, 0, 0, 5, 5]
    assert all(0 <= Pace().count(room) <= max(COUNTS) for room in range(-1, 9))


def test_what_came_after_the_last_tokens_before_is_found() -> None:
    lookup = Lookup([1, 2, 3, 4, 9, 1, 2])
    assert lookup.following(3) == [3, 4, 9]
    lookup.add([3])
    assert lookup.following(2) == [4, 9]
    lookup.add([8])
    assert lookup.following(2) is None
    assert Lookup([5]).following(1) is None and Lookup([]).following(1) is None
    assert Lookup([7, 7, 7, 7]).following(4) == [7, 7, 7, 7]
    # The longest beginning is the one that counts, and of equal ones the last.
    assert Lookup([1, 2, 3, 4, 0, 2, 3, 5, 0, 1, 2, 3]).following(1) == [4]
    assert Lookup([2, 3, 4, 0, 2, 3, 5, 0, 2, 3]).following(1) == [5]


def test_proposals_agree_up_to_the_first_other_choice() -> None:
    assert agreeing(np.array([[4, 4, 0], [5, 5, 0], [-1, 6, 0]])) == 2
    assert agreeing(np.array([[4, 5], [5, 5], [-1, 6]])) == 0
    assert agreeing(np.array([[-1, 6]])) == 0
