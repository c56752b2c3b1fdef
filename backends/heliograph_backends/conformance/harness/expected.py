"""The expected outputs of a graph: the definition of every op, evaluated in float64.

A value that depends on leaves only through exact ops is exact and computed in its own data type.
All other values are computed in float64 and may differ by the sum of the tolerances of the ops
before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heliograph_backends.conformance.harness.content import Array, Content, decode, encode, is_plain
from heliograph_backends.conformance.harness.outcome import MismatchError
from heliograph_backends.reference import define
from heliograph_proto.graph import Graph, Node
from heliograph_proto.ops.table import EXACT, OPS
from heliograph_proto.types import F64, DType, TensorType

#: The largest error of a single element, in multiples of the root of the allowed mean squared
#: error: in a large result the mean hides a single wrong element.
OUTLIER = 10.0
#: Ops whose result depends on the data type, not only on the operands' numbers.
OF_DATA_TYPES = frozenset({"nextafter", "bitcast"})


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedValue:
    """A value of a graph: numbers in its shape, and the allowed error."""

    type: TensorType
    numbers: Array
    #: The allowed normalised mean squared error.
    tolerance: float = EXACT


@dataclass(frozen=True, slots=True)
class Figures:
    """The difference of an output from its reference."""

    #: Normalised mean squared error: sum((a - b)**2) / sum(b**2).
    error: float = 0.0
    largest: float = 0.0


def evaluate(graph: Graph, contents: Sequence[Content]) -> tuple[list[ExpectedValue], list[ExpectedValue]]:
    """Return the outputs, and the leaves after the run; variables hold their last assigned
    value."""
    values = [ExpectedValue(one.type, one.values) for one in contents]
    leaves = len(values)
    for node in graph.nodes:
        made = _evaluate(node, [values[value] for value in node.operands])
        values.append(made)
        if node.op == "assign":
            values[node.operands[0]] = made
    return [values[output.value] for output in graph.outputs], values[:leaves]


def _evaluate(node: Node, operands: Sequence[ExpectedValue]) -> ExpectedValue:
    types = [one.type for one in operands]
    own = OPS[node.op].tolerance_for(types, node.type)
    tolerance = sum((one.tolerance for one in operands), own)
    if node.type.dtype.kind == "quantized":
        return ExpectedValue(node.type, _blocks(node, operands), tolerance)
    if tolerance != EXACT and node.type.dtype.is_float:
        return ExpectedValue(node.type, _in_float64(node, [one.numbers for one in operands]), tolerance)
    if all(map(is_plain, (*types, node.type))):
        numbers = [one.numbers for one in operands]
        return ExpectedValue(
            node.type, _defined(node.op, node.attributes, numbers, node.type, node.type.dtype)
        )
    if node.op in OF_DATA_TYPES:
        return ExpectedValue(node.type, _on_stored(node, operands))
    # bf16: exact ops need no more than float64 has, and one rounding at the end.
    return ExpectedValue(
        node.type, encode(node.type, _in_float64(node, [one.numbers for one in operands])).values
    )


def _blocks(node: Node, operands: Sequence[ExpectedValue]) -> Array:
    """Return the numbers of a quantized result.

    Moved blocks keep their numbers, since encoding these again could give other blocks. Floats,
    also those set among other rows, are encoded.
    """
    numbers, type = [one.numbers for one in operands], node.type
    if node.op == "set_rows" and operands[1].type.dtype is not type.dtype:
        numbers[1] = encode(TensorType(type.dtype, operands[1].type.shape), numbers[1]).values
    found = _in_float64(node, numbers)
    moves = OPS[node.op].tolerance == EXACT and operands[0].type.dtype is type.dtype
    return found if moves else encode(type, found).values


def _in_float64(node: Node, numbers: Sequence[Array]) -> Array:
    wide = [one.astype(np.float64) if one.dtype.kind == "f" else one for one in numbers]
    attributes = {
        name: F64 if isinstance(value, DType) and not value.is_integer else value
        for name, value in node.attributes.items()
    }
    return _defined(node.op, attributes, wide, node.type, F64)


def _on_stored(node: Node, operands: Sequence[ExpectedValue]) -> Array:
    """Evaluate the definition on the operands in their stored form."""
    arrays = [
        encode(one.type, one.numbers).raw.view(one.type.dtype.storage).reshape(one.type.storage_shape)
        for one in operands
    ]
    out = np.zeros(node.type.storage_shape, node.type.dtype.storage)
    dtypes = [one.type.dtype for one in operands]
    define(node.op, node.attributes, operands=dtypes, result=node.type.dtype)(*arrays, out)
    return decode(node.type, out.reshape(-1).view(np.uint8)).values


def _defined(
    op: str, attributes: Mapping[str, Any], numbers: Sequence[Array], type: TensorType, dtype: DType
) -> Array:
    """Evaluate the op's definition on these numbers, into an array of this data type."""
    out = np.zeros(type.shape, dtype.numpy)
    with np.errstate(all="ignore"):
        define(op, attributes)(*numbers, out)
    return out


