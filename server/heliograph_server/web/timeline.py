"""Ended runs as bars of a timeline, a bounded number for each lane. Pure.

A lane is a device and a kind of time: `turn` (a run waits for its turn), `copy` (inputs come, or
outputs are delivered) and `compute` (a run or one of its splits). Bars of one session that nearly
touch become one; if there are still too many, those of one time slot do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from heliograph_server.session.run_timeline import RunRecord

LANES = ("turn", "copy", "compute")
TURN, COPY, COMPUTE = range(3)
#: Shorter times are no bar, except of computing.
LEAST_SECONDS = 20e-6
#: A shorter gap between two bars of a session is none.
GAP_SECONDS = 0.5e-3
#: The most bars of a lane in one tick.
MOST_BARS = 64
#: The session of a bar of several.
SEVERAL = 0

#: A device and the index of one of LANES.
Lane = tuple[str, int]


class Bar(NamedTuple):
    """A bar: times in seconds by `time.monotonic()`."""

    began: float
    ended: float
    #: The number of its session, or SEVERAL.
    session: int
    #: The number of runs or splits in it, and the sum of their times in seconds.
    parts: int
    busy: float


def lanes_of(records: Iterable[RunRecord]) -> dict[Lane, list[Bar]]:
    """The bars of runs by lane, at most MOST_BARS of each, in the order of their begin."""
    found: defaultdict[Lane, list[Bar]] = defaultdict(list)
    for run in records:
        _add(found, run)
    return {lane: fewer(bars) for lane, bars in found.items()}


def _add(found: defaultdict[Lane, list[Bar]], run: RunRecord) -> None:
    devices, session = run.devices, run.session
    if not devices:
        return
    first, last = devices[0], devices[-1]
    if run.began - run.came > LEAST_SECONDS:
        found[first, TURN].append(Bar(run.came, run.began, session, 1, run.began - run.came))
    if run.had_inputs - run.began > LEAST_SECONDS:
        found[first, COPY].append(Bar(run.began, run.had_inputs, session, 1, run.had_inputs - run.began))
    if run.splits:
        for one in run.splits:
            if one.computing - one.began > LEAST_SECONDS:
                bar = Bar(one.began, one.computing, session, 1, one.computing - one.began)
                found[one.device, COPY].append(bar)
            bar = Bar(one.computing, one.ended, session, 1, one.ended - one.computing)
            found[one.device, COMPUTE].append(bar)
    else:
        bar = Bar(run.had_inputs, run.computed, session, 1, run.computed - run.had_inputs)
        for device in devices:
            found[device, COMPUTE].append(bar)
    if run.ended - run.computed > LEAST_SECONDS:
        found[last, COPY].append(Bar(run.computed, run.ended, session, 1, run.ended - run.computed))


def fewer(bars: list[Bar], most: int = MOST_BARS) -> list[Bar]:
    """At most so many bars that cover the same time, in the order of their begin."""
    bars.sort()
    joined = _joined(bars)
    return joined if len(joined) <= most else _in_slots(joined, most)


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Join bars of one session that nearly touch."""
    found: list[Bar] = []
    for bar in bars:
        if found:
            last = found[-1]
            if last.session == bar.session and bar.began - last.ended < GAP_SECONDS:
                found[-1] = _both(last, bar)
                continue
        found.append(bar)
    return found


def _in_slots(bars: Sequence[Bar], most: int) -> list[Bar]:
    """Join the bars that begin in the same of `most` slots of time."""
    origin = bars[0].began
    width = (bars[-1].began - origin) / most or 1.0
    found: list[Bar] = []
    slot = -1
    for bar in bars:
        mine = min(int((bar.began - origin) / width), most - 1)
        if mine == slot:
            found[-1] = _both(found[-1], bar)
        else:
            found.append(bar)
            slot = mine
    return found


def _both(one: Bar, other: Bar) -> Bar:
    session = one.session if one.session == other.session else SEVERAL
    return Bar(
        one.began, max(one.ended, other.ended), session, one.parts + other.parts, one.busy + other.busy
    )


def encoded(lanes: dict[Lane, list[Bar]], origin: float) -> tuple[list[tuple[str, str]], list[int]]:
    """Lanes by name, and their bars as numbers for a message, six each.

    These are the lane's index, the begin in microseconds since `origin`, the length and the busy
    time in microseconds, the session, and the number of parts.
    """
    names: list[tuple[str, str]] = []
    flat: list[int] = []
    for place, ((device, kind), bars) in enumerate(sorted(lanes.items())):
        names.append((device, LANES[kind]))
        for bar in bars:
            flat += (
                place,
                round((bar.began - origin) * 1e6),
                max(1, round((bar.ended - bar.began) * 1e6)),
                round(bar.busy * 1e6),
                bar.session,
                bar.parts,
            )
    return names, flat
