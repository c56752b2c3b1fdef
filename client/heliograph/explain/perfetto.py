"""The last run of a plan as a trace, which Perfetto and Chrome's tracing read.

It has durations on tracks of devices, and counters of memory, copies and waiting splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from heliograph.explain.parts import ExplainedCopy, ExplainedSplit, host_of
from heliograph_proto.plans import MemoryUse, Route

if TYPE_CHECKING:
    from heliograph.explain.explanation import Explanation

#: By device: the numbers of its process and thread.
_Tracks = dict[str, tuple[int, int]]
#: A time in microseconds and how much a counter changes then.
_Change = tuple[float, int]


def trace_events(found: Explanation) -> list[dict[str, Any]]:
    """A track for each device; on it the copies to it and the splits on it, and its counters. Each
    host is a process.

    The counters of a device are the bytes that live in the memory that it computes in, the bytes
    that are being copied to it, and the splits that wait for it. A split waits from the end of the
    last split whose values it copies until it begins. The steps of a split share its time evenly,
    so that memory within a split is an estimate.
    """
    splits = found.splits
    devices = list(dict.fromkeys(one.device for one in splits))
    hosts = {host: number for number, host in enumerate(dict.fromkeys(map(host_of, devices)), 1)}
    tracks = {name: (hosts[host_of(name)], number) for number, name in enumerate(devices, 1)}
    own = "the server" if len(hosts) > 1 else "plan"
    names = [_name("process_name", host or own, number, 0) for host, number in hosts.items()]
    names += [_name("thread_name", name, *track) for name, track in tracks.items()]
    return [*names, *_durations(splits, tracks), *_counters(found, tracks)]


def _durations(splits: Sequence[ExplainedSplit], tracks: _Tracks) -> Iterator[dict[str, Any]]:
    for one in splits:
        process, track = tracks[one.device]
        place = {"ph": "X", "pid": process, "tid": track}
        if one.copies:
            yield {
                **place,
                "name": f"copies for split {one.number}",
                "cat": "copy",
                "ts": one.began_us,
                "dur": one.copy_us,
                "args": {"bytes": one.copied_bytes, "values": [_value(copy) for copy in one.copies]},
            }
        first, last = one.ends
        yield {
            **place,
            "name": f"split {one.number}",
            "cat": "compute",
            "ts": one.began_us + one.copy_us,
            "dur": one.compute_us,
            "args": {"nodes": len(one.nodes), "steps": one.steps, "first": first, "last": last},
        }


def _value(copy: ExplainedCopy) -> str:
    where = "" if copy.route is Route.WITHIN else f" from {copy.source}, {copy.route}"
    return f"{copy.name}{where}"


def _name(kind: str, name: str, process: int, track: int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}


# Counters


def _counters(found: Explanation, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    counters: tuple[tuple[str, str, Mapping[str, list[_Change]]], ...] = (
        ("memory", "bytes", _memory(found)),
        ("copies under way", "bytes", _copies(found.splits)),
        ("waiting splits", "splits", _waiting(found)),
    )
    for name, unit, changes in counters:
        for device, those in changes.items():
            if device in tracks:
                yield from _counter(f"{name} of {device}", unit, tracks[device][0], those)


def _counter(name: str, unit: str, process: int, changes: Iterable[_Change]) -> Iterator[dict[str, Any]]:
    value = 0
    for time, those in groupby(sorted(changes), key=itemgetter(0)):
        value += sum(change for _, change in those)
        yield {"ph": "C", "pid": process, "name": name, "ts": time, "args": {unit: value}}


def _copies(splits: Sequence[ExplainedSplit]) -> dict[str, list[_Change]]:
    found: dict[str, list[_Change]] = {}
    for one in splits:
        if one.copies:
            changes = [(one.began_us, one.copied_bytes), (one.began_us + one.copy_us, -one.copied_bytes)]
            found.setdefault(one.device, []).extend(changes)
    return found


def _waiting(explained: Explanation) -> dict[str, list[_Change]]:
    """The splits that could begin as far as their values go, and wait for their device."""
    splits, leaves = explained.splits, len(explained._graph.leaves)
    split_of = {node.number: node.split for node in explained.nodes}
    found: dict[str, list[_Change]] = {}
    for one in splits:
        sources = {split_of[copy.value - leaves] for copy in one.copies if copy.value >= leaves}
        ready = max((splits[number].ended_us for number in sources if number != one.number), default=0.0)
        if ready < one.began_us:
            found.setdefault(one.device, []).extend([(ready, 1), (one.began_us, -1)])
        else:
            found.setdefault(one.device, []).append((one.began_us, 0))
    return found


def _memory(explained: Explanation) -> dict[str, list[_Change]]:
    """The bytes that live in blocks; constants always do, and are left out."""
    times = _step_times(explained)
    found: dict[str, list[_Change]] = {}
    for one in explained.stored:
        block = explained.blocks[one.block]
        if block.use is not MemoryUse.CONSTANTS and one.last_step < len(times):
            begin = times[one.first_step][0]
            end = max(begin, times[one.last_step][1])
            found.setdefault(block.device, []).extend([(begin, one.size_bytes), (end, -one.size_bytes)])
    return found


def _step_times(explained: Explanation) -> list[tuple[float, float]]:
    """Return the begin and the end of each step of the whole plan, evenly in its split."""
    found = []
    for split in explained.splits:
        begin, took = split.began_us + split.copy_us, split.compute_us / max(1, split.memory_steps)
        found += [(begin + n * took, begin + (n + 1) * took) for n in range(split.memory_steps)]
    return found
