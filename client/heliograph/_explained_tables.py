"""Explanations as tables: rows of text under a header."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heliograph._arguments import counted
from heliograph._explained import ExplainedNode, ExplainedShare, ExplainedSplit
from heliograph_proto.description import DeviceShare, LinkReport
from heliograph_proto.sizes import size_text

#: Header and rows.
Table = list[Sequence[str]]

#: How much of a name is shown among others.
_NAME_CHARACTERS = 32
#: How many names of copied values.
_NAMES = 3
#: The host of the server itself.
_OWN = "(server)"


def split_table(splits: Sequence[ExplainedSplit], *, everything: bool = False) -> Table:
    """A line for each split, with measured and predicted times once there are some; with `everything`, names
    in full."""
    header = ["split", "device", "nodes", "first", "last", "steps", "compute", "copied", "values"]
    columns = _time_columns(splits)
    rows = [[*_split_row(one, everything), *(time(one) for time in columns.values())] for one in splits]
    return [[*header, *columns], *rows]


def _time_columns(splits: Sequence[ExplainedSplit]) -> dict[str, Callable[[ExplainedSplit], str]]:
    """Of those that there are, each prediction behind what was measured."""
    columns: dict[str, Callable[[ExplainedSplit], str]] = {
        "began": lambda one: time_text(one.began_us),
        "copy time": lambda one: time_text(one.copy_us) if one.copies else "-",
        "predicted copy": lambda one: time_text(one.predicted_copy_us) if one.copies else "-",
        "compute time": lambda one: time_text(one.compute_us),
        "predicted compute": lambda one: time_text(one.predicted_compute_us),
    }
    has_run, is_predicted = any(one.ended_us for one in splits), any(one.predicted_us for one in splits)
    wanted = {name: is_predicted if name.startswith("predicted") else has_run for name in columns}
    return {name: column for name, column in columns.items() if wanted[name]}


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


def link_table(links: Sequence[LinkReport]) -> Table:
    """A line for each way between hosts."""
    rows = [
        [
            one.source or _OWN,
            one.destination or _OWN,
            time_text(one.round_trip_us),
            f"{size_text(int(one.bytes_per_s))}/s",
            "measured" if one.is_measured else "assumed",
        ]
        for one in links
    ]
    return [["from", "to", "round trip", "bandwidth", "known"], *rows]


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
