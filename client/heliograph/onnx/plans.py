"""`OnnxPlan`: an ONNX model compiled for a session, with a plan for each of the last shapes."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import heliograph as hg
from heliograph._base.kept_plans import MOST_PLANS, KeptPlans
from heliograph.onnx.batches import Batches, Cuts, cuts_of
from heliograph.onnx.elements import Array
from heliograph.onnx.importing import Program
from heliograph.onnx.ports import Spec, TensorSpec, feed_into, result_of

if TYPE_CHECKING:
    from heliograph.onnx.model import Model

_Key: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph of a model, and its plan; None where the host computed everything."""

    program: Program
    plan: hg.Plan | None
    #: Where the outputs have the batch, if it may be padded.
    cuts: Cuts


class OnnxPlan:
    """A model compiled for a session. Made by `model.compile`; thread-safe.

    There is a plan for each combination of shapes. The last `MOST_PLANS` are kept.
    """

    def __init__(
        self,
        model: Model,
        session: hg.Session,
        options: dict[str, Any],
        seed: int | None,
        batches: Batches | None,
    ) -> None:
        self._model = model
        self._session = session
        self._options = options
        self._batches = batches
        self._lock = threading.Lock()
        #: Of random numbers: the seed, and the numbers of the runs.
        self._seed = secrets.randbits(63) if seed is None else seed
        self._runs = itertools.count()
        self._plans: KeptPlans[Compiled] = KeptPlans(MOST_PLANS)
        #: The inputs whose values decide shapes, as far as that is known.
        self._fixed: set[str] = set()

    def __repr__(self) -> str:
        return f"<OnnxPlan of {self._model!r}, {len(self._plans)} shapes>"

    @property
    def plans(self) -> tuple[hg.Plan, ...]:
        """The plans that are kept, the last used one at the end."""
        return tuple(one.plan for one in self._plans.all() if one.plan is not None)

    def run(
        self, feeds: Mapping[str, Any] | None = None, /, *, timeout: float | None = None, **named: Any
    ) -> dict[str, Any]:
        """Run the model and wait for its outputs.

        Args:
            feeds: Arrays by the names of the inputs, here or as keywords. A sequence is a list.
            timeout: Seconds to wait for the run; None means no limit.

        Returns arrays by the names of the outputs. Raises InvalidInputError, UnsupportedError,
        InvalidModelError, and the errors of `session.compile` and of the run.
        """
        if feeds is not None and not isinstance(feeds, Mapping):
            raise hg.InvalidInputError(
                f"the inputs are of type {type(feeds).__name__}",
                advice="give arrays by name: run({name: array})",
            )
        given = {name: _as_arrays(feed) for name, feed in {**(feeds or {}), **named}.items()}
        count = 0
        if self._batches is not None:
            self._model.spec(given)
            given, count = self._batches.padded(given)
        compiled = self._compiled(given)
        program = compiled.program
        results: dict[str, Array] = {}
        if compiled.plan is not None:
            wires: dict[str, Array] = {}
            for name, port in program.inputs.items():
                feed_into(port, given.get(name), wires)
            if program.random_state is not None:
                wires[program.random_state] = np.array([self._seed, next(self._runs)], np.int64)
            results = compiled.plan.run(wires, timeout=timeout)
        found = {name: result_of(port, results) for name, port in program.outputs.items()}
        for name, (axis, each) in compiled.cuts.items():
            found[name] = found[name][(slice(None),) * axis + (slice(count * each),)]
        return found

    def prepare(self, specs: Mapping[str, Spec], values: Mapping[str, Any]) -> None:
        """Make the plan for inputs of these specs."""
        program = self._model.program(specs, values)
        key = _key(specs, {name: np.asarray(value) for name, value in values.items()})
        with self._lock:
            self._fixed.update(values)
        self._keep(key, program, self._cuts(program, specs))

    def _compiled(self, feeds: Mapping[str, Any]) -> Compiled:
        specs = self._model.spec(feeds)
        with self._lock:
            fixed = set(self._fixed)
        key = _key(specs, {name: feeds[name] for name in fixed})
        if (found := self._plans.find(key)) is not None:
            return found
        program = self._model.build(feeds, fixed)
        with self._lock:
            self._fixed |= fixed
            key = _key(specs, {name: feeds[name] for name in self._fixed})
        return self._keep(key, program, self._cuts(program, specs))

    def _cuts(self, program: Program, specs: Mapping[str, Spec]) -> Cuts:
        """Find the batch in the outputs, from a second import with one row more."""
        if self._batches is None:
            return {}
        larger, size = dict(specs), 0
        for name in self._batches.inputs - program.fixed.keys():
            spec = specs[name]
            assert isinstance(spec, TensorSpec)
            size = spec.shape[0]
            larger[name] = TensorSpec(spec.element, (size + 1, *spec.shape[1:]))
        return cuts_of(program, self._model.program(larger, program.fixed), size)

    def _keep(self, key: _Key, program: Program, cuts: Cuts) -> Compiled:
        # A graph needs an output: without one, the host has computed everything.
        plan = self._session.compile(program.graph, **self._options) if program.graph.outputs else None
        return self._plans.keep(key, Compiled(program, plan, cuts))


def _as_arrays(feed: Any) -> Any:
    if feed is None or isinstance(feed, np.ndarray):
        return feed
    if isinstance(feed, (list, tuple)):
        return [_as_arrays(one) for one in feed]
    return np.asarray(feed)


def _key(specs: Mapping[str, Spec], values: Mapping[str, Array]) -> _Key:
    shapes = tuple((name, specs[name]) for name in sorted(specs) if name not in values)
    fixed = tuple(sorted((name, str(one.dtype), one.shape, one.tobytes()) for name, one in values.items()))
    return shapes, fixed
