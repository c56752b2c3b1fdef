"""The last ten minutes in figures, one sample a second, in bounded memory. Pure.

Without viewers there are no samples, so times may have gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The samples that are kept: ten minutes of one a second.
MOST_SAMPLES = 600
#: The most series of sessions in an answer; smaller ones are summed as the others.
MOST_SERIES = 12


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one moment. Sizes in bytes, durations in microseconds."""

    #: In milliseconds since 1970, by the daemon's clock.
    at_ms: int
    runs_per_second: float = 0.0
    p50_us: float = 0.0
    p99_us: float = 0.0
    waiting: int = 0
    #: By device: its busy share, from 0 to 1, and its memory in use.
    busy: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    #: Device memory by tenant, and by the number of a session.
    tenants: Mapping[str, int] = field(default_factory=dict)
    sessions: Mapping[int, int] = field(default_factory=dict)


class History:
    """The samples of one view."""

    def __init__(self, most: int = MOST_SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Add the newest sample; the oldest one is dropped when there are too many."""
        self._samples.append(sample)

    def table(self, seconds: int) -> dict[str, Any]:
        """The samples of the last seconds in columns, each as long as `at`."""
        newest = self._samples[-1].at_ms if self._samples else 0
        found = [one for one in self._samples if one.at_ms > newest - seconds * 1000]
        return {
            "at": [one.at_ms for one in found],
            "runs": [round(one.runs_per_second, 1) for one in found],
            "p50": [round(one.p50_us) for one in found],
            "p99": [round(one.p99_us) for one in found],
            "waiting": [one.waiting for one in found],
            "busy": _columns([one.busy for one in found], 3),
            "used": _columns([one.used for one in found]),
            "tenants": _columns(_largest([one.tenants for one in found])),
            "sessions": _columns(_largest([one.sessions for one in found])),
        }


def largest(values: Mapping[Any, int], most: int = MOST_SERIES) -> dict[Any, int]:
    """The largest values, and the sum of the others under ""."""
    if len(values) <= most:
        return dict(values)
    names = sorted(values, key=lambda one: (-values[one], one))
    found = {name: values[name] for name in names[: most - 1]}
    found[""] = sum(values[name] for name in names[most - 1 :])
    return found


def _largest(samples: list[Mapping[Any, int]]) -> list[Mapping[Any, int]]:
    """Samples of the names with the largest peaks, and of the sum of the others."""
    peaks: dict[Any, int] = {}
    for one in samples:
        for name, value in one.items():
            peaks[name] = max(peaks.get(name, 0), value)
    if len(peaks) <= MOST_SERIES:
        return samples
    kept = set(sorted(peaks, key=lambda one: (-peaks[one], str(one)))[: MOST_SERIES - 1]) - {""}
    return [
        {
            **{name: value for name, value in one.items() if name in kept},
            "": sum(value for name, value in one.items() if name not in kept),
        }
        for one in samples
    ]


def _columns(samples: list[Mapping[Any, Any]], digits: int = 0) -> dict[str, list[Any]]:
    names: dict[Any, None] = {}
    for one in samples:
        names.update(dict.fromkeys(one))
    round_to = digits or None
    return {
        str(name): [round(one[name], round_to) if name in one else None for one in samples] for name in names
    }
