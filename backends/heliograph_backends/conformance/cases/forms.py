"""What the lists of cases share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from heliograph_backends.conformance.harness.case import CaseOperand, OpCase, with_layouts
from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.table import infer
from heliograph_proto.types import DTYPES

#: op -> its cases, the plainest one first.
Cases: TypeAlias = Callable[[str], Iterator[OpCase]]

FLOATS = ("f32", "f16", "bf16", "f64")
NARROW = ("f16", "bf16")
INTEGERS = ("i32", "i64", "u8", "i8", "i16", "u16", "u32", "u64")
NUMBERS = (*FLOATS, *INTEGERS)
PLAIN = (*NUMBERS, "bool")
EVERY_BLOCK = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")

#: Strides in memory and in the graph.
STRIDES = ("transposed", "spaced", "permute", "slice of permute")
#: Whether the op may take over its operand's memory, and where it must not.
TAKEN = ("computed", "kept")
LAYOUTS = (*STRIDES, "repeated", "slice", "broadcast_to", *TAKEN)

#: A size that is odd, one past what vectors, tiles and blocks like, and more than a tile of most kernels.
LARGE = (129, 517)
EIGHT = (2, 1, 2, 1, 3, 1, 2, 5)


def c(op: str, *operands: CaseOperand, **attributes: Any) -> OpCase:
    """A case in few words."""
    return OpCase(op, operands, tuple(attributes.items()))


def laid(case: OpCase, layouts: Sequence[str] = LAYOUTS, places: Sequence[int] = ()) -> Iterator[OpCase]:
    """The case, then with each operand in each layout."""
    yield case
    yield from with_layouts(case, tuple(layouts), tuple(places))


def width(name: str) -> int:
    """The length of a row of whole blocks: 256 for those of as many elements, 64 for others."""
    return max(64, DTYPES[name].block_size)


def if_allowed(*cases: OpCase) -> Iterator[OpCase]:
    """Those that the op table's rules take: data types differ from op to op."""
    for case in cases:
        try:
            infer(case.op, [one.type for one in case.operands], dict(case.attributes))
        except InvalidGraphError:
            continue
        yield case
