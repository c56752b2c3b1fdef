"""The last run of a plan as a trace, in the JSON that Perfetto and Chrome's tracing read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from heliograph._explained import ExplainedSplit

_PROCESS = 1


def trace_events(splits: Sequence[ExplainedSplit]) -> list[dict[str, Any]]:
    """A track for each device; on it the copies to it and the splits on it."""
    tracks = {name: number for number, name in enumerate(dict.fromkeys(one.device for one in splits), 1)}
    names = [_name("process_name", "plan", 0), *(_name("thread_name", *track) for track in tracks.items())]
    return [*names, *_durations(splits, tracks)]


def _durations(splits: Sequence[ExplainedSplit], tracks: dict[str, int]) -> Iterator[dict[str, Any]]:
    for one in splits:
        place = {"ph": "X", "pid": _PROCESS, "tid": tracks[one.device]}
        if one.copies:
            yield {
                **place,
                "name": f"copies for split {one.number}",
                "cat": "copy",
                "ts": one.began_us,
                "dur": one.copy_us,
                "args": {"bytes": one.copied_bytes, "values": [copy.name for copy in one.copies]},
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


def _name(kind: str, name: str, track: int) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": kind, "args": {"name": name}}
