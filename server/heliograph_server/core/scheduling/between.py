"""Which values lie in which device's memory between splits, and how long."""

from __future__ import annotations

from heliograph_proto.graph import Graph
from heliograph_server.core.scheduling.model import Schedule

#: First and last split.
Span = tuple[int, int]


def values_between(graph: Graph, schedule: Schedule) -> dict[int, dict[int, Span]]:
    """By device: each result that another split or the caller reads, and each copy, with its span.

    A result lives on the device that computed it up to the last split that reads it, wherever that is, since
    copies are taken from there; a copy up to the last split of its own device that reads it.
    """
    found: dict[int, dict[int, Span]] = {}
    end = len(schedule.splits)
    returned = {port.value for port in graph.outputs}
    for number, split in enumerate(schedule.splits):
        here = found.setdefault(split.device, {})
        for copy in split.copies:
            here[copy.value] = here.get(copy.value, (number, number))[0], number
        for value in split.inputs:
            _extend(here, value, number)
            if value >= len(graph.leaves):
                _extend(found[schedule.assignments[value - len(graph.leaves)].device], value, number)
        for value in split.outputs:
            here[value] = number, end if value in returned else number
    return found


def _extend(spans: dict[int, Span], value: int, number: int) -> None:
    if value in spans:
        first, last = spans[value]
        spans[value] = first, max(last, number)
