"""Sorts, searches, and running sums along rows.

Elements become *keys*: int32 that compare as the elements do, where all NaN are one number above
the others and both zeros are one. A key with the place of its element is one word, so words are
distinct and their order is that of a stable sort. If the largest element is the first, keys have
all bits reversed.

The first k places of a row come from one pass that holds a few times k words. When these are
there, the k smallest remain, and the largest of them is the limit below which further keys count.
All places of long rows are sorted by digits of eleven bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.elementwise.interpreter import KINDS
from heliograph_backends.cpu.kernels.program.words import (
    BUFFERS_AT,
    COLUMN_STRIDE,
    DOUBLES,
    INTEGERS,
    KEYS_AT_ONCE,
    PACK_AT,
    ROUNDING,
    ROW_STRIDE,
    RUNNING,
    RUNNING_AS,
    RUNNING_PRODUCT,
    RUNNING_TO,
    SORT_FALLING,
    SORT_KEPT,
    SORT_ROOM,
    SORTED,
    SORTED_AS,
    SORTED_TO,
    STAGED_AT,
    WIDE_INTEGERS,
    WIDENING,
    Kind,
)
from heliograph_backends.cpu.kernels.rows.row import each_vector, load, tree
from heliograph_backends.cpu.kernels.vector.atomics import (
    float_of_bits,
    load_bits,
    load_double,
    load_f32,
    load_i32,
    set_word,
    store_double,
    store_f32,
    word,
)
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    MASK,
    Entry,
    Lanes,
    element,
    emitted,
    integer,
    intrinsic_function,
    jit,
    local,
    loop,
    pointer,
    splat,
    subroutine,
    tail_mask,
)
from heliograph_backends.cpu.kernels.vector.space import convert_rows, copy_scattered, locate, operand_address

SORT = int(Kind.SORT)
#: The largest key.
LARGEST = 0x7FFFFFFF
#: More than any key.
ABOVE_ALL = 1 << 40
#: Ranges of fewer words are sorted by insertion; rows of at most so many by rank, of more by digits.
FEW, SOME, MANY = 16, 256, 1024
OCTET = 8
#: Vectors of which the largest elements are kept apart.
AT_ONCE = 4
#: Elements of a row whose largest one is found at once.
LARGE_CHUNK = 16 * 1024
DIGIT_BITS, DIGITS = 11, 3
BUCKETS = 1 << DIGIT_BITS
NEGATIVE_ZERO, ONE = np.float32(-0.0), np.float32(1)
NEGATIVE_ZERO_WIDE, ONE_WIDE = np.float64(-0.0), np.float64(1)


# Keys


def _write_keys(builder: Any, target: Any, source: Any, count: Any, plain: Any, flip: Any) -> None:
    reversed_bits = splat(builder, builder.trunc(flip, I32), I32_VECTOR)
    largest = ir.Constant(I32_VECTOR, [LARGEST] * LANES)
    is_plain = builder.icmp_signed("!=", plain, integer(0))

    def act(index: Any, mask: Any, _part: int) -> None:
        loaded = load(builder, source, index, mask)
        # The sum with zero turns -0 into 0.
        bits = (loaded + 0.0).bits()
        sign = builder.ashr(bits, ir.Constant(I32_VECTOR, [31] * LANES))
        key = builder.xor(bits, builder.and_(sign, largest))
        is_nan = builder.fcmp_unordered("uno", loaded.value, loaded.value)
        key = builder.select(is_nan, largest, key)
        key = builder.xor(builder.select(is_plain, loaded.bits(), key), reversed_bits)
        lanes, place = Lanes.from_bits(builder, key), element(builder, target, index)
        if mask is None:
            lanes.store(place)
        else:
            lanes.store_masked(place, mask)

    each_vector(builder, count, act)
    behind = pointer(builder, element(builder, target, count), I32_VECTOR)
    builder.store(largest, behind, align=4)


@emitted(types.void, *[types.int64] * 5)
def write_keys(builder: Any, target: Any, source: Any, count: Any, plain: Any, flip: Any) -> None:
    """Write the keys of float32, or with `plain` of int32, and sixteen of the largest behind them;
    `flip`: -1 to reverse their bits, else 0."""
    builder.call(
        subroutine(builder, "write_keys", (I64,) * 5, _write_keys), [target, source, count, plain, flip]
    )


@emitted(types.int64, types.int64, types.int64)
def keys_below(builder: Any, keys: Any, limit: Any) -> Any:
    """Return a bit for each of sixteen keys that is below the limit."""
    found = builder.load(pointer(builder, keys, I32_VECTOR), align=4)
    most = splat(builder, builder.trunc(limit, I32), I32_VECTOR)
    below = builder.icmp_signed("<", found, most)
    return builder.zext(builder.bitcast(below, ir.IntType(LANES)), I64)


@emitted(types.int64, types.int64, types.int64)
def smallest_key(builder: Any, keys: Any, count: Any) -> Any:
    """Return the smallest of keys with sixteen of the largest behind them."""
    cell = local(builder, I32_VECTOR)
    builder.store(ir.Constant(I32_VECTOR, [LARGEST] * LANES), cell)
    with loop(builder, integer(0), count, LANES) as index:
        found = builder.load(pointer(builder, element(builder, keys, index), I32_VECTOR), align=4)
        old = builder.load(cell)
        builder.store(builder.select(builder.icmp_signed("<", found, old), found, old), cell)
    function = intrinsic_function(builder, "llvm.vector.reduce.smin.v16i32", I32, I32_VECTOR)
    return builder.sext(builder.call(function, [builder.load(cell)]), I64)


def _largest(builder: Any, source: Any, count: Any) -> Any:
    lowest = Lanes.constant(builder, float("-inf")).value
    cells = [local(builder, F32_VECTOR) for _ in range(AT_ONCE)]
    strange = local(builder, MASK)
    builder.store(ir.Constant(MASK, [0] * LANES), strange)
    for cell in cells:
        builder.store(lowest, cell)

    def act(lanes: Lanes, cell: Any) -> Any:
        old = builder.load(cell)
        larger = builder.fcmp_ordered(">", lanes.value, old)
        builder.store(builder.select(larger, lanes.value, old), cell)
        return lanes.value

    whole = builder.and_(count, integer(-LANES * AT_ONCE))
    with loop(builder, integer(0), whole, LANES * AT_ONCE) as index:
        some = [
            act(load(builder, source, builder.add(index, integer(LANES * number)), None), cell)
            for number, cell in enumerate(cells)
        ]
        # A comparison without order is true for a NaN on either side.
        for one, other in zip(some[::2], some[1::2], strict=True):
            found = builder.or_(builder.load(strange), builder.fcmp_unordered("uno", one, other))
            builder.store(found, strange)
    with loop(builder, whole, count, LANES) as index:
        mask = tail_mask(builder, builder.sub(count, index))
        value = act(load(builder, source, index, mask, float("-inf")), cells[0])
        found = builder.or_(builder.load(strange), builder.fcmp_unordered("uno", value, value))
        builder.store(found, strange)

    def larger(first: Any, second: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", first, second), first, second)

    one, two, three, four = (builder.load(cell) for cell in cells)
    most = tree(builder, larger(larger(one, two), larger(three, four)), larger)
    bits = builder.bitcast(builder.load(strange), ir.IntType(LANES))
    is_strange = builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))
    return builder.select(is_strange, ir.Constant(F32, float("nan")), most)


@emitted(types.float32, types.int64, types.int64)
def largest_of(builder: Any, source: Any, count: Any) -> Any:
    """Return the largest of contiguous float32, or NaN if there is one."""
    function = subroutine(builder, "largest_of", (I64, I64), _largest, F32)
    return builder.call(function, [source, count])


@emitted(types.void, types.int64, types.int64)
def store_i32(builder: Any, address: Any, value: Any) -> None:
    """Store the low half of a word at an address."""
    builder.store(builder.trunc(value, I32), pointer(builder, address, I32), align=4)


@jit
def stage_keys(form: int, falling: int, keys: int, source: int, step: int, count: int, scratch: int) -> None:
    """Write the keys of some elements of a row, which are `step` bytes apart."""
    if form > INTEGERS:
        convert_rows(scratch, form >> WIDENING & KINDS, keys, source, 0, step, 1, count)
        source = keys
    elif step != 4:
        copy_scattered(keys, 4, source, step, count)
        source = keys
    write_keys(keys, source, count, 1 if form == INTEGERS else 0, -falling)


# The order of words


@jit
def sort_few(words: int, first: int, last: int) -> None:
    """Sort a range of words by insertion."""
    for place in range(first + 1, last + 1):
        moved, hole = word(words, place), place
        while hole > first and word(words, hole - 1) > moved:
            set_word(words, hole, word(words, hole - 1))
            hole -= 1
        set_word(words, hole, moved)


@jit
def pivot_of(words: int, first: int, last: int, any_number: int) -> int:
    """Return the middle one of three words of a range."""
    a, c = word(words, first), word(words, last)
    b = word(words, first + (any_number >> 33 & 0x3FFFFFFF) % (last - first + 1))
    middle: int = max(min(a, b), min(max(a, b), c))
    return middle


@emitted(types.int64, types.int64, types.int64, types.int64)
def count_below(builder: Any, words: Any, count: Any, limit: Any) -> Any:
    """Return the number of words below a limit; `count` is a multiple of eight."""
    kind = ir.VectorType(I64, OCTET)
    cell, most = local(builder, kind), splat(builder, limit, kind)
    builder.store(ir.Constant(kind, [0] * OCTET), cell)
    with loop(builder, integer(0), count, OCTET) as index:
        found = builder.load(pointer(builder, element(builder, words, index, I64), kind), align=8)
        below = builder.zext(builder.icmp_signed("<", found, most), kind)
        builder.store(builder.add(builder.load(cell), below), cell)
    function = intrinsic_function(builder, "llvm.vector.reduce.add.v8i64", I64, kind)
    return builder.call(function, [builder.load(cell)])


@jit
def sort_by_rank(words: int, other: int, count: int) -> None:
    """Write words to another area in order: each at the number of those below it. There is room for
    seven more behind the words."""
    whole = (count + OCTET - 1) // OCTET * OCTET
    for place in range(count, whole):
        set_word(words, place, LARGEST << 32 | 0xFFFFFFFF)
    for place in range(count):
        value = word(words, place)
        set_word(other, count_below(words, whole, value), value)


@jit
def sort_smallest(words: int, count: int, needed: int, kept: int, stack: int) -> None:
    """Sort so that the words from `needed` to `kept` are where they are in order, with smaller ones
    before them."""
    first, last, depth, number = 0, count - 1, 0, 1
    while True:
        while last - first >= FEW:
            number = number * 6364136223846793005 + 1442695040888963407
            pivot = pivot_of(words, first, last, number)
            left, right = first, last
            while left <= right:
                while word(words, left) < pivot:
                    left += 1
                while word(words, right) > pivot:
                    right -= 1
                if left <= right:
                    other = word(words, left)
                    set_word(words, left, word(words, right))
                    set_word(words, right, other)
                    left += 1
                    right -= 1
            if left < kept and left < last and last >= needed:
                set_word(stack, 2 * depth, left)
                set_word(stack, 2 * depth + 1, last)
                depth += 1
            last = right if right >= needed else first - 1
        sort_few(words, first, last)
        if depth == 0:
            return
        depth -= 1
        first, last = word(stack, 2 * depth), word(stack, 2 * depth + 1)


@jit
def digit_of(value: int, turn: int) -> int:
    """Return a digit of a word's key, the lowest one first."""
    return ((value >> 32) + (1 << 31)) >> DIGIT_BITS * turn & BUCKETS - 1


