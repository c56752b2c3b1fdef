"""Programs: what the builder refuses, and runs on workers."""

from __future__ import annotations

import itertools
import threading
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from kernel_runs import (
    Layer,
    addresses,
    normal,
    over,
    pack_weight,
)

from heliograph_backends.cpu.kernels import (
    BoundProgram,
    Elementwise,
    Encodings,
    Input,
    Instruction,
    Operand,
    PackedOperand,
    ProgramBuilder,
    Register,
    Rotation,
    Scratch,
    Status,
    WorkerPool,
)
from heliograph_backends.cpu.kernels import Operation as Op


@pytest.fixture(params=[1, 2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool | None]:
    """None, a pool of two threads, a pool of three: a bound program has one for all its runs."""
    if request.param == 1:
        yield None
        return
    with WorkerPool(request.param) as made:
        yield made


# The builder


def test_building_a_program_takes_less_than_its_words_twice() -> None:
    tracemalloc.start()
    try:
        builder, row = ProgramBuilder(), (400, 4)
        for step in range(5_000):
            builder.sum_rows((3, 100), Operand(0, 64 * step, row), Operand(1, 64 * step, (4,)))
        program = builder.build()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert program.steps == 5_000
    assert peak < 2 * program.code.nbytes


# The builder refuses what the runner cannot do


def test_what_the_runner_cannot_do_is_refused() -> None:
    flat, column = Operand(0, 0, (40, 4)), Operand(0, 0, (4, 40))
    row = Operand(1, 0, (0, 4))
    builder = ProgramBuilder()
    with pytest.raises(ValueError, match="contiguous columns"):
        builder.gemm(4, 4, 4, flat, flat, column)
    with pytest.raises(ValueError, match="contiguous rows"):
        builder.soft_max((4, 10), column, flat)
    with pytest.raises(ValueError, match="broadcast axis"):
        builder.elementwise((4, 10), Elementwise((flat, row), (Instruction(Op.COPY, Input(1), (Input(0),)),)))
    with pytest.raises(ValueError, match="takes 2 sources"):
        builder.elementwise((4, 10), Elementwise((flat,), (Instruction(Op.ADD, Input(0), (Input(0),)),)))
    with pytest.raises(ValueError, match="nothing wrote"):
        builder.elementwise((4, 10), Elementwise((flat,), (Instruction(Op.NEG, Input(0), (Register(0),)),)))
    with pytest.raises(ValueError, match="3 pairs"):
        turn = Rotation(5, 0, True, 0, 1.0, (1.0,) * 3, (1.0,) * 3, (0,) * 3)
        builder.rotary((4, 10), flat, flat, Operand(1, 0, (4, 0)), turn)
    with pytest.raises(ValueError, match="slots"):
        builder.elementwise((4, 10), Elementwise((flat,), (Instruction(Op.NEG, Input(0), (Input(0),)),)))
        BoundProgram(builder.build(), [])


# Whole programs on workers


def test_bits_do_not_depend_on_the_number_of_workers(
    random: np.random.Generator, pool: WorkerPool | None
) -> None:
    layer = Layer(random)
    assert layer.bound.program.shared_steps >= 3
    expected = layer.run(None)
    assert not np.isnan(layer.result).any()
    for _ in range(30):
        assert layer.run(pool) == expected


def test_one_program_runs_on_other_memory(random: np.random.Generator) -> None:
    x, target = normal(random, 10), np.empty(10, np.float32)
    builder = ProgramBuilder()
    body = Elementwise((over(0, x), over(1, target)), (Instruction(Op.NEG, Input(1), (Input(0),)),))
    builder.elementwise((10,), body)
    bound = BoundProgram(builder.build(), addresses([x, target]))
    assert bound.run() is Status.OK
    other, elsewhere = normal(random, 10), np.empty(10, np.float32)
    bound.rebind(addresses([other, elsewhere]))
    assert bound.run() is Status.OK
    assert np.array_equal(target, -x) and np.array_equal(elsewhere, -other)


def test_an_aborted_run_says_so_and_the_next_one_can_succeed(
    random: np.random.Generator, pool: WorkerPool | None
) -> None:
    layer = Layer(random)
    expected = layer.run(None)
    layer.bound.abort()
    assert layer.bound.run(pool) is Status.ABORTED
    assert layer.bound.failed_step == 0
    layer.bound.clear()
    assert layer.run(pool) == expected


def test_abort_stops_a_run_in_progress(random: np.random.Generator, pool: WorkerPool | None) -> None:
    x = normal(random, 200, 256)
    weight, product, mark = (
        pack_weight(normal(random, 256, 256)),
        np.empty((200, 256), np.float32),
        np.zeros(1, np.float32),
    )
    builder = ProgramBuilder()
    count = Elementwise((over(3, mark),), (Instruction(Op.SCALE_BIAS, Input(0), (Input(0),), (1.0, 1.0)),))
    for _ in range(20_000):
        builder.elementwise((1,), count)
        builder.gemm(200, 256, 256, over(0, x), PackedOperand(1), over(2, product))
    bound = BoundProgram(builder.build(), addresses([x, weight, product, mark]))
    statuses: list[Status] = []
    thread = threading.Thread(target=lambda: statuses.append(bound.run(pool)))
    thread.start()
    while mark[0] == 0:
        assert thread.is_alive()
    bound.abort()
    thread.join()
    assert statuses == [Status.ABORTED]
    assert 0 < bound.failed_step < bound.program.steps
    bound.clear()


def test_helpers_that_sleep_and_helpers_that_look_for_work_change_nothing(
    random: np.random.Generator,
) -> None:
    """Helpers sleep some time after a run; the next run finds them so, on their way, or still
    looking."""
    layer = Layer(random, tokens=100, width=96)
    expected = layer.run(None)
    with WorkerPool(3) as pool:
        for turn in range(40):
            assert layer.run(pool) == expected
            deadline = time.monotonic() + 10
            while turn % 4 == 0 and pool.parked < pool.helpers:
                assert time.monotonic() < deadline


def test_nobody_touches_a_program_when_its_run_is_over(random: np.random.Generator) -> None:
    """Helpers live on while programs and their memory come and go."""
    with WorkerPool(3) as pool:
        for turn in range(40):
            layer = Layer(random, tokens=80 + turn)
            expected = layer.run(None)
            assert layer.run(pool) == expected
            layer.result.fill(7)
            del layer.bound
            assert (layer.result == 7).all()


def test_programs_take_turns_on_one_pool(random: np.random.Generator) -> None:
    layers = [Layer(random), Layer(random, tokens=97)]
    expected = [layer.run(None) for layer in layers]
    with WorkerPool(3) as pool:
        for turn in range(60):
            assert layers[turn % 2].run(pool) == expected[turn % 2]


def test_a_program_has_one_pool_for_all_its_runs(random: np.random.Generator) -> None:
    layer = Layer(random)
    with WorkerPool(2) as one, WorkerPool(2) as other:
        layer.run(one)
        with pytest.raises(ValueError, match="one pool"):
            layer.run(other)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_a_run_takes_no_more_workers_than_it_may(threads: int, random: np.random.Generator) -> None:
    """Each worker that may take part has a block of scratch."""
    layer, scratch = Layer(random), Scratch()
    expected = layer.run(None)
    bound = BoundProgram(layer.bound.program, addresses(layer.arrays), scratch)
    with WorkerPool(3) as pool:
        for _ in range(20):
            layer.result.fill(np.nan)
            assert bound.run(pool, threads) is Status.OK
            assert layer.result.tobytes() == expected
        assert len(pool.scratch.addresses) == min(threads, 3) - 1
    assert len(scratch.addresses) == 1


def test_helpers_have_one_block_for_the_programs_of_all_plans(random: np.random.Generator) -> None:
    """As large as the largest of them needs, whichever ran first."""
    layers = [Layer(random) for _ in range(4)]
    expected = [layer.run(None) for layer in layers]
    needed = layers[0].bound.program.scratch_bytes
    with WorkerPool(3) as pool:
        pool.scratch_at(needed // 2, 2)
        for _ in range(3):
            assert [layer.run(pool) for layer in layers] == expected
        assert pool.scratch.size_bytes == needed
        assert len(pool.scratch.addresses) == 2
        pool.resize(2)
        assert not pool.scratch.addresses
        assert layers[0].run(pool) == expected[0]
        assert len(pool.scratch.addresses) == 1


def test_a_pool_can_be_resized_between_runs(random: np.random.Generator) -> None:
    layer = Layer(random)
    expected = layer.run(None)
    before = threading.active_count()
    with WorkerPool(1) as pool:
        for threads in (2, 4, 3, 1, 2):
            pool.resize(threads)
            assert threading.active_count() == before + threads - 1
            for _ in range(5):
                assert layer.run(pool) == expected
        with pytest.raises(ValueError, match="at least the calling one"):
            pool.resize(0)
        assert pool.helpers == 1


def test_a_closed_pool_has_no_threads_left() -> None:
    before = threading.active_count()
    with WorkerPool(3) as pool:
        assert pool.helpers == 2 and threading.active_count() == before + 2
    assert threading.active_count() == before


# Encodings


def forms(builder: ProgramBuilder, slot: int, scale: float) -> None:
    """Append steps that differ from call to call only in where their operands lie, and in the
    scale."""
    flat, row = Operand(slot, 64 * slot, (160, 4)), Operand(slot + 1, 0, (4,))
    builder.elementwise((50, 40), Elementwise((flat, row), ADD_ROW))
    builder.soft_max((50, 40), flat, Operand(slot + 2, 0, (160, 4)), scale=scale)
    builder.gemm(50, 40, 40, flat, PackedOperand(slot + 1), Operand(slot + 2, 0, (160, 4)))


ADD_ROW = (Instruction(Op.ADD, Input(0), (Input(0), Input(1))),)


def test_programs_from_shared_encodings_are_those_of_fresh_ones() -> None:
    shared = Encodings()
    programs = []
    for encodings in (None, shared, shared):
        builder = ProgramBuilder(encodings)
        for slot in (0, 3, 1):
            forms(builder, slot, scale=float(slot))
        programs.append(builder.build())
    assert all(np.array_equal(each.code, programs[0].code) for each in programs)
    assert {(each.slots, each.steps, each.scratch_bytes) for each in programs} == {
        (6, 9, programs[0].scratch_bytes)
    }


def test_an_encoding_is_checked_wherever_it_is_used() -> None:
    builder = ProgramBuilder()
    forms(builder, 0, 1.0)
    forms(builder, -1, 1.0)
    with pytest.raises(ValueError, match="not negative"):
        builder.build()


# Steps that run at the same time


def products(random: np.random.Generator, sizes: list[int]) -> tuple[ProgramBuilder, list[np.ndarray], int]:
    """A set of products of one operand, small and large, their sums in later steps, and the slot of
    these."""
    x = normal(random, 70, 96)
    arrays, builder, results = [x], ProgramBuilder(), []
    for width in sizes:
        arrays += [normal(random, 96, width), np.zeros((70, width), np.float32)]
        weight, made = len(arrays) - 2, len(arrays) - 1
        with builder.member_of(7):
            left, right = over(0, x), over(weight, arrays[weight])
            builder.gemm(70, width, 96, left, right, over(made, arrays[made]))
        results.append(made)
    arrays.append(np.zeros((70, len(sizes)), np.float32))
    for column, made in enumerate(results):
        total = Operand(len(arrays) - 1, 4 * column, (arrays[-1].strides[0],))
        builder.sum_rows(arrays[made].shape, over(made, arrays[made]), total)
    return builder, arrays, len(arrays) - 1


def test_steps_of_a_set_give_the_bits_of_one_after_the_other(
    random: np.random.Generator, pool: WorkerPool | None
) -> None:
    builder, arrays, total = products(random, [300, 8, 500, 64, 640])
    bound = BoundProgram(builder.build(), addresses(arrays))
    assert bound.run(None, 0) is Status.OK
    expected = [array.tobytes() for array in arrays]
    again = BoundProgram(builder.build(), addresses(arrays))
    for _ in range(200):
        for array in arrays[2::2]:
            array[:] = np.nan
        assert again.run(pool) is Status.OK
        assert [array.tobytes() for array in arrays] == expected
    assert np.isfinite(arrays[total]).all()


def test_several_steps_of_one_member_wait_for_each_other(
    random: np.random.Generator, pool: WorkerPool | None
) -> None:
    x, first, second = (normal(random, 400, 500) for _ in range(3))
    builder = ProgramBuilder()
    with builder.member_of(1):
        builder.soft_max(x.shape, over(0, x), over(1, first))
        builder.soft_max(x.shape, over(1, first), over(2, second))
    bound = BoundProgram(builder.build(), addresses([x, first, second]))
    assert bound.run(pool) is Status.OK
    expected = second.tobytes()
    for _ in range(50):
        first[:], second[:] = np.nan, np.nan
        assert bound.run(pool) is Status.OK
        assert second.tobytes() == expected


def test_an_abort_in_the_middle_of_a_set_ends_the_run(
    random: np.random.Generator, pool: WorkerPool | None
) -> None:
    builder, arrays, _ = products(random, [400] * 6)
    bound = BoundProgram(builder.build(), addresses(arrays))
    bound.abort()
    assert bound.run(pool) is Status.ABORTED
    bound.clear()
    assert bound.run(pool) is Status.OK


def test_a_run_that_is_paused_goes_on_where_it_was(
    random: np.random.Generator, pool: WorkerPool | None
) -> None:
    layer = Layer(random, tokens=400, width=512)
    expected = layer.run(None)
    pauses = runs = 0
    # On a busy machine many runs end before the other thread has its turn.
    while pauses < 10 and runs < 300:
        runs += 1
        over = threading.Event()

        def interrupt(over: threading.Event = over) -> None:
            while not over.wait(random.random() * 3e-4):
                layer.bound.pause()

        thread = threading.Thread(target=interrupt)
        thread.start()
        layer.result[:] = np.nan
        turns = itertools.count()
        # Helpers may be busy when it goes on.
        while layer.bound.run(None if next(turns) % 3 == 2 else pool) is Status.PAUSED:
            layer.bound.clear_pause()
            pauses += 1
        over.set()
        thread.join()
        layer.bound.clear()
        assert layer.result.tobytes() == expected
    assert pauses >= 10


def test_a_paused_run_can_be_given_up(random: np.random.Generator, pool: WorkerPool | None) -> None:
    layer = Layer(random)
    expected = layer.run(None)
    layer.bound.pause()
    assert layer.bound.run(pool) is Status.PAUSED
    layer.bound.clear()
    assert layer.run(pool) == expected
