"""`hg.ops`: every row of the op table as a function with the op's own name.

    y = hg.ops.soft_max(x, mask, scale=0.125, name="attention")

Operands are values of a graph with exactly the data types of the row: raw ops do not promote.
Attributes are keywords. Ops without operands take `graph=`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from operator import index
from typing import Any

import numpy as np

from heliograph.graph.builder import Graph
from heliograph.graph.lowering import graph_of, is_value
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError, UnknownOpError
from heliograph_proto.ops.table import OPS, Attribute, Op, op
from heliograph_proto.types import dtype

RawOp = Callable[..., Value]


class RawOps:
    """The op table as functions; `dir(hg.ops)` lists them, `help(hg.ops.NAME)` explains one."""

    def __init__(self) -> None:
        self.__doc__ = listing()

    def __getattr__(self, name: str) -> RawOp:
        try:
            return raw_op(name)
        except UnknownOpError as error:
            # With `obj=None` Python does not append a suggestion of its own.
            raise AttributeError(f"{error.message}; {error.advice}", name=name, obj=None) from None

    def __dir__(self) -> list[str]:
        return sorted(OPS)

    def __repr__(self) -> str:
        return f"<the op table: {len(OPS)} ops>"


def listing() -> str:
    """Return the text of `help(hg.ops)`: every op with its operands and what it computes."""
    lines = ["Every row of the op table as a function; help(hg.ops.NAME) has the attributes.", ""]
    for row in OPS.values():
        lines.append(f"{row.name}({', '.join(row.operands)}): {row.doc}")
    return "\n".join(lines)


ops = RawOps()


@cache
def raw_op(name: str) -> RawOp:
    """Return the function of an op. Raises UnknownOpError."""
    row = op(name)

    def function(
        *operands: Value, name: str | None = None, graph: Graph | None = None, **attributes: Any
    ) -> Value:
        if not all(map(is_value, operands)):
            raise invalid(
                f"hg.ops.{row.name} takes values of a graph",
                "functions under hg. take scalars and arrays too",
                InvalidArgumentError,
            )
        where = graph if graph is not None and not operands else graph_of(*operands)
        converted = {key: _convert(row, key, value) for key, value in attributes.items()}
        return where.apply(row.name, operands, converted, name)

    function.__name__ = function.__qualname__ = row.name
    function.__doc__ = documentation(row)
    function.__signature__ = _signature(row)  # type: ignore[attr-defined]
    return function


def _convert(row: Op, name: str, value: Any) -> Any:
    """Convert NumPy's numbers and names of data types to the types of attributes."""
    kind = next((attribute.kind for attribute in row.attributes if attribute.name == name), None)
    try:
        match kind:
            case "dtype":
                return dtype(value)
            case "integers":
                return tuple(map(index, value)) if np.iterable(value) else (index(value),)
            case "integer":
                return index(value)
            case "boolean" if isinstance(value, np.bool_):
                return bool(value)
            case "real" if isinstance(value, np.generic):
                return value.item()
    except TypeError as error:
        raise invalid(f"{row.name}: attribute {name!r}: {error}") from None
    return value


def documentation(row: Op) -> str:
    """Return a few lines about a row: what it computes, its operands and its attributes."""
    lines = [row.doc, "", f"Operands: {', '.join(row.operands) or 'none'}."]
    if row.attributes:
        lines.append(f"Attributes: {', '.join(map(describe_attribute, row.attributes))}.")
    return "\n".join(lines)


def describe_attribute(attribute: Attribute) -> str:
    """Return "name: kind", with the default if there is one."""
    default = "" if attribute.default is None else f" = {attribute.default}"
    return f"{attribute.name}: {attribute.kind}{default}"


def _signature(row: Op) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = []
    for operand in row.operands:
        form = kinds.VAR_POSITIONAL if operand.endswith("*") else kinds.POSITIONAL_ONLY
        default = None if operand.endswith("?") else kinds.empty
        parameters.append(kinds(operand.rstrip("?*"), form, default=default, annotation=Value))
    for attribute in row.attributes:
        default = kinds.empty if attribute.default is None else attribute.default
        parameters.append(kinds(attribute.name, kinds.KEYWORD_ONLY, default=default))
    for extra in ("name", "graph"):
        parameters.append(kinds(extra, kinds.KEYWORD_ONLY, default=None))
    return inspect.Signature(parameters, return_annotation=Value)
