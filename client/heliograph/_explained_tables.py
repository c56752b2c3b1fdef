"""Explanations as tables: rows of text under a header."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph._arguments import counted
from heliograph._explained import ExplainedNode, ExplainedShare, ExplainedSplit
from heliograph_proto.description import DeviceShare
from heliograph_proto.sizes import size_text

#: Header and rows.
Table = list[Sequence[str]]

#: How much of a name is shown among others.
_NAME_CHARACTERS = 32
#: How many names of copied values.
_NAMES = 3


def split_table(splits: Sequence[ExplainedSplit], *, everything: bool = False) -> Table:
    """A line for each split, with times once there are some; with `everything`, names in full."""
    header = ["split", "device", "nodes", "first", "last", "steps", "compute", "copied", "values"]
    rows = [_split_row(one, everything) for one in splits]
    if not any(one.ended_us for one in splits):
        return [header, *rows]
    timed = [[*row, *_times(one)] for row, one in zip(rows, splits, strict=True)]
    return [[*header, "began", "copy time", "compute time"], *timed]


def _split_row(one: ExplainedSplit, everything: bool) -> Sequence[str]:
    names = [copy.label for copy in one.copies]
    shown = names if everything else names[:_NAMES]
    more = [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return [
        str(one.number),
        one.device,
        f"{len(one.nodes)} + {counted(len(one.parts), 'part')}" if one.parts else str(len(one.nodes)),
        *(_cut(name, everything) for name in one.ends),
        str(one.steps),
        size_text(one.compute_bytes),
        size_text(one.copied_bytes) if names else "-",
        ", ".join([*(_cut(name, everything) for name in shown), *more]) or "-",
    ]


def _times(one: ExplainedSplit) -> Sequence[str]:
    copying = time_text(one.copy_us) if one.copies else "-"
    return time_text(one.began_us), copying, time_text(one.compute_us)


def share_table(shares: Sequence[ExplainedShare], *, everything: bool = False) -> Table:
    """A line for each device's rows of each weight that lies over devices."""
    rows = [[_cut(one.name, everything), one.device, one.rows, size_text(one.size_bytes)] for one in shares]
    return [["weight", "device", "lies there", "size"], *rows]


def device_table(devices: Sequence[DeviceShare]) -> Table:
    """A line for each device that the plan may use; "reuse": how often a run uses its compute memory."""
    rows = [
        [
            one.name,
            *map(size_text, (one.weights_bytes, one.variables_bytes, one.compute_bytes)),
            f"{one.results_bytes / one.compute_bytes:.3g}x" if one.compute_bytes else "-",
        ]
        for one in devices
    ]
    return [["device", "weights", "variables", "compute", "reuse"], *rows]


def node_table(nodes: Sequence[ExplainedNode]) -> Table:
    """A line for each node; those of a split with the same number under "together" run at the same time."""
    rows = [
        [
            str(one.number),
            one.name,
            one.op,
            str(one.type),
            str(one.split),
            str(one.concurrent or "-"),
            one.device,
            one.why,
        ]
        for one in nodes
    ]
    return [["node", "name", "op", "type", "split", "together", "device", "why"], *rows]


def time_text(microseconds: float) -> str:
    """A time in the largest unit that fits; "-" for none."""
    for unit, name in ((1e6, "s"), (1e3, "ms"), (1.0, "us")):
        if microseconds >= unit:
            return f"{microseconds / unit:.3g} {name}"
    return f"{microseconds:.2g} us" if microseconds else "-"


def _cut(name: str, everything: bool) -> str:
    return name if everything or len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 3]}..."
