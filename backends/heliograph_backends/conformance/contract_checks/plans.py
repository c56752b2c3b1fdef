"""Plans: inputs of runs, freeing, updating, aborting, running several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from heliograph_backends.conformance.contract_checks.common import ContractPart, offered, require_raises
from heliograph_backends.conformance.contract_checks.types import own_types
from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.content import Array
from heliograph_backends.conformance.harness.execution import LoadedRecipe, loaded
from heliograph_backends.conformance.harness.fills import fill
from heliograph_backends.conformance.harness.outcome import NotSupportedError, require
from heliograph_backends.conformance.harness.recipe import Recipe
from heliograph_backends.contract import (
    Abort,
    Arena,
    DeviceCompileOptions,
    LeafBindings,
    Tensor,
    Usage,
    access,
    host_bytes,
)
from heliograph_proto.errors import CancelledError, InvalidInputError, OutOfRangeError, UnknownHandleError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.types import DTYPES, TensorType

CASES = ContractPart("plan")

F32 = DTYPES["f32"]
UNFUSED = DeviceCompileOptions(fusion=False)


def layer(random: np.random.Generator, rows: int = 9) -> Recipe:
    """Return exp(x @ w + b) and its sum, two outputs."""
    made = Recipe()
    x = made.input(fill("normal", random, TensorType(F32, (rows, 33))))
    w = made.leaf(LeafKind.WEIGHT, fill("normal", random, TensorType(F32, (33, 17))))
    b = made.leaf(LeafKind.WEIGHT, fill("normal", random, TensorType(F32, (17,))))
    scaled = made.node("scale", made.node("matmul", x, w), scale=0.0625)
    value = made.node("exp", made.node("add", scaled, b))
    made.output(value, made.node("reduce_sum", value, axes=(1,)))
    return made


def bits(it: LoadedRecipe) -> list[Array]:
    """Return the outputs' bytes."""
    return [one.raw for one in it.read()[0]]


def require_same(found: Sequence[Array], expected: Sequence[Array], what: str) -> None:
    """Raise MismatchError unless the outputs have the same bits."""
    same = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    require(same, f"{what}: the outputs have other bits")


def oversized(bench: Bench) -> Graph:
    """Return a graph that needs more memory than the device has. Raises NotSupportedError."""
    elements = max(2**50, bench.device.memory().total_bytes)
    made = Recipe()
    value = made.node("fill", shape=(elements,), value=1.0, dtype=F32)
    made.output(made.node("reduce_sum", made.node("exp", value)))
    graph = made.graph()
    bench.require_support(graph)
    return graph


@CASES
def facts(bench: Bench, random: np.random.Generator) -> None:
    """It reports its device, graph, memory and steps."""
    with loaded(bench, layer(random)) as it:
        plan = it.plan
        assert plan is not None
        require(plan.device is bench.device, f"its device is {plan.device!r}")
        require(plan.graph == it.graph, "its graph is another one")
        require(
            plan.compute_bytes >= 0 and plan.steps >= 0, f"{plan.compute_bytes} bytes, {plan.steps} steps"
        )


@CASES
def unwanted(bench: Bench, random: np.random.Generator) -> None:
    """Skipped outputs do not change the others."""
    with loaded(bench, layer(random)) as it:
        it.run()
        expected = bits(it)
        for wanted in ((True, False), (False, True), (False, False), (True, True)):
            it.run(wanted=wanted)
            for place, wants in enumerate(wanted):
                if wants:
                    require_same([bits(it)[place]], [expected[place]], f"with {wanted} wanted")


@CASES
def freed(bench: Bench, random: np.random.Generator) -> None:
    """It can be freed twice, and a run after that is UnknownHandleError."""
    with loaded(bench, layer(random)) as it:
        assert it.plan is not None
        it.plan.free()
        it.plan.free()
        require_raises(UnknownHandleError, it.run, "a run after free")