@jit
def sort_digits(words: int, other: int, count: int, table: int) -> int:
    """Sort words by their keys, in two areas, and return the area with the result."""
    for place in range(DIGITS * BUCKETS):
        set_word(table, place, 0)
    for place in range(count):
        value = word(words, place)
        for turn in range(DIGITS):
            at = turn * BUCKETS + digit_of(value, turn)
            set_word(table, at, word(table, at) + 1)
    for turn in range(DIGITS):
        own = table + 8 * turn * BUCKETS
        if word(own, digit_of(word(words, 0), turn)) == count:
            continue
        total = 0
        for digit in range(BUCKETS):
            total, here = total + word(own, digit), total
            set_word(own, digit, here)
        for place in range(count):
            value = word(words, place)
            digit = digit_of(value, turn)
            there = word(own, digit)
            set_word(other, there, value)
            set_word(own, digit, there + 1)
        words, other = other, words
    return words


# Rows


@jit
def is_direct(form: int, falling: int, apart: int) -> bool:
    """True for a row of contiguous float32 whose largest elements come first."""
    return form == 0 and falling == 1 and apart == 4


@jit
def first_chunk(source: int, columns: int, size: int) -> int:
    """Return the start of the chunk, of `size` elements, with the first largest one of a row, see
    `is_direct`."""
    best, begin = largest_of(source, min(size, columns)), 0
    for start in range(size, columns, size):
        found = largest_of(source + 4 * start, min(size, columns - start))
        if best == best and not found <= best:
            best, begin = found, start
    return begin


