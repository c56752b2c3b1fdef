"""Rows of elementwise ops in few words: what ops of one form share."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto import rules
from heliograph_proto.rules import FLOATS, NUMBERS, PLAIN
from heliograph_proto.table.row import EXACT, Op


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
