"""Bodies of requests by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from heliograph_proto.errors import DeadlineExceededError, LimitExceededError
from heliograph_server.http import requests
from heliograph_server.http.requests import read_body


def read(parts: list[bytes], count: Callable[[int], None] = lambda _: None) -> bytes:
    """Read a body that comes in parts."""
    left = [{"type": "http.request", "body": one, "more_body": True} for one in parts]
    left.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return left.pop(0)

    return asyncio.run(read_body(Request({"type": "http", "method": "POST"}, receive), 100, count))


def test_a_body_is_its_parts_which_are_counted_as_they_come() -> None:
    counted: list[int] = []
    assert read([b"ab", b"c"], counted.append) == b"abc"
    assert sum(counted) == 3
    with pytest.raises(LimitExceededError, match="more than 100 bytes"):
        read([b"x" * 60] * 2)


def test_a_body_that_takes_too_long_in_all_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_SECONDS", -1.0)
    with pytest.raises(DeadlineExceededError, match="the body did not come"):
        read([b"x"])
