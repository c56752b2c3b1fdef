"""Every case of the suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from heliograph_backends.conformance.cases import (
    elementwise,
    moves,
    patches,
    products,
    recurrent,
    rows,
    training,
    windows,
)
from heliograph_backends.conformance.cases.forms import TAKEN
from heliograph_backends.conformance.cases.graphs import graph_cases
from heliograph_backends.conformance.contract_checks import contract_cases
from heliograph_backends.conformance.harness.case import Case, OpCase
from heliograph_backends.conformance.harness.layouts import IN_MEMORY, possible
from heliograph_proto.graph import LeafKind
from heliograph_proto.ops.table import OPS, infer

_FAMILIES = (elementwise, rows, products, moves, windows, recurrent, training, patches)


#: Floats by the way in which kernels treat them.
_WIDTHS = {"f64": "wide", "f32": "wide", "f16": "narrow", "bf16": "narrow"}


def op_cases(op: str) -> Iterator[OpCase]:
    """Yield the cases of an op, each once, the first of every kind marked for the quick subset."""
    seen: set[str] = set()
    kinds: set[str] = set()
    for case in _listed(op):
        if case.id in seen:
            continue
        seen.add(case.id)
        found = _kinds(case)
        yield replace(case, is_quick=not found <= kinds)
        kinds |= found


def _listed(op: str) -> Iterator[OpCase]:
    """Yield the listed cases of an op, and the first one again with its result in strided
    memory."""
    listed = [case for one in _FAMILIES if op in one.CASES for case in one.CASES[op](op)]
    yield from listed
    for case in listed[:1]:
        result, _ = infer(op, [one.type for one in case.operands], dict(case.attributes))
        if possible("spaced", result):
            yield replace(case, into="spaced")


def _kinds(case: OpCase) -> set[str]:
    """Return the features that a case tests: data types, strides, memory taken over, special
    numbers, weights, empty operands."""
    found = {"source"} if not case.operands else set()
    for place, one in enumerate(case.operands):
        dtype = one.type.dtype
        found.add(_WIDTHS.get(dtype.name, "other"))
        if one.layout in TAKEN:
            found |= {one.layout} if place in OPS[case.op].in_place else set()
        elif one.layout != "plain":
            found.add("in memory" if one.layout in IN_MEMORY else "in the graph")
        if one.fill.startswith(("special", "spoiled", "edges")):
            found.add(one.fill[:5])
        if one.kind is LeafKind.WEIGHT:
            found.add(f"weight {dtype.kind}")
        if one.type.size == 0 and OPS[case.op].group != "elementwise":
            found.add("empty")
    return found


@cache
def all_cases() -> tuple[Case, ...]:
    """Return the cases of all ops in the order of the table, then graphs, then the rest of the
    contract."""
    ops = (case for op in OPS for case in op_cases(op))
    return (*ops, *graph_cases(), *contract_cases())
