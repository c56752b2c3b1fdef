"""The type of a row of the op table, and constructors for common rows."""

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

#: The normalised mean squared error that a device's result may have against float64.
EXACT = 0.0
DEFAULT_TOLERANCE = 1e-7
#: ggml's, for sums of products in any order and with any accumulator's precision.
PRODUCT_TOLERANCE = 5e-4
#: ggml's, for values rounded to a narrow float; bf16 keeps 8 bits.
NARROW_TOLERANCES = {"f16": 5e-5, "bf16": 1e-4}
#: ggml's, for values on the boundary of two quanta, which devices may round either way.
QUANTA_TOLERANCE = 5e-6


@dataclass(frozen=True, slots=True)
class Attribute:
    """A named constant of a node."""

    name: str
    kind: AttributeKind
    #: None: required.
    default: Any = None


@dataclass(frozen=True, slots=True)
class Op:
    """A row of the table."""

    name: str
    #: Names of the operands. The last ones may end in "?" (optional), or the last in "*" (one or
    #: more).
    operands: tuple[str, ...]
    group: Group
    rule: Rule
    doc: str
    attributes: tuple[Attribute, ...] = ()
    #: Places of the operands whose memory the result may take over if nothing else uses it.
    in_place: tuple[int, ...] = ()
    tolerance: float = DEFAULT_TOLERANCE

    @property
    def is_view(self) -> bool:
        """True if the result may share the first operand's bytes."""
        return self.group == "view"

    def tolerance_for(self, operands: Sequence[TensorType], result: TensorType) -> float:
        """Return the normalised mean squared error that a node of these types may have.

        It is the row's own, but at least what rounding to its types costs. Exact rows stay exact
        unless they convert to or from blocks; results in blocks are compared after dequantization.
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


#: The maximum operands of a variadic op.
MAX_OPERANDS = 1024


def unary(name: str, doc: str, kinds: Sequence[str] = FLOATS, tolerance: float = 1e-7) -> Op:
    """Return the row of an op with one operand, whose type the result has."""
    return Op(name, ("x",), "elementwise", rules.same(kinds), doc, (), (0,), tolerance)


def binary(name: str, doc: str, kinds: Sequence[str] = NUMBERS, tolerance: float = 1e-7) -> Op:
    """Return the row of an op with two operands of one data type, which broadcast."""
    return Op(name, ("a", "b"), "elementwise", rules.binary(kinds), doc, (), (0, 1), tolerance)


def arithmetic(name: str, doc: str, kinds: Sequence[str] = NUMBERS, *, blocks: bool = False) -> Op:
    """Return a binary row that also accepts f32 as second operand.

    The first is then a narrow float or, with `blocks`, may be quantized.
    """
    narrow = "f16, bf16 or blocks" if blocks else "f16 or bf16"
    doc = f"{doc} b may be f32 if a is {narrow}."
    return Op(name, ("a", "b"), "elementwise", rules.mixed(kinds, blocks=blocks), doc, (), (0, 1))


def question(name: str, doc: str) -> Op:
    """Return the row of a predicate on floats."""
    return Op(name, ("x",), "elementwise", rules.to_bool(FLOATS), doc, tolerance=EXACT)


def comparison(name: str, doc: str, kinds: Sequence[str] = PLAIN) -> Op:
    """Return a binary row with a bool result."""
    return Op(name, ("a", "b"), "elementwise", rules.comparison(kinds), doc, tolerance=EXACT)
