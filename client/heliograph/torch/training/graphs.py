"""Graphs of training: a step with the optimizer's update, and the forward pass alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import heliograph as hg
from heliograph.torch.elements import dtype_name
from heliograph.torch.lowering import Item, Lowering
from heliograph.torch.training.clipping import clipped
from heliograph.torch.training.joint import Step
from heliograph.torch.training.optimizers import NUMBERS, Group, Update
from heliograph.torch.training.state import STEPS, HostState, ServerState

#: The distance of the seeds of two steps.
_STRIDE = 0x9E3779B1


class StepGraph:
    """A graph of one step, while it is made."""

    def __init__(self, step: Step, host: HostState, server: ServerState, variables: frozenset[str]) -> None:
        self.graph = hg.Graph()
        self._step = step
        self._host = host
        self._server = server
        #: The names of the parameters and buffers that are variables.
        self._names = variables
        self._variables: dict[str, hg.Value] = {}

    def variable(self, kind: str, name: str) -> hg.Value:
        """Return a variable of the shape and data type of a parameter or buffer."""
        short = f"{kind}/{name}"
        if short not in self._variables:
            like = self._host.tensor(name)
            self._variables[short] = self._server.variable(self.graph, short, like, dtype_name(like.dtype))
        return self._variables[short]

    def stored(self, name: str) -> hg.Value:
        """Return a parameter or buffer that is a variable."""
        return self.variable("parameter" if name in self._host.parameters else "buffer", name)

    def run(self, batch: Sequence[torch.Tensor], seed: hg.Value) -> list[Item]:
        """Add the nodes of the step, and return its results."""
        lowering = Lowering(self.graph, seed)
        items: list[Item] = []
        for leaf in self._step.leaves:
            if leaf.stored in self._names:
                items.append(self.stored(str(leaf.stored)))
            elif leaf.stored is not None:
                items.append(lowering.weight(leaf.stored, self._host.tensor(leaf.stored).detach()))
            elif leaf.place is not None:
                one = batch[leaf.place]
                items.append(self.graph.input(f"batch_{leaf.place}", tuple(one.shape), dtype_name(one.dtype)))
            else:
                items.append(leaf.value)
        return [
            lowering.lift(one) if isinstance(one, torch.Tensor) else one
            for one in lowering.run(self._step.graph, items)
        ]


def training_graph(
    step: Step,
    host: HostState,
    server: ServerState,
    groups: Sequence[Group],
    batch: Sequence[torch.Tensor],
    seed: int,
    clip: tuple[str, float] | None = None,
) -> hg.Graph:
    """Return the graph of a step of training; its output is "loss".

    `clip`: the form of the bound of gradients.
    """
    trainable = frozenset(name for group in groups for name in group.names)
    building = StepGraph(step, host, server, trainable | frozenset(step.changed))
    graph = building.graph
    steps = graph.variable(server.prefix + STEPS, (), "i64")
    count = steps + 1
    results = building.run(batch, count * _STRIDE + seed)
    changed, rest = results[: len(step.changed)], results[len(step.changed) :]
    graph.output("loss", hg.reshape(rest[0], ()))
    gradients = {name: value for name, value in zip(step.trained, rest[1:], strict=True) if value is not None}
    if clip is not None:
        gradients = clipped(gradients, clip, graph)
    for place, group in enumerate(groups):
        update = Update(group, graph.input(f"group_{place}", (len(NUMBERS),), "f64"), count)
        for name in group.names:
            # A parameter without gradient has no state, as in torch.
            if name in gradients:
                slots = {slot: building.variable(slot, name) for slot in group.slots}
                update.apply(building.stored(name), gradients[name], slots.__getitem__)
    # Nodes of their own at the end: a batch that the loss refuses leaves all variables as they were.
    for name, value in zip(step.changed, changed, strict=True):
        hg.assign(building.stored(name), hg.ops.cont(value))
    hg.assign(steps, steps + 1)
    return graph


def forward_graph(
    step: Step, host: HostState, server: ServerState, variables: frozenset[str], batch: Sequence[torch.Tensor]
) -> tuple[hg.Graph, list[Item]]:
    """Return the graph of a forward pass, and for each result the name of an output, or the result."""
    building = StepGraph(step, host, server, variables)
    found: list[Item] = []
    for place, one in enumerate(building.run(batch, building.graph.full((), 0, "i64"))):
        if isinstance(one, hg.Value):
            building.graph.output(f"output_{place}", one)
            one = f"output_{place}"
        found.append(one)
    return building.graph, found
