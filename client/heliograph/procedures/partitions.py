"""Runs of a graph's part on one of several servers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heliograph.core.effects import Procedure
from heliograph.core.shell import Shell
from heliograph.procedures.run import (
    Bound,
    PlanSpec,
    SentRun,
    Submission,
    WantedValue,
    choose_outputs,
    submit,
)
from heliograph.procedures.transfer import Sending


def submit_part(
    shell: Shell,
    spec: PlanSpec,
    number: int,
    inputs: Sequence[Bound],
    fetched: Sequence[int],
    into: Mapping[int, int],
    stream: int | None,
) -> Procedure[SentRun]:
    """Sends the partition's part of a run of the whole, by its number; 0: all of it. `fetched`: places of
    outputs that come here; `into`: handles of tensors by the places of the outputs that are written there.
    Arrays stay as they are until it is done."""
    core, ports = shell.core, spec.info.outputs
    names = [ports[place].name for place in fetched]
    made = choose_outputs(core, spec.info, names, fetch=True) if names else []
    kept = [WantedValue(place, ports[place], into=handle) for place, handle in into.items()]
    how = Sending(stream, observed=True, keep=True)
    asked = Submission(spec, inputs, made, kept, how, shell.release, exchange_run=number)
    return (yield from submit(core, asked))
