"""Runs of plans that share a stream, weights, variables or tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

import numpy as np

from heliograph_backends.conformance.contract_checks.common import ContractPart, require_raises, stream_of
from heliograph_backends.conformance.contract_checks.plans import F32, bits, layer, oversized, require_same
from heliograph_backends.conformance.harness.bench import Bench, Reports
from heliograph_backends.conformance.harness.content import Array, encode
from heliograph_backends.conformance.harness.execution import LoadedRecipe, loaded
from heliograph_backends.conformance.harness.fills import fill
from heliograph_backends.conformance.harness.outcome import require
from heliograph_backends.conformance.harness.recipe import LeafData, Recipe
from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Turn, host_bytes
from heliograph_proto.errors import CancelledError, OutOfMemoryError
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import TensorType

CASES = ContractPart("run")


@CASES
def two_plans(bench: Bench, random: np.random.Generator) -> None:
    """Two plans on two streams at once give the same as each alone."""
    with ExitStack() as stack:
        plans = [stack.enter_context(loaded(bench, layer(random, rows))) for rows in (65, 129)]
        expected = []
        for it in plans:
            it.run()
            expected.append(bits(it))
        streams = [stack.enter_context(stream_of(bench)) for _ in plans]
        for _ in range(5):
            reports = [Reports() for _ in plans]
            for it, stream, one in zip(plans, streams, reports, strict=True):
                stream.submit(it.compute, one)
            for one in reports:
                one.wait(bench.seconds)
        for it, known in zip(plans, expected, strict=True):
            require_same(bits(it), known, "of two plans at once")


@CASES
def two_streams(bench: Bench, random: np.random.Generator) -> None:
    """One plan on two streams at once runs one time after the other."""
    with ExitStack() as stack:
        # Two sets of tensors for one plan.
        first, second = (stack.enter_context(loaded(bench, _powers(random))) for _ in range(2))
        plan = first.plan
        assert plan is not None
        stack.enter_context(second.replaced(plan, free=False))
        pair = first, second
        expected = []
        for it in pair:
            it.run()
            expected.append(bits(it))
        require(not np.array_equal(expected[0][0], expected[1][0]), "the run took inputs of another one")
        streams = [stack.enter_context(stream_of(bench)) for _ in pair]
        meeting, reports = threading.Barrier(2), [Reports() for _ in pair]
        found: list[list[Array]] = [[], []]
        for it, stream, into, ended in zip(pair, streams, found, reports, strict=True):
            stream.submit(partial(_run_often, it, meeting, into), ended)
        for ended in reports:
            ended.wait(bench.seconds)
        for outputs, (known,) in zip(found, expected, strict=True):
            for output in outputs:
                require_same([output], [known], "of one plan on two streams")


def _run_often(it: LoadedRecipe, meeting: threading.Barrier, found: list[Array]) -> None:
    """Run many times, beginning when the other stream does if that is soon, and append each
    output's bytes."""
    with suppress(threading.BrokenBarrierError):
        meeting.wait(1.0)
    (output,) = it.outputs
    for _ in range(40):
        it.compute()
        found.append(np.empty(output.type.nbytes, np.uint8))
        output.buffer.get(output.offset_bytes, host_bytes(found[-1]))


def _powers(random: np.random.Generator) -> Recipe:
    """Return a graph that reads its first results last: a run that starts meanwhile overwrites
    them unless it waits."""
    made = Recipe()
    x = made.input(fill("normal", random, TensorType(F32, (129, 129))))
    powers = [x]
    for _ in range(8):
        powers.append(made.node("scale", made.node("matmul", powers[-1], x), scale=0.0625))
    value = powers.pop()
    while powers:
        value = made.node("add", value, powers.pop())
    made.output(value)
    return made


@CASES
def in_order(bench: Bench, random: np.random.Generator) -> None:
    """Queued runs see the writes of those before them."""
    with loaded(bench, _counter(random)) as it, stream_of(bench) as stream:
        bench.run(it.write)
        reports = [Reports() for _ in range(20)]
        for ended in reports:
            stream.submit(it.compute, ended)
        for ended in reports:
            ended.wait(bench.seconds)
        outputs, leaves = it.read()
        found = float(outputs[0].values), float(leaves[0].values)
        require(found == (20.0, 20.0), f"20 runs that each add 1 left {found} in the output and the variable")


