"""Explanations as tables: rows of text under a header."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heliograph.explain.parts import ExplainedCopy, ExplainedNode, ExplainedShare, ExplainedSplit
from heliograph.explain.pictures.words import time_text
from heliograph.explain.steps import ExplainedStep, ops_text
from heliograph.graph.arguments import counted
from heliograph_proto.plans import DeviceShare, LinkReport, Route
from heliograph_proto.types import size_text


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad rows to lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]


#: Header and rows.
Table = list[Sequence[str]]

#: The most ops of a step.
_OPS = 3
#: The longest name beside others.
_NAME_CHARACTERS = 32
#: The most names of copied values.
_NAMES = 3
#: The most copies between hosts.
_COPIES = 24
#: The host of the server itself.
_OWN = "(server)"
#: The shown names of routes.
_ROUTES = {Route.DIRECT: "direct", Route.RELAYED: "by the head (relayed)", Route.THROUGH_HEAD: "through head"}


def split_table(splits: Sequence[ExplainedSplit], *, everything: bool = False) -> Table:
    """A line for each split, with measured and predicted times where there are any.

    With `everything`, names are in full. Copies from other hosts have a table of their own.
    """
    header = ["split", "device", "nodes", "first", "last", "steps", "compute", "copied"]
    has_values = not any(map(_from_elsewhere, splits)) or any(map(_from_here, splits))
    columns = _time_columns(splits)
    cells = len(header) + has_values
    rows = [
        [*_split_row(one, everything)[:cells], *(time(one) for time in columns.values())] for one in splits
    ]
    return [[*header, *(["values"] if has_values else []), *columns], *rows]


def _time_columns(splits: Sequence[ExplainedSplit]) -> dict[str, Callable[[ExplainedSplit], str]]:
    """The columns of times: measured ones, each with its prediction.

    On another host the time of copies includes waiting, so only ends compare with predictions
    there.
    """
    has_run, is_predicted = any(one.ended_us for one in splits), any(one.predicted_us for one in splits)
    if not (has_run or is_predicted):
        return {}

    def column(read: Callable[[ExplainedSplit], tuple[float, float]]) -> Callable[[ExplainedSplit], str]:
        def cell(one: ExplainedSplit) -> str:
            measured, predicted = map(time_text, read(one))
            if not (has_run and is_predicted):
                return measured if has_run else predicted
            return f"{measured} ({predicted})" if (measured, predicted) != ("-", "-") else "-"

        return cell

    columns = {
        "began": lambda one: (one.began_us, one.predicted_began_us),
        "copy time": lambda one: (one.copy_us * bool(one.copies), one.predicted_copy_us),
        "compute time": lambda one: (one.compute_us, one.predicted_compute_us),
        "ended": lambda one: (one.ended_us, one.predicted_began_us + one.predicted_us),
    }
    if not has_run:
        return {f"predicted {name.removesuffix(' time')}": column(read) for name, read in columns.items()}
    return {f"{name}{' (predicted)' * is_predicted}": column(read) for name, read in columns.items()}


def _from_elsewhere(one: ExplainedSplit) -> list[ExplainedCopy]:
    return [copy for copy in one.copies if copy.route is not Route.WITHIN]


def _from_here(one: ExplainedSplit) -> list[ExplainedCopy]:
    return [copy for copy in one.copies if copy.route is Route.WITHIN]


def edge_table(splits: Sequence[ExplainedSplit], *, everything: bool = False) -> Table:
    """A line for each value that crosses hosts: its route and predicted time.

    Without `everything`, only the first lines of many are shown.
    """
    edges = [(split, copy) for split in splits for copy in _from_elsewhere(split)]
    is_predicted = any(copy.predicted_us for _, copy in edges)
    header = ["value", "from", "to split", "on", "size", "route", *(["predicted"] if is_predicted else [])]
    rows = [_edge_row(split, copy, everything, is_predicted) for split, copy in edges]
    if len(rows) > _COPIES and not everything:
        left = len(rows) - _COPIES
        rows = [*rows[:_COPIES], [f"{left} more", *["-"] * (len(header) - 1)]]
    return [header, *rows]


def _edge_row(
    split: ExplainedSplit, copy: ExplainedCopy, everything: bool, is_predicted: bool
) -> Sequence[str]:
    name = f"{_cut(copy.name, everything)}{' (rows)' * copy.rows_only}"
    size, route = size_text(copy.size_bytes), _ROUTES.get(copy.route, str(copy.route))
    predicted = [time_text(copy.predicted_us)] if is_predicted else []
    return [name, copy.source, str(split.number), split.device, size, route, *predicted]


def _split_row(one: ExplainedSplit, everything: bool) -> Sequence[str]:
    names = [copy.label for copy in _from_here(one)]
    shown = names if everything else names[:_NAMES]
    more = [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return [
        str(one.number),
        one.device,
        f"{len(one.nodes)} + {counted(len(one.parts), 'part')}" if one.parts else str(len(one.nodes)),
        *(_cut(name, everything) for name in one.ends),
        str(one.steps),
        size_text(one.compute_bytes),
        size_text(one.copied_bytes) if one.copies else "-",
        ", ".join([*(_cut(name, everything) for name in shown), *more]) or "-",
    ]


def link_table(links: Sequence[LinkReport]) -> Table:
    """A line for each link between hosts."""
    rows = [
        [
            one.source or _OWN,
            one.destination or _OWN,
            time_text(one.round_trip_us),
            f"{size_text(one.bytes_per_s)}/s",
            "measured" if one.is_measured else "partly assumed",
        ]
        for one in links
    ]
    return [["from", "to", "round trip", "bandwidth", "known"], *rows]


def share_table(shares: Sequence[ExplainedShare], *, everything: bool = False) -> Table:
    """A line for each device's rows of each split weight."""
    rows = [[_cut(one.name, everything), one.device, one.rows, size_text(one.size_bytes)] for one in shares]
    return [["weight", "device", "lies there", "size"], *rows]


def device_table(devices: Sequence[DeviceShare]) -> Table:
    """A line for each device of the plan; "reuse" is how often a run uses its compute memory."""
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
    """A line for each node.

    Nodes of a split with one number under "step" are computed together, and those with one under
    "together" run concurrently.
    """
    rows = [
        [
            str(one.number),
            one.name,
            one.op,
            str(one.type),
            str(one.split),
            str(one.step or "-"),
            str(one.concurrent or "-"),
            one.device,
            one.why,
        ]
        for one in nodes
    ]
    return [["node", "name", "op", "type", "split", "step", "together", "device", "why"], *rows]


def step_table(steps: Sequence[ExplainedStep], most: int | None) -> Table:
    """A line for each measured step, or for the `most` longest ones, with their work."""
    rows: Table = [
        [
            time_text(one.took_us),
            f"{one.share:.1%}",
            ops_text(one.ops, _OPS),
            _cut(one.name, most is None),
            one.device,
            f"{size_text(one.bytes_per_s)}/s",
            f"{one.flops_per_s / 1e9:.3g} GFLOP/s",
        ]
        for one in steps[:most]
    ]
    if len(rows) < len(steps):
        left = steps[len(rows) :]
        took, share = sum(one.took_us for one in left), sum(one.share for one in left)
        rows.append([time_text(took), f"{share:.1%}", f"{len(left)} more", *["-"] * 4])
    return [["time", "share", "op", "result", "device", "memory", "arithmetic"], *rows]


def _cut(name: str, everything: bool) -> str:
    return name if everything or len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 3]}..."