@jit
def first_place(form: int, falling: int, source: int, apart: int, columns: int, scratch: int) -> int:
    """Return the place of the first element of a row in the order."""
    keys, best, begin = scratch + BUFFERS_AT, ABOVE_ALL, 0
    if is_direct(form, falling, apart):
        begin = first_chunk(source, columns, LARGE_CHUNK)
        some = min(LARGE_CHUNK, columns - begin)
        begin += first_chunk(source + 4 * begin, some, KEYS_AT_ONCE)
    else:
        for start in range(0, columns, KEYS_AT_ONCE):
            count = min(KEYS_AT_ONCE, columns - start)
            stage_keys(form, falling, keys, source + apart * start, apart, count, scratch)
            found = smallest_key(keys, count)
            if found < best:
                best, begin = found, start
    count = min(KEYS_AT_ONCE, columns - begin)
    stage_keys(form, falling, keys, source + apart * begin, apart, count, scratch)
    best, place = smallest_key(keys, count), 0
    while place < count - 1 and load_i32(keys + 4 * place) != best:
        place += 1
    return begin + place


@jit
def number_of(key: int) -> Any:
    """Return the float32 of a key whose bits are reversed; NaN becomes any NaN."""
    plain = -1 - key
    return float_of_bits(plain ^ (plain >> 31 & LARGEST))