def _counter(random: np.random.Generator) -> Recipe:
    """Return a graph that adds 1 to a variable."""
    made = Recipe()
    count = made.leaf(LeafKind.VARIABLE, fill("zero", random, TensorType(F32, ())))
    one = made.input(fill("near_one", random, TensorType(F32, ())))
    made.output(made.node("assign", count, made.node("add", count, made.node("sgn", one))))
    return made


@CASES
def shared_variable(bench: Bench, random: np.random.Generator) -> None:
    """A run of another plan reads the value that a run assigned to a variable."""
    with loaded(bench, _counter(random)) as it:
        again = bench.device.compile(it.graph, it.bindings(), DeviceCompileOptions(fusion=False))
        bench.run(it.write)
        bench.run(it.compute)
        with it.replaced(again):
            bench.run(it.compute)
        found = float(it.read()[1][0].values)
        require(found == 2.0, f"two plans that each add 1 to a variable left {found}")


@CASES
def shared_weights(bench: Bench, random: np.random.Generator) -> None:
    """A plan keeps working when another of the same weights is freed."""
    with loaded(bench, layer(random)) as it:
        it.run()
        again = bench.device.compile(it.graph, it.bindings(), DeviceCompileOptions())
        with it.replaced(again):
            it.run()
        it.run()
        it.check()


@CASES
def changed_weights(bench: Bench, random: np.random.Generator) -> None:
    """A plan that is compiled after its weights were overwritten computes with the new ones."""
    recipe = layer(random)
    changed = replace(recipe, leaves=[_halved(one) for one in recipe.leaves])
    with loaded(bench, changed) as it:
        it.run()
        expected = bits(it)
    with loaded(bench, recipe) as it:
        it.run()
        assert it.plan is not None
        it.plan.free()
        for value, tensor in it.bindings().weights.items():
            fresh = changed.leaves[value].content.raw
            bench.run(partial(tensor.buffer.set, tensor.offset_bytes, host_bytes(fresh)))
        it.plan = bench.device.compile(it.graph, it.bindings(), DeviceCompileOptions())
        bench.run(it.compute)
        require_same(_outputs(it), expected, "with the new weights")


@CASES
def written_weights(bench: Bench, random: np.random.Generator) -> None:
    """A plan whose weights were written since its last run computes with the new ones."""
    recipe = layer(random)
    changed = replace(recipe, leaves=[_halved(one) for one in recipe.leaves])
    with loaded(bench, changed) as it:
        it.run()
        expected = bits(it)
    with loaded(bench, recipe) as it:
        it.run()
        for value, tensor in it.bindings().weights.items():
            fresh = host_bytes(changed.leaves[value].content.raw)
            bench.run(partial(tensor.buffer.set, tensor.offset_bytes, fresh))
            tensor.buffer.written(tensor.offset_bytes, tensor.offset_bytes + fresh.nbytes)
        bench.run(it.compute)
        require_same(_outputs(it), expected, "with the written weights")


def _halved(one: LeafData) -> LeafData:
    """Return a weight with other elements; an input unchanged."""
    if one.leaf.kind is not LeafKind.WEIGHT:
        return one
    return replace(one, content=encode(one.content.type, one.content.values[::-1] * 0.5))


def _outputs(it: LoadedRecipe) -> list[Array]:
    """Return the outputs' bytes without a check of the weights."""
    found = [np.zeros(one.type.nbytes, np.uint8) for one in it.outputs]
    for tensor, out in zip(it.outputs, found, strict=True):
        it.bench.run(partial(tensor.buffer.get, tensor.offset_bytes, host_bytes(out)))
    return found


