"""The counts and times of a loaded model."""

from __future__ import annotations

import pytest

from heliograph_server.gateways.kserve.statistics import MOST_NOTES, ModelStatistics, RunTimes


@pytest.mark.parametrize("requests", [1, MOST_NOTES - 1, MOST_NOTES, 3 * MOST_NOTES + 1])
def test_everything_that_was_answered_is_counted_when_it_is_read(requests: int) -> None:
    statistics = ModelStatistics()
    for _ in range(requests):
        statistics.ran(2, [0.5, 0.25], RunTimes(0.125, 2.0, 0.0625))
        statistics.answered(3.0)
        statistics.answered(1.0, failed=True)
    found = statistics.read()
    assert (found.runs, found.rows) == (requests, 2 * requests)
    assert (found.success.count, found.success.seconds) == (requests, 3.0 * requests)
    assert (found.fail.count, found.fail.seconds) == (requests, 1.0 * requests)
    phases = {phase: (one.count, one.seconds) for phase, one in found.phases.items()}
    sums = {"queue": 0.75, "input": 0.25, "compute": 4.0, "output": 0.125}
    assert phases == {phase: (2 * requests, seconds * requests) for phase, seconds in sums.items()}
    assert found.by_rows[2]["compute"].count == requests
    assert found.last_ms > 0
    shown = statistics.figures("model", "1", waiting=0)
    assert shown.requests == {"ok": requests, "failed": requests}
    assert shown.seconds["request"][1] == 4.0 * requests
    assert statistics.read() == found