@CASES
def other_types(bench: Bench, random: np.random.Generator) -> None:
    """Tensors of other types than the graph's are InvalidInputError."""
    with loaded(bench, layer(random)) as it:
        assert it.plan is not None
        plan, (x,) = it.plan, it.inputs
        for type in (TensorType(F32, (33, 9)), TensorType(DTYPES["i32"], (9, 33)), TensorType(F32, (9, 32))):
            wrong = Tensor(type, x.buffer, x.offset_bytes)
            action = partial(bench.run, partial(plan.compute, [wrong], [None, None], Abort()))
            require_raises(InvalidInputError, action, f"a run with an input of {type}")
        it.run()
        it.check()


@CASES
def aborted(bench: Bench, random: np.random.Generator) -> None:
    """An abort ends a run with CancelledError, and the next run is correct."""
    with loaded(bench, layer(random)) as it:
        abort = Abort()
        abort.set()
        require_raises(CancelledError, lambda: it.run(abort), "a run that was aborted")
        it.run()
        it.check()


@CASES
def after_failure(bench: Bench, random: np.random.Generator) -> None:
    """A run after a failed one is correct."""
    made = Recipe()
    rows = made.input(fill("normal", random, TensorType(F32, (9, 5))))
    places = made.input(fill("below 9", random, TensorType(DTYPES["i32"], (4,))))
    made.output(made.node("exp", made.node("get_rows", rows, places)))
    with loaded(bench, made) as it:
        assert it.plan is not None
        tensor = it.inputs[1]
        wrong = memoryview(np.full(4, 9, np.int32).tobytes())

        def fail() -> None:
            it.write()
            tensor.buffer.set(tensor.offset_bytes, wrong)
            it.compute()

        require_raises(OutOfRangeError, lambda: bench.run(fail), "a run with an index outside")
        it.run()
        it.check()


@CASES
def options(bench: Bench, random: np.random.Generator) -> None:
    """Compile options do not change the bits."""
    recipe = layer(random, rows=65)
    with loaded(bench, recipe) as it:
        it.run()
        expected = bits(it)
    for chosen in (
        DeviceCompileOptions(fusion=False),
        DeviceCompileOptions(threads=1),
        DeviceCompileOptions(threads=2),
    ):
        with loaded(bench, recipe, options=chosen) as it:
            it.run()
            require_same(bits(it), expected, str(chosen))


@CASES
def other_memory(bench: Bench, random: np.random.Generator) -> None:
    """Weights may lie in every buffer type that the device supports."""
    device = bench.device
    with loaded(bench, layer(random, rows=65)) as it:
        weights = {value: one for value, one in enumerate(it.recipe.leaves) if one.leaf.digest}
        for memory in filter(device.supports_buffer_type, own_types(bench)):
            buffer, placed = memory.allocate_tensors([one.content.type for one in weights.values()])
            try:
                for tensor, one in zip(placed, weights.values(), strict=True):
                    bench.run(partial(access.write, tensor, 0, host_bytes(one.content.raw)))
                bindings = LeafBindings(dict(zip(weights, placed, strict=True)), {})
                with it.replaced(device.compile(it.graph, bindings, DeviceCompileOptions())):
                    it.run()
                    it.check()
            finally:
                buffer.free()


@CASES
def weights_alone(bench: Bench, random: np.random.Generator) -> None:
    """Weights that fill buffers for weights give the same bits, and are read as they were written."""
    memory = bench.device.buffer_type
    with loaded(bench, layer(random, rows=65)) as it, ExitStack() as stack:
        it.run()
        expected = bits(it)
        weights = {value: one.content for value, one in enumerate(it.recipe.leaves) if one.leaf.digest}
        placed: dict[int, Tensor] = {}
        for value, content in weights.items():
            buffer = memory.allocate(memory.alloc_size(content.type), Usage.WEIGHTS)
            stack.callback(buffer.free)
            placed[value] = Tensor(content.type, buffer)
            bench.run(partial(access.write, placed[value], 0, host_bytes(content.raw)))
        with it.replaced(bench.device.compile(it.graph, LeafBindings(placed, {}), DeviceCompileOptions())):
            it.run()
            require_same(bits(it), expected, "with weights in buffers of their own")
            for value, content in weights.items():
                found = np.empty(content.type.nbytes, np.uint8)
                bench.run(partial(access.read, placed[value], 0, host_bytes(found)))
                require(found.tobytes() == content.raw.tobytes(), f"weight {value} has other bytes")


