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
from heliograph.llm.pieces import Pieces
from heliograph.llm.sampling import Form, Settings


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
