"""The sums of a product of few rows with stored weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir

from heliograph_backends.cpu.kernels.matmul.stored_words import VECTOR_BYTES
from heliograph_backends.cpu.kernels.program.stored_types import FEW_COLUMNS, FEW_ROWS
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    LANES,
    Lanes,
    integer,
    loop,
    pointer,
    tail_mask,
    workspace,
)

#: The most groups of sixteen columns.
GROUPS = FEW_COLUMNS // LANES


def runs_of(builder: Any, elements: Any) -> Any:
    """Return the number of runs of sixteen that have so many elements."""
    return builder.udiv(builder.add(elements, integer(LANES - 1)), integer(LANES))


class Sums:
    """The chains of some rows and groups of sixteen columns."""

    def __init__(self, builder: Any, rows: Any, c: Any, c_row: Any, columns: Any) -> None:
        self._builder, self._rows, self._c, self._c_row, self._columns = builder, rows, c, c_row, columns
        self._area = workspace(builder, VECTOR_BYTES * FEW_ROWS * GROUPS)
        self._groups = runs_of(builder, columns)

    def place(self, row: Any, group: Any) -> Any:
        """Return a pointer to a sum."""
        builder = self._builder
        index = builder.add(builder.mul(row, integer(GROUPS)), group)
        address = builder.add(self._area, builder.mul(index, integer(VECTOR_BYTES)))
        return pointer(builder, address, F32_VECTOR)

    def _each(self, act: Callable[[Any, Any, Any], None]) -> None:
        builder = self._builder
        with (
            loop(builder, integer(0), self._rows, 1) as row,
            loop(builder, integer(0), self._groups, 1) as group,
        ):
            column = builder.mul(group, integer(LANES))
            address = builder.add(self._c, builder.mul(row, self._c_row))
            address = builder.add(address, builder.mul(column, integer(4)))
            mask = tail_mask(builder, builder.sub(self._columns, column))
            act(self.place(row, group), address, mask)

    def open(self, first: Any) -> None:
        """Start with zeros, or with the product's elements."""
        builder = self._builder
        zeros = ir.Constant(F32_VECTOR, [0.0] * LANES)
        self._each(lambda cell, _address, _mask: builder.store(zeros, cell, align=VECTOR_BYTES))

        def load(cell: Any, address: Any, mask: Any) -> None:
            builder.store(Lanes.load_masked(builder, address, mask).value, cell, align=VECTOR_BYTES)

        with builder.if_then(builder.icmp_signed("==", first, integer(0))):
            self._each(load)

    def close(self) -> None:
        """Write the product."""
        builder = self._builder

        def store(cell: Any, address: Any, mask: Any) -> None:
            Lanes(builder, builder.load(cell, align=VECTOR_BYTES)).store_masked(address, mask)

        self._each(store)

    @property
    def groups(self) -> Any:
        """The number of groups of columns."""
        return self._groups

    def add(self, group: Any, weights: Callable[[], Iterable[Lanes]], a: Any, a_row: Any) -> None:
        """Add the products of consecutive weights with the elements at `a`, for each row.

        A single row uses the weights one by one as they are made; several rows share them.
        """
        builder = self._builder
        with builder.if_else(builder.icmp_signed("==", self._rows, integer(1))) as (one, several):
            with one:
                self._add_row(integer(0), group, weights(), a)
            with several:
                made = list(weights())
                with loop(builder, integer(0), self._rows, 1) as row:
                    self._add_row(row, group, made, builder.add(a, builder.mul(row, a_row)))

    def _add_row(self, row: Any, group: Any, weights: Iterable[Lanes], a: Any) -> None:
        builder = self._builder
        cell = self.place(row, group)
        total = Lanes(builder, builder.load(cell, align=VECTOR_BYTES))
        for place, lanes in enumerate(weights):
            address = builder.add(a, integer(4 * place))
            factor = Lanes.broadcast(builder, builder.load(pointer(builder, address, F32)))
            total = lanes.fma(factor, total)
        builder.store(total.value, cell, align=VECTOR_BYTES)