@CASES
def updated(bench: Bench, random: np.random.Generator) -> None:
    """An updated plan computes the new graph, and the old plan is freed."""
    with loaded(bench, layer(random, rows=9)) as first, loaded(bench, layer(random, rows=5)) as second:
        assert first.plan is not None and second.plan is not None
        second.run()
        expected = bits(second)
        second.plan.free()
        old = first.plan
        second.plan = old.update(second.graph, second.bindings(), DeviceCompileOptions())
        require(second.plan.graph == second.graph, "the new plan's graph is another one")
        second.run()
        require_same(bits(second), expected, "after update")
        second.check()
        if second.plan is not old:
            require_raises(UnknownHandleError, first.run, "a run of the plan that was updated")
        first.plan = None


@CASES
def estimated(bench: Bench, random: np.random.Generator) -> None:
    """The estimate equals what compiling takes, and estimating takes no memory."""
    with loaded(bench, layer(random)) as it, offered():
        assert it.plan is not None
        before = bench.device.memory()
        found = bench.device.estimate(it.graph, DeviceCompileOptions())
        require(bench.device.memory() == before, "the device's memory changed")
        total = sum(found.compute_bytes)
        require(total == it.plan.compute_bytes, f"{total} bytes estimated, {it.plan.compute_bytes} taken")
        require(found.extra_bytes >= 0, f"{found.extra_bytes} extra bytes")


@contextmanager
def arena_for(bench: Bench, graph: Graph) -> Iterator[Arena]:
    """Make an arena for the plan of a graph, and free it afterwards. Raises NotSupportedError."""
    with offered():
        blocks = bench.device.estimate(graph, UNFUSED).arena_bytes
    if not blocks:
        raise NotSupportedError("its plans take memory of their own")
    made = bench.device.arena(blocks)
    try:
        require(made.size_bytes >= sum(blocks), f"{made.size_bytes} bytes of an arena of {sum(blocks)}")
        yield made
    finally:
        made.free()
        made.free()


@CASES
def in_an_arena(bench: Bench, random: np.random.Generator) -> None:
    """Plans that lie in one arena compute, in any order, the same as in memory of their own."""
    recipes = [layer(random, rows) for rows in (65, 9, 33)]
    with arena_for(bench, recipes[0].graph()) as arena, ExitStack() as stack:
        them = [stack.enter_context(loaded(bench, one, options=UNFUSED)) for one in recipes]
        expected = []
        for it in them:
            it.run()
            expected.append(bits(it))
            plan = bench.device.compile_in(arena, it.graph, it.bindings(), UNFUSED)
            require(plan.arena_bytes <= plan.compute_bytes, "more lies in the arena than there is")
            stack.enter_context(it.replaced(plan))
        for number in random.integers(0, len(them), 12):
            them[number].run()
            require_same(bits(them[number]), expected[number], f"plan {number} in the arena")


@CASES
def order(bench: Bench, random: np.random.Generator) -> None:
    """The device's order of nodes has every node once, after its operands."""
    graph = layer(random).graph()
    found = list(bench.device.optimize(graph))
    require(sorted(found) == list(range(len(graph.nodes))), f"the order is {found}")
    seen = set(range(len(graph.leaves)))
    for number in found:
        ready = seen.issuperset(graph.nodes[number].operands)
        require(ready, f"node {number} runs before one of its operands in {found}")
        seen.add(len(graph.leaves) + number)
