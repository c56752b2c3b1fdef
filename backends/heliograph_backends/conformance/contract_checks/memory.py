"""Memory accounting: all memory that is taken is given back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from heliograph_backends.conformance.contract_checks.common import ContractPart, require_raises, used_bytes
from heliograph_backends.conformance.contract_checks.plans import UNFUSED, arena_for, layer, oversized
from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.execution import loaded
from heliograph_backends.conformance.harness.outcome import require
from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Usage
from heliograph_proto.errors import CancelledError, OutOfMemoryError

CASES = ContractPart("memory")


def require_given_back(bench: Bench, work: Callable[[], None]) -> None:
    """Raise MismatchError unless a second run of the work leaves the used memory unchanged."""
    # A backend may keep what it sets up once, such as a library's workspace.
    work()
    before = used_bytes(bench.device)
    work()
    after = used_bytes(bench.device)
    require(after == before, f"{after - before:,} bytes more are taken than before")


@CASES
def buffers(bench: Bench, random: np.random.Generator) -> None:
    """A buffer takes at least its bytes, and free gives them back, once."""
    device = bench.device
    require_given_back(bench, lambda: device.buffer_type.allocate(2**20).free())
    before = used_bytes(device)
    first, second = (device.buffer_type.allocate(2**20, Usage.WEIGHTS) for _ in range(2))
    try:
        taken = used_bytes(device) - before
        require(taken >= 2**21, f"two buffers of 1 MiB take {taken:,} bytes")
    finally:
        first.free()
        first.free()
        second.free()
    left = used_bytes(device) - before
    require(left == 0, f"{left:,} bytes are left after free, which was called twice for one of two buffers")


@CASES
def plans(bench: Bench, random: np.random.Generator) -> None:
    """A plan, its runs and its copies of weights take no memory after free."""
    recipe = layer(random, rows=65)

    def work() -> None:
        with loaded(bench, recipe) as it:
            it.run()
            it.run(wanted=(True, False))

    require_given_back(bench, work)


@CASES
def arenas(bench: Bench, random: np.random.Generator) -> None:
    """A plan that fits into an arena takes no other memory, and the arena gives all of it back."""
    made = layer(random, rows=65)
    with loaded(bench, made, options=UNFUSED) as it:

        def work() -> None:
            with arena_for(bench, it.graph) as arena:
                before = used_bytes(bench.device)
                plan = bench.device.compile_in(arena, it.graph, it.bindings(), UNFUSED)
                taken, own = used_bytes(bench.device) - before, plan.compute_bytes - plan.arena_bytes
                plan.free()
                require(plan.arena_bytes > 0, "nothing of the plan lies in an arena made for it")
                require(taken == own, f"{taken:,} bytes were taken beside the arena, {own:,} reported")

        require_given_back(bench, work)


@CASES
def aborted(bench: Bench, random: np.random.Generator) -> None:
    """An aborted run takes no memory."""
    recipe, abort = layer(random), Abort()
    abort.set()

    def work() -> None:
        with loaded(bench, recipe) as it:
            require_raises(CancelledError, lambda: it.run(abort), "a run that was aborted")

    require_given_back(bench, work)


@CASES
def too_large(bench: Bench, random: np.random.Generator) -> None:
    """A plan that does not fit is OutOfMemoryError, and takes no memory."""
    graph = oversized(bench)

    def work() -> None:
        def compile() -> None:
            bench.device.compile(graph, LeafBindings({}, {}), DeviceCompileOptions()).free()

        require_raises(OutOfMemoryError, compile, "compiling a graph larger than the device")

    if bench.device.memory().total_bytes:
        require_given_back(bench, work)
    else:
        work()
