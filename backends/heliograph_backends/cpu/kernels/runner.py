"""The native runner: a whole program without Python between its steps, on any number of workers.

Theory of operation. Worker 0, the thread that called, leads. It runs the steps that have one tile
by itself; before a set of steps that need not wait for each other it publishes how many shared steps
are open (PROGRESS), then claims tiles of them like everybody else, with an atomic addition to each
step's own counter, and waits before the next set until as many tiles are done as there are. Helpers
look at PROGRESS alone and never run ahead: a helper that comes late finds steps closed or their tiles
claimed, and does nothing. So tiny steps cost no traffic between cores, and a step's tiles see
everything that earlier sets wrote.

A helper may wake after the run has ended, when the program is being prepared for its next run. It
therefore enters (INSIDE += 1), looks whether the program is CLOSED, and leaves if so. The leader
closes at its end and waits until nobody is inside; both sides use one total order, so either the
helper sees CLOSED or the leader sees it INSIDE.

Tiles are fixed by shapes, and each element is computed by one worker in one order: bits do not
depend on who claims what.
"""

from __future__ import annotations

from numba import types

from .atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_block,
    finish_streaming,
    pause,
    set_word,
    word,
    yield_core,
)
from .elementwise import elementwise_block
from .experts import names_no_expert
from .heavy import heavy_block
from .lanes import jit, jit_entry, jit_inline
from .layout import (
    ABORT,
    BLOCKS,
    BLOCKS_PER_TILE,
    CLAIMED,
    CLOSED,
    COUNTER,
    COUNTER_WORDS,
    COUNTERS,
    DONE,
    FAILED_STEP,
    FINISHED,
    HEAVY,
    INSIDE,
    KIND,
    PROGRAM_HEADER_WORDS,
    PROGRESS,
    STATUS,
    STEP_COUNT,
    STEP_WORDS,
    STREAMS,
    TILES,
    TOGETHER,
    Kind,
    Status,
)
from .moves import has_outside
from .packing import pack_panels
from .rotary import rotary_block
from .row_kernels import rows_block

OK, ABORTED = int(Status.OK), int(Status.ABORTED)
INVALID, OUTSIDE = int(Status.INVALID), int(Status.OUTSIDE)
ELEMENTWISE, MATMUL, ROTARY = int(Kind.ELEMENTWISE), int(Kind.MATMUL), int(Kind.ROTARY)
CONVERT, GATHER, SCATTER = int(Kind.CONVERT), int(Kind.GATHER), int(Kind.SCATTER)
EXPERTS = int(Kind.EXPERTS)
LAST_KIND = int(max(Kind))
SPINS_BEFORE_YIELD = 4096


@jit_inline
def run_tile(step: int, tile: int, slots: int, control: int, scratch: int) -> None:
    """Run the blocks of one tile."""
    kind, per_tile = word(step, KIND), word(step, BLOCKS_PER_TILE)
    for block in range(tile * per_tile, min((tile + 1) * per_tile, word(step, BLOCKS))):
        if kind == ELEMENTWISE:
            elementwise_block(step, block, slots, scratch)
        elif kind == MATMUL or kind >= CONVERT:
            call_block(word(control, HEAVY), kind, step, block, slots, scratch)
        elif kind == ROTARY:
            rotary_block(step, block, slots, scratch)
        else:
            rows_block(kind, step, block, slots, scratch)
    if word(step, STREAMS):
        finish_streaming()


@jit
def wait_for(base: int, index: int, value: int) -> int:
    """Wait until a word is at least `value` and return it: spin first, then give the core away
    between looks.
    """
    spins = 0
    seen: int = atomic_load(base, index)
    while seen < value:
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            pause()
        else:
            yield_core()
        seen = atomic_load(base, index)
    return seen


@jit
def wait_until_empty(control: int) -> None:
    """Wait until no helper is inside the program."""
    spins = 0
    while atomic_load(control, INSIDE) != 0:
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            pause()
        else:
            yield_core()


@jit_inline
def claim_tiles(step: int, slots: int, control: int, scratch: int) -> None:
    """Claim and run tiles of a shared step until none is left. After an abort tiles are claimed but
    not run.
    """
    tiles = word(step, TILES)
    counter = control + 8 * (COUNTERS + word(step, COUNTER) * COUNTER_WORDS)
    tile = atomic_add(counter, CLAIMED, 1)
    while tile < tiles:
        if atomic_load(control, ABORT) == 0:
            run_tile(step, tile, slots, control, scratch)
        atomic_add(counter, DONE, 1)
        tile = atomic_add(counter, CLAIMED, 1)