def compare(what: str, found: Content, expected: ExpectedValue) -> Figures:
    """Compare an output with its reference. Raises MismatchError with the first place and the
    error."""
    if expected.tolerance == EXACT or not (expected.type.dtype.is_float or not is_plain(expected.type)):
        return _compare_exactly(what, found.values, expected.numbers)
    reference = expected.numbers.astype(np.float64)
    quantized = expected.type.dtype.block_size > 1
    # The reference in its stored form, in which an overflow is an infinity.
    with np.errstate(all="ignore"):
        stored = reference if quantized else encode(expected.type, reference).values.astype(np.float64)
    _compare_special(what, found.values.astype(np.float64), stored)
    finite = np.isfinite(stored)
    figures = _figures(found.values[finite].astype(np.float64), reference[finite])
    # A narrow data type cannot be more exact than its own rounding.
    allowed = expected.tolerance + 2 * _figures(stored[finite], reference[finite]).error
    # A number between two quanta may be rounded either way, which is a large error for one element.
    largest = math.inf if quantized else OUTLIER * math.sqrt(allowed * _mean_square(reference[finite]))
    if not (figures.error <= allowed and figures.largest <= largest):
        raise MismatchError(
            f"{what}: NMSE {figures.error:.3g}, allowed {allowed:.3g}; largest error {figures.largest:.3g}, "
            f"allowed {largest:.3g}, " + _first(found.values, reference, finite)
        )
    return figures


def _figures(found: Array, reference: Array) -> Figures:
    """Return the errors; relative to zeros, the mean squared error itself."""
    if not reference.size:
        return Figures()
    difference = found - reference
    error = float((difference * difference).mean()) / _mean_square(reference)
    return Figures(error, float(np.abs(difference).max()))


def _mean_square(reference: Array) -> float:
    """Return the mean square; 1 if all are zeros."""
    return (float((reference * reference).mean()) if reference.size else 0.0) or 1.0


def _compare_exactly(what: str, found: Array, expected: Array) -> Figures:
    same = found == expected
    if found.dtype.kind == "f":
        same = same | (np.isnan(found) & np.isnan(expected))
    if same.all():
        return Figures()
    place = _place(~same)
    raise MismatchError(
        f"{what}: {int((~same).sum())} of {same.size} elements differ, first at {place}: "
        f"{found[place]!s}, expected exactly {expected[place]!s}"
    )


def _compare_special(what: str, found: Array, expected: Array) -> None:
    """Raise MismatchError unless NaNs and infinities are where the reference has them, with its
    signs."""
    for name, test in (("NaN", np.isnan), ("infinite", np.isinf)):
        wrong = test(found) != test(expected)
        if name == "infinite":
            wrong |= test(found) & (np.signbit(found) != np.signbit(expected))
        if wrong.any():
            place = _place(wrong)
            raise MismatchError(
                f"{what}: {int(wrong.sum())} elements are {name} on one side alone, first at {place}: "
                f"{found[place]!s}, expected {expected[place]!s}"
            )


def _first(found: Array, reference: Array, finite: Array) -> str:
    """Describe the largest error; the first of several."""
    with np.errstate(all="ignore"):
        difference = np.where(finite, np.abs(found.astype(np.float64) - reference), -1.0)
    place = np.unravel_index(int(np.argmax(difference)), difference.shape)
    at = tuple(int(one) for one in place)
    return f"at {at}: {found[at]!s}, expected {reference[at]:.9g}"


def _place(wrong: Array) -> tuple[int, ...]:
    return tuple(int(one) for one in np.argwhere(wrong)[0]) if wrong.ndim else ()
