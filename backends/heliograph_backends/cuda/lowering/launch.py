"""Kernels' parameters for operands whose memory is bound later. Pure.

The address of a slot is known when it is bound; until then a `Patch` records which slot and offset
belong in which word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from heliograph_backends.cuda.driver.parameters import MOST_DIMENSIONS, TYPES, Parameters, empty
from heliograph_proto.types import TensorType

Strides = tuple[int, ...]


class Located(NamedTuple):
    """A value in memory: its type, and its slot, offset and strides in bytes."""

    type: TensorType
    slot: int
    offset: int
    strides: Strides


class Patch(NamedTuple):
    """A word of 8 bytes of the parameters that holds a slot's address plus an offset."""

    word: int
    slot: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One run of a kernel."""

    #: A name of `sources`, or a kernel that the driver built.
    kernel: Any
    grid: tuple[int, int, int]
    threads: int
    parameters: Parameters
    patches: tuple[Patch, ...]
    shared_bytes: int = 0
    #: The source of a generated kernel; empty for a kernel of `sources`.
    source: str = ""
    #: The alignment that slots' addresses need, and the launch that runs if they lack it.
    alignment: int = 1
    instead: Launch | None = None


class Filling:
    """Parameters under construction."""

    def __init__(self, type: np.dtype[np.void]) -> None:
        self.parameters = empty(type)
        self._patches: list[Patch] = []

    def set(self, **values: Any) -> None:
        """Set fields by name."""
        for name, value in values.items():
            self.parameters[name][0] = value

    def walk(self, sizes: Sequence[int], name: str = "walk") -> None:
        """Set the dimensions that operands have strides over."""
        walk = self.parameters[name][0]
        walk["dimensions"] = len(sizes)
        walk["sizes"] = 1
        walk["sizes"][: len(sizes)] = sizes

    def divisors(self, sizes: Sequence[int], name: str = "divisors") -> None:
        """Set sizes that indices are divided by, each from 1 to 2^31 - 1."""
        for place, size in enumerate(sizes):
            self.parameters[name][0][place] = divisor(size)

    def operand(
        self, name: str, value: Located, strides: Strides = (), *, kind: int = 0, place: int | None = None
    ) -> None:
        """Set an operand, in a field or an array's element; its type's number is 0 if it has
        none."""
        found = self.parameters[name][0] if place is None else self.parameters[name][0][place]
        found["strides"][: len(strides)] = strides
        found["type"], found["kind"] = TYPES.get(value.type.dtype.name, 0), kind
        self._patch(self._word(name, place, "address"), value)

    def address(self, name: str, value: Located, place: int | None = None, inner: str = "") -> None:
        """Set a field that is an address, or an array's element; `inner` is a field of that."""
        self._patch(self._word(name, place, inner), value)

    def _patch(self, word: int, value: Located) -> None:
        self._patches.append(Patch(word, value.slot, value.offset))

    def _word(self, name: str, place: int | None = None, inner: str = "") -> int:
        fields = self.parameters.dtype.fields
        assert fields is not None
        type, offset = fields[name][:2]
        if place is not None:
            assert type.subdtype is not None
            type = type.subdtype[0]
            offset += place * type.itemsize
        if inner:
            assert type.fields is not None
            offset += type.fields[inner][1]
        return offset // 8

    def launch(self, kernel: str, grid: tuple[int, int, int], threads: int, shared_bytes: int = 0) -> Launch:
        """Return the launch after all fields are set."""
        return Launch(kernel, grid, threads, self.parameters, tuple(self._patches), shared_bytes)


def divisor(size: int) -> tuple[int, int, int, int]:
    """Return the fields of a divisor: see `Divisor` of `common.cuh`."""
    shift = 31 + (size - 1).bit_length()
    return size, -(-(2**shift) // size), shift, 0


def aligned(shape: Sequence[int], strides: Strides, sizes: Sequence[int]) -> Strides:
    """Return the strides over `sizes`, to which the shape broadcasts: 0 where it repeats."""
    missing = len(sizes) - len(shape)
    own = (0 if size == 1 else step for size, step in zip(shape, strides, strict=True))
    return (0,) * missing + tuple(own)


def collapsed(sizes: Sequence[int], operands: Sequence[Sequence[int]]) -> tuple[Strides, tuple[Strides, ...]]:
    """Merge dimensions that all operands walk through without a gap."""
    kept: list[int] = []
    steps: list[list[int]] = [[] for _ in operands]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        follows = bool(kept) and all(
            own[-1] == strides[axis] * size for own, strides in zip(steps, operands, strict=True)
        )
        if follows:
            kept[-1] *= size
        else:
            kept.append(size)
        for own, strides in zip(steps, operands, strict=True):
            if follows:
                own[-1] = strides[axis]
            else:
                own.append(strides[axis])
    return tuple(kept), tuple(map(tuple, steps))


def few(sizes: Sequence[int]) -> bool:
    """True if a walk has room for these dimensions as they are."""
    return len(sizes) <= MOST_DIMENSIONS


def fits(sizes: Sequence[int]) -> bool:
    """True if a walk has room for these dimensions when they are collapsed."""
    return sum(size != 1 for size in sizes) <= MOST_DIMENSIONS


def blocks_for(count: int, each: int, most: int = 2**20) -> int:
    """Return the number of blocks if each processes `each` of `count` items; beyond `most`, kernels
    loop."""
    return max(1, min(most, math.ceil(count / each)))
