"""Checks of the contract other than computing: memory, order, plans, devices."""

from __future__ import annotations

from collections.abc import Iterator

from heliograph_backends.conformance.contract_checks import (
    buffers,
    device,
    events,
    memory,
    plans,
    runs,
    streams,
    types,
)
from heliograph_backends.conformance.harness.case import Case


def contract_cases() -> Iterator[Case]:
    """Yield the cases of every part."""
    for part in (device, types, buffers, streams, events, plans, runs, memory):
        yield from part.CASES.cases()
