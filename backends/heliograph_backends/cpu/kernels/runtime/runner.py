"""The native runner: a whole program without Python between its steps, on any number of workers.

Theory of operation. Worker 0, the calling thread, leads. It runs single-tile steps by itself.
Before a set of steps that need not wait for each other, it publishes the number of open shared
steps (PROGRESS). Then all workers claim tiles of them with an atomic addition to each step's own
counter, and the leader waits before the next set until all tiles are done. Helpers only look at
PROGRESS and never run ahead: a late helper finds steps closed or their tiles claimed, and does
nothing. So tiny steps cause no traffic between cores, and a step's tiles see all writes of earlier
sets.

A program reaches its helpers by mail, without Python: the leader posts it at the start of the run,
takes it back at the end from the helpers that have not seen it, and waits for those that run it. So
no helper touches a program or its memory after its run. An idle helper looks for more work for
about a hundred microseconds before its thread sleeps: waking it takes as long as a small product.

A run that is paused ends at a tile with PAUSED, when no worker runs a tile of it any more. The
counters of shared steps keep what was claimed, and the control block the leader's place. The run
goes on there when it is resumed, with any number of helpers.

Tiles depend only on shapes, and each element is computed by one worker in a fixed order, so bits do
not depend on the assignment of tiles.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.matmul.experts import names_no_expert
from heliograph_backends.cpu.kernels.matmul.packing import pack_columns_in_place, transpose_rows_in_place
from heliograph_backends.cpu.kernels.program.words import (
    ABORT,
    BLOCKS,
    BLOCKS_PER_TILE,
    CLAIMED,
    CLOCK,
    CLOCK_NANOSECONDS,
    CLOCK_NUMBER,
    CLOCK_SECONDS,
    CONTROL_AT,
    COUNTER,
    COUNTER_WORDS,
    COUNTERS,
    DONE,
    ENTRIES,
    ENTRIES_AT,
    FAILED_STEP,
    FINISHED,
    KIND,
    MAIL_BEFORE,
    MAIL_CODE,
    MAIL_CONTROL,
    MAIL_PROCESSOR,
    MAIL_SCRATCH,
    MAIL_SLOTS,
    MAIL_STATE,
    MAILS,
    MOST_CLAIMED,
    NEXT_AT,
    PAUSE,
    PROCESSOR,
    PROGRAM_HEADER_WORDS,
    PROGRESS,
    REACHED_STEP,
    REACHED_TILE,
    ROWS,
    SCRATCHES,
    STATUS,
    STEP_BEGAN,
    STEP_COUNT,
    STEP_HEADER_WORDS,
    STEP_WORDS,
    STREAMS,
    TILES,
    TIMES,
    TOGETHER,
    WORKERS,
    Kind,
    Mail,
    Status,
)
from heliograph_backends.cpu.kernels.rows.moves import has_outside
from heliograph_backends.cpu.kernels.rows.pages import names_no_page
from heliograph_backends.cpu.kernels.vector.atomics import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_replace,
    atomic_store,
    call_block,
    call_clock,
    call_elementwise,
    finish_streaming,
    pause,
    processor,
    set_word,
    word,
    yield_core,
)
from heliograph_backends.cpu.kernels.vector.lanes import Entry, jit, jit_inline
from heliograph_backends.cpu.kernels.vector.space import locate

OK, ABORTED = int(Status.OK), int(Status.ABORTED)
INVALID, OUTSIDE, PAUSED = int(Status.INVALID), int(Status.OUTSIDE), int(Status.PAUSED)
ELEMENTWISE, EXPERTS, MATMUL = int(Kind.ELEMENTWISE), int(Kind.EXPERTS), int(Kind.MATMUL)
ATTENTION = int(Kind.ATTENTION)
GATHER, SCATTER = int(Kind.GATHER), int(Kind.SCATTER)
LAST_KIND = int(max(Kind))
PARKED, WAITING, POSTED, TAKEN = (int(each) for each in Mail)
SPINS_BEFORE_YIELD = 4096
# A worker claims 1/SHARES of its even share of the remaining tiles, and at least one tile. Products of
# a single row are bound by memory, and few long stretches are read faster than many short ones: of
# these it claims its even share.
SHARES = 2
# The number of looks for more work: those with a pause after them, and all.
SPINS_BEFORE_GIVING_WAY = 1024
LOOKS = 1280


@jit_inline
def run_tile(step: int, tile: int, following: int, slots: int, scratch: int) -> None:
    """Run the blocks of one tile; `following` is this worker's probable next tile."""
    set_word(scratch + NEXT_AT, 0, following)
    kind, per_tile = word(step, KIND), word(step, BLOCKS_PER_TILE)
    for block in range(tile * per_tile, min((tile + 1) * per_tile, word(step, BLOCKS))):
        if kind == ELEMENTWISE:
            row, rows, column, columns = locate(step, block, scratch)
            body = step + 8 * STEP_HEADER_WORDS
            call_elementwise(scratch, body, slots, scratch, row, rows, column, columns)
        else:
            call_block(kind, step, block, slots, scratch)
    if word(step, STREAMS):
        finish_streaming()


