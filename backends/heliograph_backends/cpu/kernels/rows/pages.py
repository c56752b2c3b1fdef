"""Tables of pages, by which attention finds keys and values.

The numbers are data of a run. The leader checks all of them before any tile of a step runs, and
ends the run at one out of range. A number that is out of range when it is read again, because the
memory has changed, reads page 0.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.program.words import (
    COLUMN_STRIDE,
    FAILED_INDEX,
    OFFSET,
    PAGE_COUNT,
    PAGES,
    SLOT,
    TABLE_BYTES,
    TABLE_PAGES,
    TABLES,
)
from heliograph_backends.cpu.kernels.vector.atomics import load_i32, set_word, word
from heliograph_backends.cpu.kernels.vector.lanes import jit


@jit
def names_no_page(step: int, slots: int, control: int) -> bool:
    """True if a number of a page is out of range; the first one is stored in the control block."""
    operand = step + 8 * PAGES
    if word(operand, SLOT) < 0:
        return False
    table = word(slots, word(operand, SLOT)) + word(operand, OFFSET)
    for _ in range(word(step, TABLES)):
        for place in range(word(step, TABLE_PAGES)):
            page = load_i32(table + place * word(operand, COLUMN_STRIDE))
            if page < 0 or page >= word(step, PAGE_COUNT):
                set_word(control, FAILED_INDEX, page)
                return True
        table += word(step, TABLE_BYTES)
    return False


@jit
def page_at(step: int, table: int, place: int) -> int:
    """Return the number of a page in a table; without one, all keys are page 0."""
    if table == 0:
        return 0
    page = load_i32(table + place * word(step + 8 * PAGES, COLUMN_STRIDE))
    return page if 0 <= page < word(step, PAGE_COUNT) else 0
