"""Messages on a stream of bytes."""

from __future__ import annotations

import random

import pytest

from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import LimitExceededError


def test_messages_come_out_as_they_went_in_however_they_are_cut() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    messages = [chosen.randbytes(chosen.choice([0, 1, 3, 100, 5000])) for _ in range(200)]
    data = b"".join(map(framed, messages))
    for most in (1, 2, 7, 1000, len(data)):
        reader, found, at = FrameReader(5000), list[bytes](), 0
        while at < len(data):
            size = chosen.randint(1, most)
            found += reader.feed(data[at : at + size])
            at += size
        assert found == messages


def test_a_length_beyond_the_bound_is_refused_before_the_message_comes() -> None:
    reader = FrameReader(100)
    assert reader.feed(framed(bytes(100))) == [bytes(100)]
    assert reader.feed(b"\x65\x00\x00") == []
    with pytest.raises(LimitExceededError, match="101 bytes; the most is 100"):
        reader.feed(b"\x00")
