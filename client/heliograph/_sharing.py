"""Parts of a graph that run on several servers at once: what a head asks of each, and its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heliograph._common import Shell
from heliograph._compiling import CompileOptions
from heliograph._effects import Procedure
from heliograph._procedures import Sending
from heliograph._running import Bound, PlanSpec, Run, Wanted, choose_outputs, submit
from heliograph_proto import EXCHANGE
from heliograph_proto.description import SessionInfo
from heliograph_proto.errors import UnsupportedError
from heliograph_proto.portions import Portion


@dataclass(frozen=True, slots=True)
class Sharing:
    """A portion of a graph: how it exchanges values, where its nodes run, and how many runs may overlap."""

    portion: Portion
    #: Names of devices and numbers of nodes.
    pins: tuple[tuple[str, tuple[int, ...]], ...]
    pipeline: int = 1

    def asked(self, info: SessionInfo, options: CompileOptions) -> CompileOptions:
        """The options of its plan. Raises UnsupportedError."""
        if EXCHANGE not in info.features:
            raise UnsupportedError(
                f"the server {info.server} does not exchange values with others", advice="upgrade it"
            )
        return replace(options, portion=self.portion, pins=self.pins, pipeline=self.pipeline)


def submit_part(
    shell: Shell,
    spec: PlanSpec,
    number: int,
    inputs: Sequence[Bound],
    fetched: Sequence[int],
    into: Mapping[int, int],
    stream: int | None,
) -> Procedure[Run]:
    """Sends the portion's part of a run of the whole, by its number; 0: it is all of it. `fetched`: places of
    outputs that come here; `into`: handles of tensors by the places of the outputs that are written there.
    Arrays stay as they are until it is done."""
    core, ports = shell.core, spec.info.outputs
    names = [ports[place].name for place in fetched]
    made = choose_outputs(core, spec.info, names, fetch=True) if names else []
    kept = [Wanted(place, ports[place], into=handle) for place, handle in into.items()]
    how = Sending(stream, observed=True, keep=True)
    chosen = made, kept
    return (yield from submit(core, spec, inputs, chosen, how, 0, shell.release, exchange_run=number))
