"""On which processors the helpers of a run are, as a decision and as it comes about."""

from __future__ import annotations

import os
import threading

import pytest

from heliograph_backends.cpu.kernels import WorkerPool, available
from heliograph_backends.cpu.kernels.placement import UNKNOWN, choices, colliding


def test_helpers_that_share_a_processor_with_the_leader_or_each_other_move() -> None:
    assert colliding(0, [1, 2, 3]) == []
    assert colliding(0, [0, 1]) == [0]
    assert colliding(2, [1, 1, 2]) == [1, 2]


def test_who_has_not_said_where_it_is_stays() -> None:
    assert colliding(UNKNOWN, [UNKNOWN, UNKNOWN]) == []
    assert colliding(0, [UNKNOWN, 0]) == [1]


def test_a_helper_goes_where_no_worker_is_and_where_it_may() -> None:
    assert choices({0, 1, 2, 3}, 0, [0, 2]) == {1, 3}
    assert choices({0, 1}, 0, [1]) == set()
    assert choices({5}, 0, [0]) == {5}


@pytest.mark.skipif(not available(), reason="numba is not installed")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not let threads choose")
def test_what_a_helper_may_use_is_as_before_when_it_was_sent_elsewhere() -> None:
    """Also where the process has one processor and nothing can be chosen."""
    before = os.sched_getaffinity(0)
    helpers = {one.native_id for one in threading.enumerate()}
    with WorkerPool(3) as workers:
        mine = [one.native_id for one in threading.enumerate() if one.native_id not in helpers]
        for processor in (UNKNOWN, *workers.processors, *before):
            workers.wake(2, processor)
        assert mine and all(os.sched_getaffinity(one or 0) == before for one in mine)
