"""Chains: the epilogue of windows in one pass over the product.

An interpreter of elementwise programs reads and writes its chunk for each instruction, and spreads
a bias over a buffer. A chain has one value at a time, which stays in registers for all
instructions. The formulas are those of the interpreter, and so are the bits.

The most frequent chains have loops of their own, without a look at each link.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from heliograph_backends.cpu.kernels.elementwise.operations import FORMULAS
from heliograph_backends.cpu.kernels.matmul.stored_words import transposed
from heliograph_backends.cpu.kernels.program.words import (
    CHAIN_FORM,
    CHAIN_LEAST,
    CHAIN_LENGTH,
    CHAIN_LINKS,
    CHAIN_MOST,
    CHAIN_PRODUCT,
    CHAINED,
    COLUMN_STRIDE,
    LINK_CONSTANT,
    LINK_IMMEDIATES,
    LINK_OPERAND,
    LINK_OPERATION,
    LINK_SWAPPED,
    LINK_WORDS,
    ROW_STRIDE,
    SLOT,
    TABLE_AT,
    WORD_BYTES,
    ChainForm,
    Operation,
)
from heliograph_backends.cpu.kernels.vector.atomics import float_of_bits, set_word, word
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    I32,
    I64,
    LANES,
    Entry,
    Lanes,
    element,
    emitted,
    integer,
    jit,
    loop,
    pointer,
    subroutine,
    tail_mask,
)
from heliograph_backends.cpu.kernels.vector.space import operand_address

#: Vectors that are in registers together.
TOGETHER = 8
LINK_BYTES = WORD_BYTES * LINK_WORDS
ADDED, OTHER = int(ChainForm.ADDED), int(ChainForm.OTHER)
#: The instruction that comes last, by the form without an addend.
ACTIVATIONS = {
    ChainForm.RECTIFIED: Operation.RELU, ChainForm.BOUNDED: Operation.CLAMP,
    ChainForm.HARDSWISH: Operation.HARDSWISH, ChainForm.SILU: Operation.SILU,
}  # fmt: skip
PLAIN_FORMS = [int(form | added) for form in (ChainForm.BIASED, *ACTIVATIONS) for added in (0, ADDED)]
#: Vectors of a plain chain that are computed together.
UNROLL = 4


def _word(builder: Any, base: Any, index: int) -> Any:
    return builder.load(pointer(builder, builder.add(base, integer(WORD_BYTES * index)), I64))


def _immediates(builder: Any, link: Any) -> list[Lanes]:
    bits = _word(builder, link, LINK_IMMEDIATES)
    halves = [builder.trunc(builder.lshr(bits, integer(shift)), I32) for shift in (0, 32)]
    return [Lanes.broadcast(builder, builder.bitcast(half, F32)) for half in halves]


def _others(builder: Any, link: Any, place: Any, index: Any, masks: list[Any], cells: list[Any]) -> None:
    """Store the other sources of a link into cells: elements, or one number for all."""
    step = _word(builder, link, LINK_OPERAND + COLUMN_STRIDE)
    with builder.if_else(builder.icmp_signed("==", step, integer(0))) as (same, each):
        with same:
            lanes = Lanes.broadcast(builder, builder.load(pointer(builder, place, F32)))
            for cell in cells:
                builder.store(lanes.value, cell)
        with each:
            for number, (cell, mask) in enumerate(zip(cells, masks, strict=True)):
                here = element(builder, place, builder.add(index, integer(LANES * number)))
                builder.store(_load(builder, here, mask).value, cell)


def _load(builder: Any, place: Any, mask: Any) -> Lanes:
    return Lanes.load(builder, place) if mask is None else Lanes.load_masked(builder, place, mask)


def _group(builder: Any, target: Any, links: Any, table: Any, length: Any, index: Any, rest: Any) -> None:
    """Apply a chain to TOGETHER vectors, or to the first `rest` elements of them if that is
    given."""
    places, masks = [], []
    for number in range(TOGETHER):
        places.append(element(builder, target, builder.add(index, integer(LANES * number))))
        left = None if rest is None else builder.sub(rest, integer(LANES * number))
        masks.append(None if left is None else tail_mask(builder, left))
    values = [builder.alloca(F32_VECTOR) for _ in places]
    others = [builder.alloca(F32_VECTOR) for _ in places]
    for place, mask, cell in zip(places, masks, values, strict=True):
        builder.store(_load(builder, place, mask).value, cell)
    with loop(builder, integer(0), length, 1) as number:
        link = builder.add(links, builder.mul(number, integer(LINK_BYTES)))
        place = builder.load(pointer(builder, element(builder, table, number, I64), I64))
        _others(builder, link, place, index, masks, others)
        swapped = builder.icmp_signed("!=", _word(builder, link, LINK_SWAPPED), integer(0))
        p, q = _immediates(builder, link)
        done = builder.append_basic_block("link.done")
        switch = builder.switch(_word(builder, link, LINK_OPERATION), done)
        for operation in sorted(CHAINED):
            with builder.goto_block(builder.append_basic_block(operation.name.lower())):
                for cell, other in zip(values, others, strict=True):
                    mine, its = builder.load(cell), builder.load(other)
                    x = Lanes(builder, builder.select(swapped, its, mine))
                    y = Lanes(builder, builder.select(swapped, mine, its))
                    builder.store(FORMULAS[operation](x, y, p, q).value, cell)
                switch.add_case(integer(operation), builder.block)
                builder.branch(done)
        builder.position_at_end(done)
    for place, mask, cell in zip(places, masks, values, strict=True):
        found = Lanes(builder, builder.load(cell))
        if mask is None:
            found.store(place)
        else:
            found.store_masked(place, mask)


def _whole_groups(builder: Any, target: Any, links: Any, table: Any, length: Any, count: Any) -> None:
    with loop(builder, integer(0), count, LANES * TOGETHER) as index:
        _group(builder, target, links, table, length, index, None)


def _rest(builder: Any, target: Any, links: Any, table: Any, length: Any, index: Any, rest: Any) -> None:
    _group(builder, target, links, table, length, index, rest)


@emitted(types.void, *[types.int64] * 5)
def chain_row(builder: Any, target: Any, links: Any, table: Any, length: Any, count: Any) -> None:
    """Apply a chain to `count` elements; the table has the address of each link's other source."""
    whole = builder.and_(count, integer(-LANES * TOGETHER))
    function = subroutine(builder, "chain_groups", (I64,) * 5, _whole_groups)
    builder.call(function, [target, links, table, length, whole])
    with builder.if_then(builder.icmp_signed("<", whole, count)):
        function = subroutine(builder, "chain_rest", (I64,) * 6, _rest)
        builder.call(function, [target, links, table, length, whole, builder.sub(count, whole)])


