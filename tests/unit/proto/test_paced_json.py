"""Reading of large JSON in pieces."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any

import pytest

from heliograph_proto.codec import paced_json

SEED = 5


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random() if depth < 4 else 0.0
    if kind < 0.4:
        return rng.choice([1, -2.5, 1e30, True, False, None, "a,]b[", "", 12345678901234567890])
    if kind < 0.7:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 8]))]
    if kind < 0.85:
        return numbers(rng, rng.choice([1, 2, 3, 4]))
    return {rng.choice("abcdef"): value(rng, depth + 1) for _ in range(3)}


def numbers(rng: random.Random, depth: int) -> Any:
    if not depth:
        return rng.choice([1, 2.5, True])
    return [numbers(rng, depth - 1) for _ in range(rng.choice([3, 5]))]


def read(loads: Any, data: bytes) -> Any:
    try:
        return loads(data)
    except ValueError:
        return ValueError


def test_json_is_read_as_the_interpreter_does_also_where_it_is_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paced_json, "QUICK", 0)
    print("seed", SEED)
    rng = random.Random(SEED)
    for _ in range(300):
        made = json.dumps([value(rng) for _ in range(3)], indent=rng.choice([None, 1])).encode()
        assert paced_json.loads(made) == json.loads(made)
        for _ in range(3):
            bad = bytearray(made)
            bad[rng.randrange(len(bad))] = rng.choice(b',[]{}":1 ')
            assert read(paced_json.loads, bytes(bad)) == read(json.loads, bytes(bad)), bytes(bad)


@pytest.mark.parametrize(
    "text",
    [
        "[ ,1]",
        "[ ,]",
        "[1, ,2]",
        "[1\u0661]",
        "[\u0661]",
        "[1.\u0661]",
        '{"a": 1\u0661}',
        '["\ud800"]',
        "[1 ,2]",
    ],
)
def test_texts_that_are_nearly_json_are_read_as_the_interpreter_does(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced_json, "QUICK", 0)
    data = text.encode("utf-8", "surrogatepass")
    assert read(paced_json.loads, data) == read(json.loads, data)


def test_arrays_of_numbers_with_a_stray_comma_are_refused() -> None:
    ones = b"1," * 2**20
    assert paced_json.loads(b"[" + ones + b"1]") == [1] * (2**20 + 1)
    for end in (b"]", b",1]", b"1,]", b"1"):
        with pytest.raises(ValueError):
            paced_json.loads(b"[" + ones + end)


@pytest.mark.parametrize(
    "piece",
    [b"1,", b"0.25,", b"[1],", b"{},", b'"a",', b"true,", b"[[1,2],[3,4]],", b"[" + b" " * 70 + b"],"],
)
def test_other_threads_have_their_turns_while_it_is_read(piece: bytes) -> None:
    """Of a reader that keeps the interpreter, a thread would notice all of its time."""
    data = b"[{}," + piece * (2 * 2**20 // len(piece)) + b"0]"
    seen, ends = [time.perf_counter()], threading.Event()

    def watch() -> None:
        while not ends.is_set():
            time.sleep(0)
            seen.append(time.perf_counter())

    before = sys.getswitchinterval()
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        sys.setswitchinterval(1e-4)
        paced_json.loads(data)
    finally:
        ends.set()
        watching.join()
        sys.setswitchinterval(before)
    assert len(seen) > 50