@jit
def hold(words: int, held: int, keys: int, first: int, behind: int, start: int) -> int:
    """Append the words of some keys, and return the number that are held."""
    for place in range(first, behind):
        set_word(words, held, load_i32(keys + 4 * place) << 32 | start + place)
        held += 1
    return held


@jit
def first_places(
    form: int, falling: int, source: int, apart: int, columns: int, kept: int, room: int, scratch: int
) -> None:
    """Write the words of the first `kept` elements of a row to the packing area, in order."""
    keys, words, stack = scratch + BUFFERS_AT, scratch + PACK_AT, scratch + STAGED_AT
    held, limit, is_full, direct = 0, 0, False, is_direct(form, falling, apart)
    for start in range(0, columns, KEYS_AT_ONCE):
        count, place = min(KEYS_AT_ONCE, columns - start), 0
        if is_full and direct and largest_of(source + 4 * start, count) <= number_of(limit):
            continue
        stage_keys(form, falling, keys, source + apart * start, apart, count, scratch)
        if not is_full:
            place = min(count, room - held)
            held = hold(words, held, keys, 0, place, start)
        while place < count or (held == room and not is_full):
            behind = place
            if is_full:
                behind = min(place + LANES, count)
                if keys_below(keys + 4 * place, limit) == 0:
                    place = behind
                    continue
            while place < behind and held < room:
                if load_i32(keys + 4 * place) < limit:
                    held = hold(words, held, keys, place, place + 1, start)
                place += 1
            if held == room:
                sort_smallest(words, held, kept - 1, kept, stack)
                held, limit, is_full = kept, word(words, kept - 1) >> 32, True
    sort_smallest(words, held, 0, kept, stack)


@jit
def all_places(form: int, falling: int, source: int, apart: int, columns: int, scratch: int) -> int:
    """Sort the words of a row in the packing area, and return the address of the first."""
    keys, words, stack = scratch + BUFFERS_AT, scratch + PACK_AT, scratch + STAGED_AT
    held = 0
    for start in range(0, columns, KEYS_AT_ONCE):
        count = min(KEYS_AT_ONCE, columns - start)
        stage_keys(form, falling, keys, source + apart * start, apart, count, scratch)
        held = hold(words, held, keys, 0, count, start)
    if columns <= SOME:
        other = words + 8 * (columns + OCTET)
        sort_by_rank(words, other, columns)
        return other
    if columns <= MANY:
        sort_smallest(words, columns, 0, columns, stack)
        return words
    found: int = sort_digits(words, words + 8 * columns, columns, stack)
    return found


