"""Helpers that the lists of cases share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from heliograph_backends.conformance.harness.case import CaseOperand, OpCase, OutsideCase, with_layouts
from heliograph_proto.types import DTYPES

#: op -> its cases, the plainest one first.
Cases: TypeAlias = Callable[[str], Iterator[OpCase]]

FLOATS = ("f32", "f16", "bf16", "f64")
NARROW = ("f16", "bf16")
INTEGERS = ("i32", "i64", "u8", "i8", "i16", "u16", "u32", "u64")
NUMBERS = (*FLOATS, *INTEGERS)
PLAIN = (*NUMBERS, "bool")
EVERY_BLOCK = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4", "tq1_0", "tq2_0",
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "nvfp4", "q8_1", "q8_k",
    "q1_0", "q2_0",
)  # fmt: skip

#: Strides in memory and in the graph.
STRIDES = ("transposed", "spaced", "permute", "slice of permute")
#: Operands whose memory the op may take over, and operands whose memory it must not.
TAKEN = ("computed", "kept")
LAYOUTS = (*STRIDES, "repeated", "slice", "broadcast_to", *TAKEN)

#: An odd size, not a multiple of vectors, tiles and blocks, and larger than a tile of most kernels.
LARGE = (129, 517)
EIGHT = (2, 1, 2, 1, 3, 1, 2, 5)


def c(op: str, *operands: CaseOperand, **attributes: Any) -> OpCase:
    """Return a case; the short name keeps the lists readable."""
    return OpCase(op, operands, tuple(attributes.items()))


def laid(case: OpCase, layouts: Sequence[str] = LAYOUTS, places: Sequence[int] = ()) -> Iterator[OpCase]:
    """Yield the case, then the case with each operand in each layout."""
    yield case
    yield from with_layouts(case, tuple(layouts), tuple(places))


def outside(*cases: OpCase) -> Iterator[OpCase]:
    """Turn cases into ones whose runs must end with OutOfRangeError."""
    for case in cases:
        yield OutsideCase(case.op, case.operands, case.attributes)


def width(name: str) -> int:
    """Return the length of a row of whole blocks: 256 for blocks of 256 elements, else 64."""
    return max(64, DTYPES[name].block_size)