@jit
def wait_for(base: int, index: int, value: int) -> int:
    """Wait until a word is at least `value` and return it: first spin, then yield the core between
    looks."""
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


@jit_inline
def claim_tiles(step: int, slots: int, control: int, scratch: int) -> None:
    """Claim and run tiles of a shared step until none is left, or the run is paused. After an
    abort, tiles are claimed but not run."""
    tiles, shares = word(step, TILES), word(control, WORKERS)
    if word(step, KIND) != MATMUL or word(step, ROWS) > 1:
        shares *= SHARES
    most = word(step, MOST_CLAIMED)
    counter = control + 8 * (COUNTERS + word(step, COUNTER) * COUNTER_WORDS)
    claimed = atomic_load(counter, CLAIMED)
    while claimed < tiles and atomic_load(control, PAUSE) == 0:
        share = max(1, min(most, (tiles - claimed) // shares))
        first = atomic_add(counter, CLAIMED, share)
        behind = min(first + share, tiles)
        if first < behind:
            for tile in range(first, behind):
                if atomic_load(control, ABORT) == 0:
                    following = tile + 1 if tile + 1 < behind else atomic_load(counter, CLAIMED)
                    run_tile(step, tile, following, slots, scratch)
            atomic_add(counter, DONE, behind - first)
        claimed = first + share


@jit_inline
def end_set(step: int, behind: int, control: int) -> None:
    """Wait until all tiles of the shared steps from `step` to `behind` are done."""
    while step < behind:
        counter = word(step, COUNTER)
        if counter >= 0:
            wait_for(control + 8 * (COUNTERS + counter * COUNTER_WORDS), DONE, word(step, TILES))
        step += 8 * word(step, STEP_WORDS)


@jit_inline
def run_alone(step: int, tile: int, slots: int, control: int, scratch: int) -> int:
    """Run the tiles of a step from `tile` on this thread, and return the first that was not run."""
    while tile < word(step, TILES):
        if atomic_load(control, ABORT) != 0 or atomic_load(control, PAUSE) != 0:
            break
        run_tile(step, tile, tile + 1, slots, scratch)
        tile += 1
    return tile


@jit
def time_now(control: int) -> int:
    """Return the clock's nanoseconds."""
    call_clock(word(control, CLOCK), word(control, CLOCK_NUMBER), control + 8 * CLOCK_SECONDS)
    found: int = word(control, CLOCK_SECONDS) * 1_000_000_000 + word(control, CLOCK_NANOSECONDS)
    return found


@jit
def note_time(control: int, times: int, ended: int) -> None:
    """Add the time since the last note to that of a step that ended; -1: none has."""
    now, began = time_now(control), word(control, STEP_BEGAN)
    if ended >= 0 and began != 0:
        set_word(times, ended, word(times, ended) + now - began)
    set_word(control, STEP_BEGAN, now)


@jit
def names_nothing(kind: int, step: int, slots: int, control: int, scratch: int) -> bool:
    """True if an index of a step is out of range; the first one is stored in the control block."""
    if kind in (GATHER, SCATTER):
        return has_outside(kind, step, slots, control, scratch)
    if kind == EXPERTS:
        return names_no_expert(step, slots, control)
    return kind == ATTENTION and names_no_page(step, slots, control)


@jit_inline
def lead(code: int, slots: int, control: int, scratch: int, helped: bool) -> int:
    """Run all steps, set by set, and return the status.

    With `helped`, workers claim the tiles of shared steps. A resumed run is led as it was begun. A
    step's time, where times are noted, ends with the start of the next.
    """
    step = code + 8 * PROGRAM_HEADER_WORDS
    first, opened = step, 0
    reached, tile = word(control, REACHED_STEP), word(control, REACHED_TILE)
    set_word(control, REACHED_STEP, 0)
    set_word(control, REACHED_TILE, 0)
    for number in range(word(code, STEP_COUNT)):
        kind = word(step, KIND)
        if kind > LAST_KIND:
            atomic_store(control, FAILED_STEP, number)
            return INVALID
        begins = helped and word(step, TOGETHER) & 1 == 0
        if begins:
            end_set(first, step, control)
            first = step
        times = atomic_load(control, TIMES)
        if times != 0:
            note_time(control, times, number - 1)
        # Steps with indices are sets by themselves, so no worker has started them yet.
        is_new = number >= reached
        if is_new and names_nothing(kind, step, slots, control, scratch):
            atomic_store(control, FAILED_STEP, number)
            return OUTSIDE
        if begins and word(step, TOGETHER) >> 1 > opened:
            opened = word(step, TOGETHER) >> 1
            atomic_store(control, PROGRESS, opened)
        if helped and word(step, COUNTER) >= 0:
            claim_tiles(step, slots, control, scratch)
        elif is_new:
            tile = run_alone(step, tile if number == reached else 0, slots, control, scratch)
        if atomic_load(control, ABORT) != 0:
            atomic_store(control, FAILED_STEP, number)
            return ABORTED
        if is_new and atomic_load(control, PAUSE) != 0:
            set_word(control, REACHED_STEP, number)
            set_word(control, REACHED_TILE, tile)
            return PAUSED
        step += 8 * word(step, STEP_WORDS)
    if helped:
        end_set(first, step, control)
        # Tiles that helpers claimed after an abort were not run.
        if atomic_load(control, ABORT) != 0:
            atomic_store(control, FAILED_STEP, word(code, STEP_COUNT) - 1)
            return ABORTED
    times = atomic_load(control, TIMES)
    if times != 0:
        steps = word(code, STEP_COUNT)
        note_time(control, times, steps - 1)
        set_word(times, steps, word(times, steps) + 1)
    return OK


@jit_inline
def help_along(code: int, slots: int, control: int, scratch: int) -> None:
    """Take part in the shared steps as they open."""
    set_word(scratch + ENTRIES_AT, 0, word(control, ENTRIES))
    set_word(scratch + CONTROL_AT, 0, control)
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


@jit
def post(code: int, slots: int, control: int, helpers: int) -> None:
    """Send a program to its helpers."""
    for helper in range(helpers):
        mail = word(word(control, MAILS), helper)
        set_word(mail, MAIL_CODE, code)
        set_word(mail, MAIL_SLOTS, slots)
        set_word(mail, MAIL_CONTROL, control)
        set_word(mail, MAIL_SCRATCH, word(word(control, SCRATCHES), helper))
        set_word(mail, MAIL_BEFORE, atomic_exchange(mail, MAIL_STATE, POSTED))


@jit
def take_back(control: int, helpers: int) -> None:
    """Take a program back from its helpers, and wait for those that run it."""
    for helper in range(helpers):
        mail = word(word(control, MAILS), helper)
        if not atomic_replace(mail, MAIL_STATE, POSTED, word(mail, MAIL_BEFORE)):
            spins = 0
            while atomic_load(mail, MAIL_STATE) == TAKEN:
                spins += 1
                if spins < SPINS_BEFORE_YIELD:
                    pause()
                else:
                    yield_core()


@Entry
def run_program(code: int, slots: int, control: int, scratch: int, helpers: int, helped: int) -> int:
    """Lead a run of an encoded program with `helpers` helpers and return its status; the first
    arguments are addresses. `helped`: see `lead`.
    """
    set_word(control, WORKERS, helpers + 1)
    set_word(scratch + ENTRIES_AT, 0, word(control, ENTRIES))
    set_word(scratch + CONTROL_AT, 0, control)
    post(code, slots, control, helpers)
    status = lead(code, slots, control, scratch, helped != 0)
    atomic_store(control, STATUS, status)
    atomic_store(control, PROGRESS, FINISHED)
    take_back(control, helpers)
    return status


@Entry
def serve(mail: int) -> None:
    """Help with programs posted to a mail; park the helper after a while without one."""
    looks = 0
    while True:
        if processor() != word(mail, MAIL_PROCESSOR):
            set_word(mail, MAIL_PROCESSOR, processor())
        state = atomic_load(mail, MAIL_STATE)
        if state == POSTED and atomic_replace(mail, MAIL_STATE, POSTED, TAKEN):
            control = word(mail, MAIL_CONTROL)
            help_along(word(mail, MAIL_CODE), word(mail, MAIL_SLOTS), control, word(mail, MAIL_SCRATCH))
            atomic_store(mail, MAIL_STATE, WAITING)
            looks = 0
        elif state == PARKED:
            atomic_replace(mail, MAIL_STATE, PARKED, WAITING)
        elif looks >= LOOKS and atomic_replace(mail, MAIL_STATE, WAITING, PARKED):
            return
        looks += 1
        if looks < SPINS_BEFORE_GIVING_WAY:
            pause()
        else:
            yield_core()


@Entry
def open_program(control: int, shared_steps: int, helpers: int) -> int:
    """Prepare a program for helpers; return the number of them that are parked or on the leader's
    processor.

    No helper may run the program now. Posting it publishes all writes before that.
    """
    for index in range(COUNTERS, COUNTERS + shared_steps * COUNTER_WORDS):
        set_word(control, index, 0)
    set_word(control, PROGRESS, 0)
    here, found = processor(), 0
    set_word(control, PROCESSOR, here)
    for helper in range(helpers):
        mail = word(word(control, MAILS), helper)
        if atomic_load(mail, MAIL_STATE) == PARKED or (here >= 0 and word(mail, MAIL_PROCESSOR) == here):
            found += 1
    return found


@Entry
def pack_columns(matrix: int, depth: int, panels: int, scratch: int) -> None:
    """Pack columns in place, see `packing.pack_columns_in_place`."""
    pack_columns_in_place(matrix, depth, panels, scratch)


@Entry
def transpose_rows(matrix: int, rows: int, columns: int, visited: int, spare: int) -> None:
    """Transpose panels' rows in place, see `packing.transpose_rows_in_place`."""
    transpose_rows_in_place(matrix, rows, columns, visited, spare)
