"""Reports and errors of plans with divided weights, in the numbers of the client's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import Cause, NodePart, NodePlacement, PlanReport, SplitReport, WeightShare
from heliograph_server.scheduler.tensor_split import Divided


def explain(divided: Divided | None, error: HeliographError) -> HeliographError:
    """Return the error with the client's number, name and operands of its node."""
    if divided is None or not error.origin.op:
        return error
    found = divided.client.origin(divided.nodes[error.origin.node])
    origin = error.origin
    return error.at(replace(origin, op=found.op, node=found.node, operands=found.operands))


@contextmanager
def explaining(divided: Divided | None) -> Iterator[None]:
    """Apply `explain` to errors raised inside."""
    try:
        yield
    except HeliographError as error:
        if divided is None:
            raise
        raise explain(divided, error) from None


def client_report(divided: Divided, report: PlanReport, homes: Sequence[int]) -> PlanReport:
    """Return a report of the client's graph; `homes` is the place of the device of each leaf of the
    divided graph."""
    places = {one.name: place for place, one in enumerate(report.devices)}
    values = _client_values(divided)
    return replace(
        report,
        nodes=tuple(_placement(divided, report, number) for number in range(len(divided.client.nodes))),
        splits=tuple(_split(values, one) for one in report.splits),
        stored=tuple(replace(one, value=values[one.value]) for one in report.stored),
        weights=(
            *(
                WeightShare(
                    one.leaf, places[one.device], one.first, one.count, one.size_bytes, one.are_columns
                )
                for one in divided.parts
            ),
            *_wholes(divided, homes),
        ),
        parts=tuple(
            NodePart(divided.nodes[number], report.nodes[number].split, place)
            for number, place in sorted(divided.part_of.items())
            if number != divided.results[divided.nodes[number]]
        ),
    )


def _placement(divided: Divided, report: PlanReport, number: int) -> NodePlacement:
    result = divided.results[number]
    found = report.nodes[result]
    if number not in divided.products:
        return found
    # The parts run at the same time, before they are joined. One that has all rows is the result.
    others = (part for part in divided.part_of if divided.nodes[part] == number and part != result)
    parts = (report.nodes[part].step_us for part in others)
    step_us = found.step_us + max(parts, default=0.0)
    return NodePlacement(found.split, Cause.DIVIDED_WEIGHT, divided.products[number], step_us=step_us)


def _client_values(divided: Divided) -> list[int]:
    """Return for each value the client's value that it is or is a part of."""
    leaves = len(divided.client.leaves)
    of_parts = {one.value: one.leaf for one in divided.parts}
    return [
        *(of_parts.get(value, value) for value in range(len(divided.graph.leaves))),
        *(leaves + number for number in divided.nodes),
    ]


def _split(values: Sequence[int], split: SplitReport) -> SplitReport:
    copies = tuple(replace(one, value=values[one.value]) for one in split.copies)
    return replace(split, copies=copies)


def _wholes(divided: Divided, homes: Sequence[int]) -> Iterator[WeightShare]:
    """Yield the divided weights that are also kept as a whole for other readers."""
    replaced = {one.value for one in divided.parts}
    for leaf, are_columns in {one.leaf: one.are_columns for one in divided.parts}.items():
        if leaf not in replaced:
            type = divided.client.leaves[leaf].type
            rows = type.shape[-1 if are_columns else -2]
            yield WeightShare(leaf, homes[leaf], 0, rows, type.nbytes, are_columns)
