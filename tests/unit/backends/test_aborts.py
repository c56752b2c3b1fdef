"""Aborts: work that has begun to write variables goes on to the end of its step."""

from __future__ import annotations

import pytest

from heliograph_backends.contract import Abort
from heliograph_proto.errors import CancelledError


def told(abort: Abort) -> list[str]:
    """Collect the words of a watcher from now on."""
    found: list[str] = []
    abort.when_set(lambda: found.append("set"))
    return found


def test_an_abort_before_the_first_write_ends_the_work() -> None:
    abort = Abort()
    abort.set()
    assert abort.is_set and abort.is_requested
    with pytest.raises(CancelledError):
        abort.begin_writes()
    assert not abort.is_writing


def test_an_abort_while_variables_are_written_takes_effect_after_that() -> None:
    abort = Abort()
    found = told(abort)
    abort.begin_writes()
    abort.set()
    assert abort.is_requested and not abort.is_set and not found
    abort.end_writes()
    assert abort.is_set and found == ["set"]


def test_an_abort_in_force_breaks_writes_off() -> None:
    abort = Abort()
    found = told(abort)
    abort.begin_writes()
    abort.set()
    abort.set(now=True)
    abort.set(now=True)
    assert abort.is_set and abort.is_writing and found == ["set"]


def test_parts_of_work_write_as_one_and_end_alone() -> None:
    whole = Abort()
    one, other = Abort(within=whole), Abort(within=whole)
    one.begin_writes()
    whole.set()
    assert not whole.is_set and one.is_requested and other.is_requested
    other.begin_writes()
    other.set()
    assert other.is_set and not one.is_set
    whole.end_writes()
    assert whole.is_set


def test_work_that_waits_for_a_reader_hears_of_a_request_at_once() -> None:
    whole, found = Abort(), []
    part = Abort(within=whole)
    part.begin_writes()
    with part.watch_request(lambda: found.append("asked")):
        whole.set()
        assert found == ["asked"]
    with whole.watch_request(lambda: found.append("again")):
        assert found == ["asked", "again"]
