"""Served models as a table: their requests, rates and times in the last ten seconds. Pure but for
the clock that its caller reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from heliograph_server.telemetry.telemetry import ModelFigures
from heliograph_server.web.quantiles import quantile_of_bounds

#: The seconds over which rates and times are taken.
WINDOW_SECONDS = 10.0
#: The most models of a table.
MOST_MODELS = 100


class ModelWatch:
    """The figures of served models now and some seconds ago."""

    def __init__(self) -> None:
        self._before: deque[tuple[float, dict[tuple[str, str], ModelFigures]]] = deque()

    def rows(self, figures: Iterable[ModelFigures], now: float) -> tuple[dict[str, Any], ...]:
        """The table, with what has happened since about WINDOW_SECONDS ago."""
        found = {(one.model, one.version): one for one in figures}
        self._before.append((now, found))
        while len(self._before) > 2 and now - self._before[1][0] >= WINDOW_SECONDS:
            self._before.popleft()
        then, before = self._before[0]
        chosen = sorted(found.items())[:MOST_MODELS]
        return tuple(_row(one, before.get(key), max(now - then, 1e-3)) for key, one in chosen)


def _row(now: ModelFigures, before: ModelFigures | None, seconds: float) -> dict[str, Any]:
    buckets, _ = now.seconds["request"]
    counts = [count for _, count in buckets]
    early = (
        [count for _, count in before.seconds["request"][0]] if before is not None else [0.0] * len(counts)
    )
    # A model that was loaded again counts from 0.
    if early[-1] > counts[-1]:
        early = [0.0] * len(counts)
    bounds = [bound for bound, _ in buckets]
    return {
        "name": now.model,
        "version": now.version,
        "ok": now.requests.get("ok", 0),
        "failed": now.requests.get("failed", 0),
        "waiting": now.waiting,
        "rate": round((counts[-1] - early[-1]) / seconds, 1),
        "p50": round(1e6 * quantile_of_bounds(early, counts, bounds, 0.5)),
        "p99": round(1e6 * quantile_of_bounds(early, counts, bounds, 0.99)),
    }