def _added(x: Lanes, other: Lanes) -> Lanes:
    nothing = Lanes.constant(x.builder, 0.0)
    return FORMULAS[Operation.ADD](x, other, nothing, nothing)


def _activated(form: int, x: Lanes, bounds: list[Lanes]) -> Lanes:
    """Return what the last instruction of a form makes, if it has one."""
    operation = ACTIVATIONS.get(ChainForm(form & ~ChainForm.ADDED))
    return x if operation is None else FORMULAS[operation](x, x, *bounds)


def _plain(form: int) -> Any:
    """Return the body of a function that applies a chain of this form to a row."""

    def body(builder: Any, target: Any, bias: Any, more: Any, least: Any, most: Any, count: Any) -> None:
        own = Lanes.broadcast(builder, builder.load(pointer(builder, bias, F32)))
        bounds = [Lanes.broadcast(builder, one) for one in (least, most)]

        def value(x: Lanes, other: Lanes) -> Lanes:
            x = _added(x, own)
            return _activated(form, _added(x, other) if form & ADDED else x, bounds)

        whole = builder.and_(count, integer(-LANES * UNROLL))
        with loop(builder, integer(0), whole, LANES * UNROLL) as index:
            places = [builder.add(index, integer(LANES * part)) for part in range(UNROLL)]
            pairs = [
                [Lanes.load(builder, element(builder, base, place)) for base in (target, more)]
                for place in places
            ]
            for place, (x, other) in zip(places, pairs, strict=True):
                value(x, other).store(element(builder, target, place))
        with loop(builder, whole, count, LANES) as index:
            mask = tail_mask(builder, builder.sub(count, index))
            x, other = (
                Lanes.load_masked(builder, element(builder, base, index), mask) for base in (target, more)
            )
            value(x, other).store_masked(element(builder, target, index), mask)

    return body


def _turned(form: int) -> Any:
    """Return the body of a function that writes the lanes of vectors as rows, with a chain of this
    form applied."""

    def body(
        builder: Any, target: Any, target_row: Any, source: Any, bias: Any, more: Any, more_row: Any,
        least: Any, most: Any, count: Any,
    ) -> None:  # fmt: skip
        own = Lanes.load(builder, bias)
        bounds = [Lanes.broadcast(builder, one) for one in (least, most)]
        with loop(builder, integer(0), count, LANES) as index:
            mask = tail_mask(builder, builder.sub(count, index))
            here = builder.add(source, builder.mul(index, integer(4 * LANES)))
            places = [builder.add(here, integer(4 * LANES * number)) for number in range(LANES)]
            vectors = [_added(Lanes.load(builder, place), own) for place in places]
            if not form & ADDED:
                vectors = [_activated(form, x, bounds) for x in vectors]
            there, other = element(builder, target, index), element(builder, more, index)
            for bits in transposed(builder, [x.bits() for x in vectors]):
                x = Lanes.from_bits(builder, bits)
                if form & ADDED:
                    x = _activated(form, _added(x, Lanes.load_masked(builder, other, mask)), bounds)
                    other = builder.add(other, more_row)
                x.store_masked(there, mask)
                there = builder.add(there, target_row)

    return body


