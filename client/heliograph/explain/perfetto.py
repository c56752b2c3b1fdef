"""The last run of a plan as a trace, in the JSON that Perfetto and Chrome's tracing read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from heliograph.explain.parts import ExplainedCopy, ExplainedSplit, host_of
from heliograph_proto.plans import Route

#: By device: the numbers of its process and thread.
_Tracks = dict[str, tuple[int, int]]


def trace_events(splits: Sequence[ExplainedSplit]) -> list[dict[str, Any]]:
    """A track for each device; on it the copies to it and the splits on it. Each host is a
    process."""
    devices = list(dict.fromkeys(one.device for one in splits))
    hosts = {host: number for number, host in enumerate(dict.fromkeys(map(host_of, devices)), 1)}
    tracks = {name: (hosts[host_of(name)], number) for number, name in enumerate(devices, 1)}
    own = "the server" if len(hosts) > 1 else "plan"
    names = [_name("process_name", host or own, number, 0) for host, number in hosts.items()]
    names += [_name("thread_name", name, *track) for name, track in tracks.items()]
    return [*names, *_durations(splits, tracks)]


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