@jit_inline
def end_set(step: int, behind: int, control: int) -> None:
    """Wait until all tiles of the shared steps from one up to another are done."""
    while step < behind:
        counter = word(step, COUNTER)
        if counter >= 0:
            wait_for(control + 8 * (COUNTERS + counter * COUNTER_WORDS), DONE, word(step, TILES))
        step += 8 * word(step, STEP_WORDS)


@jit_inline
def run_alone(step: int, slots: int, control: int, scratch: int) -> None:
    """Run all tiles of a step on this thread."""
    for tile in range(word(step, TILES)):
        if atomic_load(control, ABORT) != 0:
            break
        run_tile(step, tile, slots, control, scratch)


@jit_inline
def lead(code: int, slots: int, control: int, scratch: int, helped: bool) -> int:
    """Run all steps, set after set; return the status."""
    step = code + 8 * PROGRAM_HEADER_WORDS
    first, opened = step, 0
    for number in range(word(code, STEP_COUNT)):
        kind = word(step, KIND)
        if kind > LAST_KIND:
            atomic_store(control, FAILED_STEP, number)
            return INVALID
        begins = helped and word(step, TOGETHER) & 1 == 0
        if begins:
            end_set(first, step, control)
            first = step
        # Steps that name rows are sets by themselves, so nobody has begun with them yet.
        if kind in (GATHER, SCATTER) and has_outside(kind, step, slots, control, scratch):
            atomic_store(control, FAILED_STEP, number)
            return OUTSIDE
        if kind == EXPERTS and names_no_expert(step, slots, control):
            atomic_store(control, FAILED_STEP, number)
            return OUTSIDE
        if begins and word(step, TOGETHER) >> 1 > opened:
            opened = word(step, TOGETHER) >> 1
            atomic_store(control, PROGRESS, opened)
        if helped and word(step, COUNTER) >= 0:
            claim_tiles(step, slots, control, scratch)
        else:
            run_alone(step, slots, control, scratch)
        if atomic_load(control, ABORT) != 0:
            atomic_store(control, FAILED_STEP, number)
            return ABORTED
        step += 8 * word(step, STEP_WORDS)
    if helped:
        end_set(first, step, control)
        # Tiles that helpers claimed after that were not run.
        if atomic_load(control, ABORT) != 0:
            atomic_store(control, FAILED_STEP, word(code, STEP_COUNT) - 1)
            return ABORTED
    return OK


@jit_inline
def help_along(code: int, slots: int, control: int, scratch: int) -> None:
    """Take part in the shared steps as they open."""
    step = code + 8 * PROGRAM_HEADER_WORDS
    for _ in range(word(code, STEP_COUNT)):
        counter = word(step, COUNTER)
        if counter >= 0:
            progress = wait_for(control, PROGRESS, counter + 1)
            if progress == FINISHED:
                return
            if progress == word(step, TOGETHER) >> 1:
                claim_tiles(step, slots, control, scratch)
        step += 8 * word(step, STEP_WORDS)


@jit_entry
def run_program(code: int, slots: int, control: int, scratch: int, worker: int) -> int:
    """Run an encoded program: worker 0 leads with helpers, -1 leads alone, others help. All but
    `worker` are addresses.

    Returns the status to the leader, and OK to a helper.
    """
    if worker > 0:
        atomic_add(control, INSIDE, 1)
        if atomic_load(control, CLOSED) == 0:
            help_along(code, slots, control, scratch)
        atomic_add(control, INSIDE, -1)
        return OK
    status = lead(code, slots, control, scratch, worker == 0)
    atomic_store(control, STATUS, status)
    if worker == 0:
        atomic_store(control, CLOSED, 1)
        atomic_store(control, PROGRESS, FINISHED)
        wait_until_empty(control)
    return status


@jit_entry
def open_program(control: int, shared_steps: int) -> None:
    """Make a program ready for helpers; nobody is inside. The last store publishes all that was
    written before.
    """
    for index in range(COUNTERS, COUNTERS + shared_steps * COUNTER_WORDS):
        set_word(control, index, 0)
    set_word(control, PROGRESS, 0)
    atomic_store(control, CLOSED, 0)


@jit_entry
def pack_matrix(
    target: int,
    panel_bytes: int,
    source: int,
    row_step: int,
    column_step: int,
    depth: int,
    columns: int,
) -> None:
    """Pack a whole matrix into panels, see `packing.pack_panels`."""
    pack_panels(target, panel_bytes, source, row_step, column_step, depth, columns)


#: What is called by its address, and the functions that Python calls.
BY_ADDRESS = (heavy_block,)
ENTRIES = {
    run_program: (types.int64,) * 5,
    open_program: (types.int64,) * 2,
    pack_matrix: (types.int64,) * 7,
}
