"""When a relayed link is probed again."""

from __future__ import annotations

import pytest

from heliograph_server.pool.remote.reached import LONGEST_RETRY_SECONDS, RETRY_SECONDS, KnownLink


def test_a_link_that_was_never_probed_or_is_there_is_not_due() -> None:
    link = KnownLink()
    assert not link.is_due(1e9) and not link.is_due_for_compile(1e9)
    assert not link.found() and link.is_there
    assert not link.is_due(1e9) and not link.is_due_for_compile(1e9)


def test_a_relayed_link_is_due_after_its_pause_and_for_a_compile_at_once() -> None:
    link = KnownLink(probed=100.0)
    assert link.missing("refused", 100.0)
    assert not link.is_due(100.0 + RETRY_SECONDS / 2) and link.is_due(100.0 + RETRY_SECONDS)
    assert not link.is_due_for_compile(100.5) and link.is_due_for_compile(101.0)
    link.probed = 110.0
    assert not link.missing("still refused", 110.0) and (link.why, link.since) == ("still refused", 100.0)
    assert link.found() and not link.why


@pytest.mark.parametrize(("breaks", "pauses"), [(1, 1), (2, 2), (3, 4)])
def test_a_link_that_runs_find_broken_again_and_again_is_probed_less_and_less_often(
    breaks: int, pauses: int
) -> None:
    link = KnownLink()
    for _ in range(breaks):
        link.found()
        link.broke("a run found no link", 100.0)
    pause = pauses * RETRY_SECONDS
    assert not link.is_due(100.0 + pause - 0.1) and link.is_due(100.0 + pause)
    assert link.is_due_for_compile(102.0) is (breaks == 1)


def test_the_pause_between_probes_has_a_bound() -> None:
    link = KnownLink(False, breaks=1000)
    assert link.is_due(LONGEST_RETRY_SECONDS)


def test_the_failures_of_one_loss_count_once() -> None:
    link = KnownLink(True)
    for _ in range(5):
        link.broke("a run found no link", 100.0)
    assert link.breaks == 1
