"""Connections that break at some message: programs end in their time, with a result or a typed error."""

from __future__ import annotations

import secrets

import pytest
from faults.__main__ import ROADS, break_connections
from faults.proxy import PREFACE, Frames

CASES = 5


@pytest.mark.parametrize("road", ROADS)
def test_whatever_breaks_a_program_ends_typed_and_the_daemon_is_as_before(road: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    report = break_connections(seed, (road,), most=CASES)
    assert report.faults == []
    assert report.cases == CASES
    # What passes in a pool, and when, differs a little each time.
    assert report.idle < CASES or road == "pool"


def test_messages_are_found_however_the_bytes_come() -> None:
    frames = b"".join(
        size.to_bytes(3) + bytes([kind]) + bytes(5) + bytes(size)
        for size, kind in ((10, 0), (0, 4), (300, 1), (5, 8), (0, 0))
    )
    data = PREFACE + frames
    for step in (1, 7, 64, 1000):
        parts = Frames(is_tls=False, to_daemon=True)
        found = [
            part for start in range(0, len(data), step) for part in parts.cut(data[start : start + step])
        ]
        assert b"".join(part for part, _ in found) == data
        assert sum(is_message for _, is_message in found) == 3