@jit
def sort_rows(step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a sort."""
    row, rows, _, columns = locate(step, block, scratch)
    source = operand_address(step + 8 * SORTED, slots, scratch, row, 0)
    target = operand_address(step + 8 * SORTED_TO, slots, scratch, row, 0)
    form, falling, kept = word(step, SORTED_AS), word(step, SORT_FALLING), word(step, SORT_KEPT)
    room, apart = word(step, SORT_ROOM), word(step + 8 * SORTED, COLUMN_STRIDE)
    for _ in range(rows):
        if kept == 0:
            store_i32(target, first_place(form, falling, source, apart, columns, scratch))
        else:
            words = scratch + PACK_AT
            if room > 0:
                first_places(form, falling, source, apart, columns, kept, room, scratch)
            else:
                words = all_places(form, falling, source, apart, columns, scratch)
            for place in range(kept):
                there = target + place * word(step + 8 * SORTED_TO, COLUMN_STRIDE)
                store_i32(there, word(words, place) & 0xFFFFFFFF)
        source += word(step + 8 * SORTED, ROW_STRIDE)
        target += word(step + 8 * SORTED_TO, ROW_STRIDE)


# Running sums and products


@jit
def run_floats(
    target: int, target_step: int, source: int, source_step: int, count: int, total: Any, product: int
) -> Any:
    """Write running numbers of float32 after `total`, and return the last one."""
    for _ in range(count):
        total = total * load_f32(source) if product else total + load_f32(source)
        store_f32(target, total)
        source += source_step
        target += target_step
    return total


@jit
def run_four_rows(step: int, target: int, source: int, count: int, product: int) -> None:
    """Write running numbers of four rows of float32, whose sums do not wait for each other."""
    source_row, source_step = (
        word(step + 8 * RUNNING, ROW_STRIDE),
        word(step + 8 * RUNNING, COLUMN_STRIDE),
    )
    target_row, target_step = (
        word(step + 8 * RUNNING_TO, ROW_STRIDE),
        word(step + 8 * RUNNING_TO, COLUMN_STRIDE),
    )
    a = b = c = d = ONE if product else NEGATIVE_ZERO
    for _ in range(count):
        w, x = load_f32(source), load_f32(source + source_row)
        y, z = load_f32(source + 2 * source_row), load_f32(source + 3 * source_row)
        if product:
            a, b, c, d = a * w, b * x, c * y, d * z
        else:
            a, b, c, d = a + w, b + x, c + y, d + z
        store_f32(target, a)
        store_f32(target + target_row, b)
        store_f32(target + 2 * target_row, c)
        store_f32(target + 3 * target_row, d)
        source += source_step
        target += target_step


@jit
def run_doubles(
    target: int, target_step: int, source: int, source_step: int, count: int, product: int
) -> None:
    """Write running numbers of float64."""
    total = ONE_WIDE if product else NEGATIVE_ZERO_WIDE
    for _ in range(count):
        total = total * load_double(source) if product else total + load_double(source)
        store_double(target, total)
        source += source_step
        target += target_step


@jit
def run_integers(
    form: int, target: int, target_step: int, source: int, source_step: int, count: int, product: int
) -> None:
    """Write running numbers of int32 or int64."""
    total = 1 if product else 0
    for _ in range(count):
        value = load_i32(source) if form == INTEGERS else load_bits(source)
        total = total * value if product else total + value
        if form == INTEGERS:
            store_i32(target, total)
        else:
            set_word(target, 0, total)
        source += source_step
        target += target_step


@jit
def run_narrow(
    form: int,
    target: int,
    target_step: int,
    source: int,
    source_step: int,
    columns: int,
    product: int,
    scratch: int,
) -> None:
    """Write running numbers of f16 or bf16, in float32, each rounded once."""
    buffer, total = scratch + BUFFERS_AT, ONE if product else NEGATIVE_ZERO
    for start in range(0, columns, KEYS_AT_ONCE):
        count = min(KEYS_AT_ONCE, columns - start)
        here, there = source + start * source_step, target + start * target_step
        convert_rows(scratch, form >> WIDENING & KINDS, buffer, here, 0, source_step, 1, count)
        total = run_floats(buffer, 4, buffer, 4, count, total, product)
        convert_rows(scratch, form >> ROUNDING & KINDS, buffer, there, 0, target_step, 1, count)


@jit
def run_rows(step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of running sums or products."""
    row, rows, _, columns = locate(step, block, scratch)
    source = operand_address(step + 8 * RUNNING, slots, scratch, row, 0)
    target = operand_address(step + 8 * RUNNING_TO, slots, scratch, row, 0)
    form, product = word(step, RUNNING_AS), word(step, RUNNING_PRODUCT)
    here, there = word(step + 8 * RUNNING, COLUMN_STRIDE), word(step + 8 * RUNNING_TO, COLUMN_STRIDE)
    while rows > 0:
        done = 4 if form == 0 and rows >= 4 else 1
        if done == 4:
            run_four_rows(step, target, source, columns, product)
        elif form == 0:
            run_floats(target, there, source, here, columns, ONE if product else NEGATIVE_ZERO, product)
        elif form == DOUBLES:
            run_doubles(target, there, source, here, columns, product)
        elif form <= WIDE_INTEGERS:
            run_integers(form, target, there, source, here, columns, product)
        else:
            run_narrow(form, target, there, source, here, columns, product, scratch)
        source += done * word(step + 8 * RUNNING, ROW_STRIDE)
        target += done * word(step + 8 * RUNNING_TO, ROW_STRIDE)
        rows -= done


@Entry
def searches_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a sort, a search, or running sums along rows."""
    if kind == SORT:
        sort_rows(step, block, slots, scratch)
    else:
        run_rows(step, block, slots, scratch)
