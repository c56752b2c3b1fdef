"""Runs a recipe on a device, in guarded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.content import Content
from heliograph_backends.conformance.harness.expected import compare, evaluate
from heliograph_backends.conformance.harness.layouts import GAP, lay_out
from heliograph_backends.conformance.harness.memory import GuardedMemory
from heliograph_backends.conformance.harness.recipe import Recipe
from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Plan, Tensor, Turn, Usage
from heliograph_proto.graph import Graph, LeafKind


class LoadedRecipe:
    """A recipe on a device: its leaves in guarded memory, and its plan."""

    def __init__(self, bench: Bench, recipe: Recipe, *, options: DeviceCompileOptions | None = None) -> None:
        self.bench = bench
        self.recipe = recipe
        self.graph: Graph = recipe.graph()
        bench.require_support(self.graph)
        # Inputs and outputs share a buffer, as if they were parts of one large allocation.
        self._run = GuardedMemory(bench.device)
        self._weights = GuardedMemory(bench.device, Usage.WEIGHTS)
        self._variables = GuardedMemory(bench.device)
        self._places = [self._place(number) for number in range(len(recipe.leaves))]
        self._outputs = [self._place_output(place) for place in range(len(self.graph.outputs))]
        self.plan: Plan | None = None
        try:
            for memory in self._memories:
                memory.allocate()
            # Weights are written once: they do not change while a plan is bound to them.
            bench.run(self._weights.write)
            bench.run(self.write)
            self.plan = bench.device.compile(self.graph, self.bindings(), options or DeviceCompileOptions())
        except BaseException:
            self.free()
            raise

    @property
    def _memories(self) -> tuple[GuardedMemory, ...]:
        return self._run, self._weights, self._variables

    def write(self) -> None:
        """Restore inputs and variables, and blank outputs, from inside a stream's work."""
        self._run.write()
        self._variables.write()

    def compute(
        self, abort: Abort | None = None, *, wanted: Sequence[bool] | None = None, turn: Turn | None = None
    ) -> None:
        """Run the plan once, from inside a stream's work."""
        assert self.plan is not None
        chosen = [True] * len(self._outputs) if wanted is None else wanted
        outputs = [one if wants else None for one, wants in zip(self.outputs, chosen, strict=True)]
        if turn is not None:
            self.plan.compute_in_turns(self.inputs, outputs, abort or Abort(), turn)
        else:
            self.plan.compute(self.inputs, outputs, abort or Abort())

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of the inputs."""
        return [
            self._run.tensor(number)
            for number, one in zip(self._places, self.recipe.leaves, strict=True)
            if one.leaf.kind is LeafKind.INPUT
        ]

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors of the outputs."""
        return [self._run.tensor(number) for number in self._outputs]

    def run(
        self, abort: Abort | None = None, *, wanted: Sequence[bool] | None = None, turn: Turn | None = None
    ) -> None:
        """Restore inputs and variables, then run once."""

        def work() -> None:
            self.write()
            self.compute(abort, wanted=wanted, turn=turn)

        self.bench.run(work)

    def read(self) -> tuple[list[Content], list[Content]]:
        """Return the outputs and the leaves. Raises MismatchError for writes outside of them."""
        held: list[list[Content]] = []
        self.bench.run(lambda: held.extend(memory.read() for memory in self._memories))
        run, weights, variables = held
        of = {LeafKind.INPUT: run, LeafKind.WEIGHT: weights, LeafKind.VARIABLE: variables}
        leaves = [
            of[one.leaf.kind][place] for one, place in zip(self.recipe.leaves, self._places, strict=True)
        ]
        return [run[place] for place in self._outputs], leaves

    def check(self) -> float:
        """Compare outputs and variables with the reference and return the largest error.

        Raises MismatchError.
        """
        expected, afterwards = evaluate(self.graph, [one.content for one in self.recipe.leaves])
        outputs, leaves = self.read()
        error = 0.0
        for place, (found, value) in enumerate(zip(outputs, expected, strict=True)):
            error = max(error, compare(f"output {place}", found, value).error)
        for one, found, value in zip(self.recipe.leaves, leaves, afterwards, strict=True):
            if one.leaf.kind is LeafKind.VARIABLE:
                error = max(error, compare(one.leaf.name, found, value).error)
        return error

    @contextmanager
    def replaced(self, plan: Plan, *, free: bool = True) -> Iterator[None]:
        """Use another plan of the same graph inside the block, then free it unless `free` is
        False."""
        before, self.plan = self.plan, plan
        try:
            yield
        finally:
            if free:
                plan.free()
            self.plan = before

    def free(self) -> None:
        """Free the plan, then the memory; nothing if lost work may still use them."""
        if self.bench.lost:
            return
        if self.plan is not None:
            self.plan.free()
            self.plan = None
        for memory in self._memories:
            memory.free()

    def _memory_of(self, kind: LeafKind) -> GuardedMemory:
        of = {LeafKind.INPUT: self._run, LeafKind.WEIGHT: self._weights}
        return of.get(kind, self._variables)

    def _place(self, number: int) -> int:
        one = self.recipe.leaves[number]
        kind, content = one.leaf.kind, one.content
        memory = self._memory_of(kind)
        what = f"{one.leaf.name} ({content.type})"
        return memory.add(
            what, content.type, lay_out(one.layout, content), writable=kind is LeafKind.VARIABLE
        )

    def _place_output(self, place: int) -> int:
        type = self.graph.type_of(self.graph.outputs[place].value)
        # An output holds GAP bytes before a run.
        blank = Content(type, np.full(type.nbytes, GAP, np.uint8), np.empty(0))
        laid = lay_out(self.recipe.output_layouts.get(place, "plain"), blank)
        return self._run.add(f"output {place} ({type})", type, laid, writable=True)

    def bindings(self) -> LeafBindings:
        """Return the tensors of the weights and the variables."""
        tensors = {
            kind: {
                value: self._memory_of(kind).tensor(self._places[value])
                for value, one in enumerate(self.recipe.leaves)
                if one.leaf.kind is kind
            }
            for kind in (LeafKind.WEIGHT, LeafKind.VARIABLE)
        }
        return LeafBindings(tensors[LeafKind.WEIGHT], tensors[LeafKind.VARIABLE])


@contextmanager
def loaded(
    bench: Bench, recipe: Recipe, *, options: DeviceCompileOptions | None = None
) -> Iterator[LoadedRecipe]:
    """Load a recipe on a device, and free it afterwards."""
    it = LoadedRecipe(bench, recipe, options=options)
    try:
        yield it
    finally:
        it.free()
