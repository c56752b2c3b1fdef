"""`TorchPlan`: an exported module compiled for a session, with a plan for each of the last shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import heliograph as hg
from heliograph._base.kept_plans import MOST_PLANS, KeptPlans
from heliograph.torch.elements import as_tensor, feed_of, new_seed
from heliograph.torch.lowering import SEED

if TYPE_CHECKING:
    from heliograph.torch.model import Model


@dataclass(frozen=True, slots=True)
class Program:
    """A graph of a module for some shapes, and what its outputs are."""

    graph: hg.Graph
    #: For each output the name of the graph's output, or what was known before the run.
    outputs: dict[str, Any]
    #: The names of the graph's outputs.
    computed: frozenset[str]
    #: Whether a run takes a seed for random numbers.
    is_random: bool


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph of a module, and its plan; None where the host computed everything."""

    program: Program
    plan: hg.Plan | None


class TorchPlan:
    """A module compiled for a session. Made by `model.compile`; thread-safe.

    There is a plan for each combination of shapes. The last `MOST_PLANS` are kept.
    """

    def __init__(self, model: Model, session: hg.Session, options: dict[str, Any]) -> None:
        self._model = model
        self._session = session
        self._options = options
        self._plans: KeptPlans[Compiled] = KeptPlans(MOST_PLANS)

    def __repr__(self) -> str:
        return f"<TorchPlan of {self._model!r}, {len(self._plans)} shapes>"

    @property
    def plans(self) -> tuple[hg.Plan, ...]:
        """The plans that are kept, the last used one at the end."""
        return tuple(one.plan for one in self._plans.all() if one.plan is not None)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the module with the arguments of its forward, and return what that returns."""
        return self._model.restored(list(self.run(self._model.bound(args, named)).values()))

    def run(
        self, feeds: Mapping[str, Any] | None = None, /, *, timeout: float | None = None, **named: Any
    ) -> dict[str, Any]:
        """Run the module and wait for its outputs.

        Args:
            feeds: Tensors or arrays by the names of the inputs, here or as keywords.
            timeout: Seconds to wait for the run; None means no limit.

        Returns tensors by the names of the outputs; arrays if all inputs are arrays. Raises
        InvalidInputError, UnsupportedError, and the errors of `session.compile` and of the run.
        """
        given = {**(feeds or {}), **named}
        arrays = self._arrays(given)
        compiled = self._compiled({name: tuple(array.shape) for name, array in arrays.items()})
        results: dict[str, Any] = {}
        if compiled.plan is not None:
            if compiled.program.is_random:
                arrays[SEED] = new_seed()
            results = compiled.plan.run(arrays, timeout=timeout)
        is_torch = not given or any(isinstance(one, torch.Tensor) for one in given.values())
        return {
            name: _result(results[name] if name in compiled.program.computed else item, is_torch)
            for name, item in compiled.program.outputs.items()
        }

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        """Make the plan for inputs of these shapes."""
        program = self._model.lower(shapes)
        # A graph needs an output: without one, the host has computed everything.
        plan = self._session.compile(program.graph, **self._options) if program.computed else None
        return self._plans.keep(_key(shapes), Compiled(program, plan))

    def _compiled(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        found = self._plans.find(_key(shapes))
        if found is not None:
            return found
        self._model.check(shapes)
        return self.prepare(shapes)

    def _arrays(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a run is given as arrays. Raises InvalidInputError."""
        names = [one.name for one in self._model.inputs]
        if unknown := [name for name in given if name not in names]:
            raise hg.InvalidInputError(
                f"there is no input {unknown[0]!r:.80}", advice=f"inputs: {', '.join(names):.400}"
            )
        if absent := [name for name in names if name not in given]:
            raise hg.InvalidInputError(f"input {absent[0]!r:.80} is missing")
        return {name: self._array(name, given[name]) for name in names}

    def _array(self, name: str, feed: Any) -> Any:
        wanted = self._model.dtype(name)
        if not isinstance(feed, (torch.Tensor, np.ndarray, hg.Tensor)):
            try:
                feed = torch.as_tensor(feed, dtype=wanted)
            except (TypeError, ValueError, RuntimeError) as error:
                raise hg.InvalidInputError(f"input {name!r:.80} is no tensor: {error}") from None
        if isinstance(feed, torch.Tensor):
            if feed.dtype != wanted:
                raise hg.InvalidInputError(
                    f"input {name!r:.80} is of {wanted}, and {feed.dtype} is given",
                    advice=f"convert it: tensor.to({wanted})",
                )
            try:
                return feed_of(feed)
            except hg.UnsupportedError as error:
                raise hg.InvalidInputError(
                    f"input {name!r:.80}: {error.message}", advice=error.advice
                ) from None
        return feed


def _key(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
    return tuple(sorted(shapes.items()))


def _result(item: Any, is_torch: bool) -> Any:
    if isinstance(item, np.ndarray):
        return as_tensor(item) if is_torch else item
    if isinstance(item, torch.Tensor) and not is_torch:
        return feed_of(item)
    return item
