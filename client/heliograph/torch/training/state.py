"""The state of training: parameters, buffers and an optimizer's state, here and on the server."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import heliograph as hg
from heliograph.torch.elements import as_tensor, feed_of
from heliograph.torch.training.optimizers import Group, state_of, steps_of, write_state

#: The variable that counts steps.
STEPS = "steps"
#: The entry of an optimizer's state dict that counts steps, which torch ignores.
COUNTED = "heliograph"
_numbers = itertools.count(1)


class HostState:
    """The state as the module and the optimizer have it, by the names of the variables."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters = dict(module.named_parameters())
        self.buffers = dict(module.named_buffers())
        #: How many steps were taken.
        self.steps = steps_of(optimizer)

    def count(self, steps: int | None) -> None:
        """Count steps from here; None: as the optimizer's state does."""
        self.steps = steps_of(self._optimizer) if steps is None else int(steps)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer."""
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def read(self, variables: Iterable[str], groups: Sequence[Group]) -> dict[str, torch.Tensor]:
        """Return the elements for variables."""
        keys = {slot: key for group in groups for slot, key in group.slots.items()}
        found = {}
        for variable in variables:
            kind, _, name = variable.partition("/")
            if variable == STEPS:
                found[variable] = torch.tensor(self.steps, dtype=torch.int64)
            elif kind in keys:
                found[variable] = state_of(self._optimizer, self.parameters[name], keys[kind])
            else:
                found[variable] = self.tensor(name)
        return found

    def check(self, values: Mapping[str, torch.Tensor]) -> None:
        """Check that a checkpoint's values are of this module. Raises InvalidArgumentError."""
        known = {**self.parameters, **self.buffers}
        for variable, value in values.items():
            kind, _, name = variable.partition("/")
            wanted = torch.Size() if variable == STEPS else getattr(known.get(name), "shape", None)
            if value.shape != wanted:
                raise hg.InvalidArgumentError(
                    f"the checkpoint has {variable!r:.80} of shape {list(value.shape)}, and the module "
                    + ("nothing of this name" if wanted is None else f"{list(wanted)}"),
                    advice="restore a checkpoint of a trainer of the same module",
                )
        if STEPS not in values:
            raise hg.InvalidArgumentError(f"the checkpoint has no {STEPS!r}", advice="take one by a trainer")

    def write_module(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write parameters and buffers."""
        with torch.no_grad():
            for variable, value in values.items():
                kind, _, name = variable.partition("/")
                if kind in ("parameter", "buffer"):
                    self.tensor(name).copy_(value)

    def write_optimizer(self, values: Mapping[str, torch.Tensor], groups: Sequence[Group]) -> None:
        """Write an optimizer's state."""
        self.steps = int(values[STEPS])
        for group in groups:
            for name in group.names:
                state = {
                    key: values[f"{slot}/{name}"]
                    for slot, key in group.slots.items()
                    if f"{slot}/{name}" in values
                }
                if state and self.steps:
                    counted = self.steps if group.kind == "adam" else None
                    write_state(self._optimizer, self.parameters[name], state, counted)


class ServerState:
    """The variables of a trainer in its session."""

    def __init__(self, session: hg.Session) -> None:
        self.session = session
        #: The first part of the variables' names, which no other trainer has.
        self.prefix = f"trainer_{next(_numbers)}/"
        #: For each variable that has its elements, a plan that uses it.
        self._plans: dict[str, hg.Plan] = {}

    @property
    def plans(self) -> set[hg.Plan]:
        """Plans that together use all variables."""
        return set(self._plans.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that have their elements."""
        return tuple(self._plans)

    def variable(self, graph: hg.Graph, name: str, like: torch.Tensor, dtype: str) -> hg.Value:
        """Return a variable of a graph."""
        return graph.variable(self.prefix + name, tuple(like.shape), dtype)

    def missing(self, plan: hg.Plan) -> list[str]:
        """Return the variables of a plan that do not have their elements."""
        return [name for name in self._of(plan) if name not in self._plans]

    def adopt(self, plan: hg.Plan, values: Mapping[str, torch.Tensor]) -> None:
        """Give the variables that a plan adds their elements."""
        if values:
            found = plan.checkpoint()
            found.update({self.prefix + name: feed_of(value) for name, value in values.items()})
            plan.restore(found)
        self._plans.update(dict.fromkeys(self._of(plan), plan))

    def read(self) -> dict[str, torch.Tensor]:
        """Return the elements of all variables, after every step sent before."""
        return {name: as_tensor(array) for name, array in self.checkpoint().items()}

    def checkpoint(self) -> hg.Checkpoint:
        """Return the elements of all variables by their names without the prefix."""
        arrays: dict[str, Any] = {}
        types: dict[str, Any] = {}
        for plan in self.plans:
            taken = plan.checkpoint()
            arrays.update({name.removeprefix(self.prefix): array for name, array in taken.items()})
            types.update({name.removeprefix(self.prefix): one for name, one in taken.types.items()})
        return hg.Checkpoint(arrays, types)

    def restore(self, checkpoint: hg.Checkpoint) -> None:
        """Set all variables to a checkpoint's elements. Raises InvalidArgumentError."""
        named = hg.Checkpoint(
            {self.prefix + name: array for name, array in checkpoint.items()},
            {self.prefix + name: one for name, one in checkpoint.types.items()},
        )
        for plan in self.plans:
            plan.restore(named)

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set variables."""
        for plan in self.plans:
            found = plan.checkpoint()
            found.update(
                {
                    self.prefix + name: feed_of(one)
                    for name, one in values.items()
                    if self.prefix + name in found
                }
            )
            plan.restore(found)

    def free(self) -> None:
        """Free the variables, whose plans are free."""
        names = list(self._plans)
        self._plans.clear()
        for name in names:
            self.session.free_variable(self.prefix + name)

    def _of(self, plan: hg.Plan) -> list[str]:
        return [name.removeprefix(self.prefix) for name in plan.variables]