def _by_form(
    builder: Any, form: Any, name: str, made: Callable[[int], Any], kinds: tuple[Any, ...], given: list[Any]
) -> None:
    """Call the function of a form."""
    done = builder.append_basic_block(f"{name}.done")
    switch = builder.switch(form, done)
    for number in PLAIN_FORMS:
        with builder.goto_block(builder.append_basic_block(f"{name}.{number}")):
            builder.call(subroutine(builder, f"{name}_{number}", kinds, made(number)), given)
            switch.add_case(integer(number), builder.block)
            builder.branch(done)
    builder.position_at_end(done)


@emitted(types.void, *[types.int64] * 4, types.float32, types.float32, types.int64)
def plain_row(
    builder: Any, form: Any, target: Any, bias: Any, more: Any, least: Any, most: Any, count: Any
) -> None:
    """Apply a chain of a form with a loop of its own to `count` elements."""
    kinds = (I64, I64, I64, F32, F32, I64)
    _by_form(builder, form, "plain_row", _plain, kinds, [target, bias, more, least, most, count])


@emitted(types.void, *[types.int64] * 7, types.float32, types.float32, types.int64)
def turned_lanes(
    builder: Any, form: Any, target: Any, target_row: Any, source: Any, bias: Any, more: Any, more_row: Any,
    least: Any, most: Any, count: Any,
) -> None:  # fmt: skip
    """Write the lanes of `count` vectors as sixteen rows, with a chain of a form applied.

    Whole groups of sixteen vectors are read.
    """
    kinds = (*(I64,) * 6, F32, F32, I64)
    given = [target, target_row, source, bias, more, more_row, least, most, count]
    _by_form(builder, form, "turned_lanes", _turned, kinds, given)


@jit
def is_by_lanes(body: int) -> bool:
    """True for a chain that `write_lanes` applies: the numbers of rows lie side by side."""
    form, step = word(body, CHAIN_FORM), word(body, CHAIN_LINKS + LINK_OPERAND + ROW_STRIDE)
    found: bool = form != OTHER and step == 4
    return found


@jit
def write_lanes(
    body: int, target: int, target_row: int, vectors: int, slots: int, scratch: int, row: int, column: int,
    places: int,
) -> None:  # fmt: skip
    """Write the lanes of vectors as rows from `row` on, at places from `column` on, with a chain
    applied."""
    form = word(body, CHAIN_FORM)
    least, most = float_of_bits(word(body, CHAIN_LEAST)), float_of_bits(word(body, CHAIN_MOST))
    bias = operand_address(body + 8 * (CHAIN_LINKS + LINK_OPERAND), slots, scratch, row, 0)
    more, more_row = target, target_row
    if form & ADDED:
        operand = body + 8 * (CHAIN_LINKS + LINK_WORDS + LINK_OPERAND)
        more, more_row = operand_address(operand, slots, scratch, row, column), word(operand, ROW_STRIDE)
    turned_lanes(form, target, target_row, vectors, bias, more, more_row, least, most, places)


@jit
def place_others(
    links: int, length: int, table: int, slots: int, scratch: int, row: int, column: int
) -> None:
    """Write the addresses of the links' other sources into the table."""
    for number in range(length):
        link = links + number * LINK_BYTES
        if word(link, LINK_OPERAND + SLOT) < 0:
            set_word(table, number, link + 8 * LINK_CONSTANT)
        else:
            place = operand_address(link + 8 * LINK_OPERAND, slots, scratch, row, column)
            set_word(table, number, place)


@Entry
def finish_rows(body: int, slots: int, scratch: int, row: int, rows: int, column: int, columns: int) -> None:
    """Apply a chain to rows by columns at the block's outer indices."""
    length, links, table = word(body, CHAIN_LENGTH), body + 8 * CHAIN_LINKS, scratch + TABLE_AT
    target = operand_address(body + 8 * CHAIN_PRODUCT, slots, scratch, row, column)
    place_others(links, length, table, slots, scratch, row, column)
    form = word(body, CHAIN_FORM)
    least, most = float_of_bits(word(body, CHAIN_LEAST)), float_of_bits(word(body, CHAIN_MOST))
    for _ in range(rows):
        if form == OTHER:
            chain_row(target, links, table, length, columns)
        else:
            # Without an addend, any elements are read there.
            more = word(table, 1) if form & ADDED else target
            plain_row(form, target, word(table, 0), more, least, most, columns)
        target += word(body + 8 * CHAIN_PRODUCT, ROW_STRIDE)
        for number in range(length):
            step = word(links + number * LINK_BYTES, LINK_OPERAND + ROW_STRIDE)
            set_word(table, number, word(table, number) + step)