class _Impatient(Turn):
    """A turn that others want at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hook: Callable[[], None] | None = None
        self._is_over = threading.Event()

    @contextmanager
    def watch(self, hook: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._hook = hook
        try:
            yield
        finally:
            with self._lock:
                self._hook = None

    def give(self) -> None:
        """Return at once: it is this run's turn again."""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask again and again, in another thread."""
        thread = threading.Thread(target=self._ask, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _ask(self) -> None:
        while not self._is_over.wait(1e-4):
            with self._lock:
                if self._hook is not None:
                    self._hook()


@CASES
def in_turns(bench: Bench, random: np.random.Generator) -> None:
    """A run that gives its turn away, where the plan can, has the same bits."""
    with loaded(bench, _powers(random)) as it:
        it.run()
        expected = bits(it)
        for _ in range(10):
            turn = _Impatient()
            with turn.asking():
                it.run(turn=turn)
            require_same(bits(it), expected, "of a run that gave its turn away")
        it.run()
        require_same(bits(it), expected, "after runs that gave their turns away")


@CASES
def same_tensor(bench: Bench, random: np.random.Generator) -> None:
    """Two inputs may be one tensor."""
    made = Recipe()
    x, y = (made.input(fill("normal", random, TensorType(F32, (9, 33)))) for _ in range(2))
    made.output(made.node("add", made.node("exp", x), y))
    with loaded(bench, made) as it:
        assert it.plan is not None
        plan, (first, _), outputs = it.plan, it.inputs, it.outputs
        it.run()
        bench.run(partial(plan.compute, [first, first], outputs, Abort()))
        single = Recipe()
        z = single.input(made.leaves[0].content)
        single.output(single.node("add", single.node("exp", z), z))
        with loaded(bench, single) as known:
            known.run()
            require_same(bits(it), bits(known), "of one tensor as two inputs")


@CASES
def other_tensors(bench: Bench, random: np.random.Generator) -> None:
    """Each run may use other tensors."""
    with loaded(bench, layer(random)) as first, loaded(bench, layer(random)) as second:
        assert first.plan is not None and second.plan is not None
        second.run()
        own = _outputs(second)
        x = first.inputs[0]
        rows = second.recipe.leaves[0].content.raw
        for _ in range(3):
            first.run()
            known = bits(first)
            # A run in between, with the second one's input and outputs, must leave no traces.
            bench.run(partial(first.plan.compute, second.inputs, second.outputs, Abort()))
            there = _outputs(second)
            bench.run(partial(x.buffer.set, x.offset_bytes, host_bytes(rows)))
            bench.run(first.compute)
            require_same(_outputs(first), there, "of the same elements in other tensors")
            require(not np.array_equal(there[0], own[0]), "the run took the weights of another plan")
            first.run()
            require_same(bits(first), known, "after a run with other tensors")


@CASES
def late_aborts(bench: Bench, random: np.random.Generator) -> None:
    """An abort at any time ends its own run or comes too late, and never ends another run."""
    with loaded(bench, layer(random)) as it, stream_of(bench) as stream:
        it.run()
        expected = bits(it)
        for _ in range(20):
            abort, ended = Abort(), Reports()
            stream.submit(partial(it.compute, abort), ended)
            abort.set()
            try:
                ended.wait(bench.seconds)
            except CancelledError:
                pass
            bench.run(it.compute)
            require_same(bits(it), expected, "after a run that was aborted")


@CASES
def failed_update(bench: Bench, random: np.random.Generator) -> None:
    """An update that fails leaves the plan as it was."""
    graph = oversized(bench)
    with loaded(bench, layer(random)) as it:
        assert it.plan is not None
        update = partial(it.plan.update, graph, LeafBindings({}, {}), DeviceCompileOptions())
        require_raises(OutOfMemoryError, update, "an update to a graph larger than the device")
        it.run()
        it.check()


@CASES
def large_outputs(bench: Bench, random: np.random.Generator) -> None:
    """A run that writes megabytes is complete when it is done."""
    made = Recipe()
    x = made.input(fill("normal", random, TensorType(F32, (1, 1031))))
    made.output(made.node("broadcast_to", made.node("neg", x), shape=(1021, 1031)))
    with loaded(bench, made) as it:
        it.run()
        it.check()
