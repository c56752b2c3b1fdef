"""The op table: one row per op, used by the builder, validation, the planner, conformance cases and
documentation.

Names and rules are ggml's if ggml has the op (`soft_max`, `gelu_erf`, `get_rows`), else the array
API's or ONNX's. Shapes are in row-major order. The functions under `heliograph` have the array
API's names and rules and lower to these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from heliograph_proto.errors import HeliographError, InvalidGraphError, UnknownOpError
from heliograph_proto.ops import (
    activations,
    attention,
    basic,
    deepseek,
    elementary,
    patches,
    products,
    recurrent,
    reductions,
    rope,
    rows,
    rules,
    training,
    windows,
)
from heliograph_proto.ops.row import (
    DEFAULT_TOLERANCE,
    EXACT,
    MAX_OPERANDS,
    Attribute,
    AttributeKind,
    Group,
    Op,
)
from heliograph_proto.types import MAX_DIMENSIONS, DType, TensorType

__all__ = [
    "DEFAULT_TOLERANCE", "EXACT", "MAX_OPERANDS", "OPS", "Attribute", "AttributeKind",
    "Group", "Op", "complete_attributes", "convert_attribute", "infer", "op",
]  # fmt: skip

_FAMILIES = (
    basic, elementary, activations, attention, products, rows, reductions, rope, windows, recurrent, training,
    patches, deepseek,
)  # fmt: skip
#: Every op by name.
OPS: Mapping[str, Op] = {row.name: row for family in _FAMILIES for row in family.ROWS}


def op(name: str) -> Op:
    """Return the row of an op. Raises UnknownOpError."""
    if name in OPS:
        return OPS[name]
    near = get_close_matches(name[:64], OPS, 1)
    raise UnknownOpError(
        f"unknown op {name[:64]!r}",
        advice=f"did you mean {near[0]!r}?" if near else "`heliograph ops` lists the op table",
    )


def infer(
    name: str, operands: Sequence[TensorType], attributes: Mapping[str, Any]
) -> tuple[TensorType, dict[str, Any]]:
    """Return the result's type, and the attributes complete with defaults.

    Client and server share this function. Raises InvalidGraphError or UnknownOpError.
    """
    row = op(name)
    if not row.least_operands <= len(operands) <= row.most_operands:
        expected = ", ".join(row.operands) or "none"
        raise InvalidGraphError(f"{name} takes the operands ({expected}), not {len(operands)}")
    complete = complete_attributes(row, attributes)
    try:
        return rules.check_result(row.rule(operands, complete)), complete
    except HeliographError:
        raise
    except (ArithmeticError, ValueError, TypeError) as defect:
        raise InvalidGraphError(f"{name}: {defect}") from defect


def complete_attributes(row: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the attributes of a node and fill in defaults."""
    known = {attribute.name for attribute in row.attributes}
    if unknown := set(given) - known:
        listed = ", ".join(sorted(known)) or "none"
        raise InvalidGraphError(f"{row.name} has no attribute {min(unknown)[:64]!r}; it has: {listed}")
    complete = {}
    for attribute in row.attributes:
        value = given.get(attribute.name, attribute.default)
        if value is None:
            raise InvalidGraphError(f"{row.name} needs the attribute {attribute.name!r}")
        complete[attribute.name] = convert_attribute(row, attribute, value)
    return complete


def convert_attribute(row: Op, attribute: Attribute, value: Any) -> Any:
    """Convert a value to its attribute's kind. Raises InvalidGraphError."""
    match attribute.kind, value:
        case "boolean", bool():
            return value
        case "dtype", DType():
            return value
        case "integer", int() if not isinstance(value, bool):
            return _bounded(row, attribute, value)
        case "real", int() | float() if not isinstance(value, bool):
            return _bounded(row, attribute, value) if isinstance(value, int) else float(value)
        case "integers", list() | tuple() if len(value) > MAX_DIMENSIONS:
            raise InvalidGraphError(
                f"{row.name}: attribute {attribute.name!r} has {len(value)} numbers; "
                f"a tensor has at most {MAX_DIMENSIONS} dimensions"
            )
        case "integers", list() | tuple() if all(type(number) is int for number in value):
            return tuple(_bounded(row, attribute, number) for number in value)
    raise InvalidGraphError(
        f"{row.name}: attribute {attribute.name!r} is {attribute.kind}, not {type(value).__name__}"
    )


def _bounded(row: Op, attribute: Attribute, value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise InvalidGraphError(f"{row.name}: attribute {attribute.name!r} exceeds 64 bits: {value}")
    return value
