"""What a row of the op table is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from heliograph_proto.ops import rules
from heliograph_proto.ops.rules import FLOATS, NUMBERS, PLAIN, Rule
from heliograph_proto.types import TensorType

AttributeKind: TypeAlias = Literal["real", "integer", "integers", "boolean", "dtype"]
Group: TypeAlias = Literal[
    "elementwise", "reduction", "matmul", "rows", "attention", "window", "gather", "move", "view",
    "source", "variable",
]  # fmt: skip

#: Normalised mean squared error that a device's result may have against float64.
EXACT = 0.0
DEFAULT_TOLERANCE = 1e-7
#: ggml's, of sums of products in whatever order and of the accumulator's precision.
PRODUCT_TOLERANCE = 5e-4
#: ggml's, where a value is rounded to a narrow float; bf16 keeps 8 bits.
NARROW_TOLERANCES = {"f16": 5e-5, "bf16": 1e-4}
#: ggml's, where a device may put a value on the boundary of two quanta on either side.
QUANTA_TOLERANCE = 5e-6


@dataclass(frozen=True, slots=True)
class Attribute:
    """A named constant of a node."""

    name: str
    kind: AttributeKind
    #: None: it must be given.
    default: Any = None


@dataclass(frozen=True, slots=True)
class Op:
    """A row of the table."""

    name: str
    #: Names of the operands. The last ones may end in "?" (may be absent), or the last in "*" (one or more).
    operands: tuple[str, ...]
    group: Group
    rule: Rule
    doc: str
    attributes: tuple[Attribute, ...] = ()
    #: Places of the operands whose memory the result may take over when nobody else needs it.
    in_place: tuple[int, ...] = ()
    tolerance: float = DEFAULT_TOLERANCE

    @property
    def is_view(self) -> bool:
        """Whether the result may share the first operand's bytes."""
        return self.group == "view"

    def tolerance_for(self, operands: Sequence[TensorType], result: TensorType) -> float:
        """The normalised mean squared error that a node of these types may have.

        The row's own, but not less than what rounding to its types costs. Exact rows stay exact unless
        they convert to or from blocks; results in blocks are compared after dequantization.
        """
        if self.tolerance == EXACT:
            if result.dtype.kind == "quantized":
                return QUANTA_TOLERANCE if any(one.dtype.is_float for one in operands) else EXACT
            return DEFAULT_TOLERANCE if any(one.dtype.kind == "quantized" for one in operands) else EXACT
        names = {found.dtype.name for found in (*operands, result)}
        quanta = QUANTA_TOLERANCE if result.dtype.kind == "quantized" else 0.0
        return max([self.tolerance, quanta, *(NARROW_TOLERANCES.get(name, 0.0) for name in names)])

    @property
    def least_operands(self) -> int:
        return sum(not name.endswith("?") for name in self.operands)

    @property
    def most_operands(self) -> int:
        variadic = bool(self.operands) and self.operands[-1].endswith("*")
        return MAX_OPERANDS if variadic else len(self.operands)


#: The most operands of a variadic op.
MAX_OPERANDS = 1024


def unary(name: str, doc: str, kinds: Sequence[str] = FLOATS, tolerance: float = 1e-7) -> Op:
    """Of one operand, whose type the result has."""
    return Op(name, ("x",), "elementwise", rules.same(kinds), doc, (), (0,), tolerance)


def binary(name: str, doc: str, kinds: Sequence[str] = NUMBERS, tolerance: float = 1e-7) -> Op:
    """Of two operands of one data type that broadcast."""
    return Op(name, ("a", "b"), "elementwise", rules.binary(kinds), doc, (), (0, 1), tolerance)


def arithmetic(name: str, doc: str, kinds: Sequence[str] = NUMBERS, *, blocks: bool = False) -> Op:
    """As binary; beside a narrow float, or blocks where they may be, the second may be f32."""
    narrow = "f16, bf16 or blocks" if blocks else "f16 or bf16"
    doc = f"{doc} b may be f32 where a is {narrow}."
    return Op(name, ("a", "b"), "elementwise", rules.mixed(kinds, blocks=blocks), doc, (), (0, 1))


def question(name: str, doc: str) -> Op:
    """A question about floats."""
    return Op(name, ("x",), "elementwise", rules.to_bool(FLOATS), doc, tolerance=EXACT)


def comparison(name: str, doc: str, kinds: Sequence[str] = PLAIN) -> Op:
    """As binary, with a bool result."""
    return Op(name, ("a", "b"), "elementwise", rules.comparison(kinds), doc, tolerance=EXACT)
