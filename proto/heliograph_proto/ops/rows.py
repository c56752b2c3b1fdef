"""Rows and rules of ops that write rows, blocks and triangles into a tensor."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.products import divides, require_indices, require_repeats
from heliograph_proto.ops.row import EXACT, Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    NUMBERS,
    PLAIN,
    WEIGHTS,
    Attributes,
    Rule,
    Types,
    mixed,
    require_kind,
    require_one_dtype,
    require_rank,
    require_within,
)
from heliograph_proto.types import I32, TensorType


def set_rows(types: Types, attributes: Attributes) -> TensorType:
    """[.., n, d], rows [.., r, d] and indices [.., r], whose leading dimensions divide the others'.

    Floats convert to the target's type: other floats, blocks, or i32 towards zero.
    """
    target, rows, indices = types
    require_kind((rows,), PLAIN)
    require_indices(indices)
    require_rank(target, 2)
    require_rank(indices, 1)
    converts = target.dtype.kind in WEIGHTS or target.dtype is I32
    if rows.dtype is not target.dtype and not (rows.dtype.is_float and converts):
        raise InvalidGraphError(f"rows {rows} and target {target} have different data types")
    if rows.shape[:-2] != target.shape[:-2] or rows.shape[-1:] != target.shape[-1:]:
        raise InvalidGraphError(f"rows {rows} of {target}: they may differ only in dimension -2")
    if rows.ndim != target.ndim or indices.shape[-1] != rows.shape[-2]:
        raise InvalidGraphError(f"rows {rows} at {indices}: one index for each row needed")
    require_repeats(TensorType(rows.dtype, (*indices.shape, 1)), rows, 2)
    return target


def combined_rows(types: Types, attributes: Attributes) -> TensorType:
    """As set_rows, of numbers of one data type."""
    require_kind(types[:2], NUMBERS)
    require_one_dtype(types[:2])
    return set_rows(types, attributes)


def add1(types: Types, attributes: Attributes) -> TensorType:
    """A tensor and one number, of the data types that add takes."""
    if types[1].size != 1:
        raise InvalidGraphError(f"add1: the second operand is {types[1]}; it must be one element")
    one = TensorType(types[1].dtype, ())
    return mixed(NUMBERS, blocks=True)((types[0], one), attributes)


def add_id(types: Types, attributes: Attributes) -> TensorType:
    """[.., t, used, n], biases [e, n] and ids [.., t, used]."""
    a, biases, ids = types
    require_kind(types[:2], FLOATS)
    require_one_dtype(types[:2])
    require_indices(ids)
    require_rank(a, 1)
    if biases.ndim != 2 or biases.shape[-1] != a.shape[-1] or ids.shape != a.shape[:-1]:
        raise InvalidGraphError(f"add_id of {a}, {biases} and {ids}: [.., n], [e, n] and [..] needed")
    return a


def block(kinds: tuple[str, ...]) -> Rule:
    """A tensor and a block of its rank in it at `start`, with elements `step` apart (empty: 1)."""

    def rule(types: Types, attributes: Attributes) -> TensorType:
        whole, part = types
        require_kind(types, kinds)
        require_one_dtype(types)
        start, step = attributes["start"], attributes["step"] or (1,) * whole.ndim
        if not whole.ndim == part.ndim == len(start) == len(step):
            raise InvalidGraphError(
                f"{part} in {whole} at {start}: all must have the same number of dimensions"
            )
        for at, by, size, room in zip(start, step, part.shape, whole.shape, strict=True):
            require_within("step", by, 1)
            if at < 0 or at + max(0, size - 1) * by + min(1, size) > room:
                raise InvalidGraphError(f"{part} at {start} by {step} is not within {whole}")
        return whole

    return rule


def diag(types: Types, attributes: Attributes) -> TensorType:
    """[n] or [.., 1, n] give [.., n, n]."""
    (x,) = types
    require_kind(types, PLAIN)
    require_rank(x, 1)
    if x.ndim > 1 and x.shape[-2] != 1:
        raise InvalidGraphError(f"diag of {x}: dimension -2 must be 1")
    return TensorType(x.dtype, (*x.shape[:-2], x.shape[-1], x.shape[-1]))


def diag_mask(types: Types, attributes: Attributes) -> TensorType:
    """Matrices; n_past is not negative."""
    require_kind(types, FLOATS)
    require_rank(types[0], 2)
    require_within("n_past", attributes["n_past"], 0)
    return types[0]


def tri(types: Types, attributes: Attributes) -> TensorType:
    """Square matrices; the type is one of ggml's four."""
    require_kind(types, NUMBERS)
    require_rank(types[0], 2)
    require_within("type", attributes["type"], 0, 3)
    if types[0].shape[-1] != types[0].shape[-2]:
        raise InvalidGraphError(f"tri of {types[0]}: the matrices must be square")
    return types[0]


def repeat(types: Types, attributes: Attributes) -> TensorType:
    """To `shape`, whose sizes are multiples of the operand's; new dimensions in front."""
    (x,) = types
    require_kind(types, PLAIN)
    shape = tuple(attributes["shape"])
    aligned = (1,) * (len(shape) - x.ndim) + x.shape
    if len(shape) < x.ndim or not all(map(divides, aligned, shape)):
        raise InvalidGraphError(f"repeat of {x} to {shape}: sizes must be multiples of the operand's")
    return TensorType(x.dtype, shape)


_START = (Attribute("start", "integers"), Attribute("step", "integers", ()))
_N_PAST = (Attribute("n_past", "integer", 0),)

ROWS: tuple[Op, ...] = (
    Op(
        "set_rows", ("target", "rows", "indices"), "gather", set_rows,
        "The target, which may be blocks, with the rows at the indices replaced. Floats convert to the "
        "target's type, also i32. An index out of range fails the run.",
        (), (0,), EXACT,
    ),
    *(
        Op(
            name, ("target", "rows", "indices"), "gather", combined_rows,
            f"The target, whose rows at the indices {become}, one after the other in the order of the "
            "indices. An index out of range fails the run.", (), (0,), tolerance,
        )
        for name, become, tolerance in (
            ("add_rows", "grow by the rows", 1e-6),
            ("mul_rows", "are multiplied by the rows", 1e-6),
            ("max_rows", "become the larger of both, NaN if either is", EXACT),
            ("min_rows", "become the smaller of both, NaN if either is", EXACT),
        )
    ),
    Op(
        "add1", ("a", "b"), "elementwise", add1,
        "a + b, where b is one number. b may be f32 if a is f16, bf16 or blocks.", (), (0,),
    ),
    Op(
        "add_id", ("a", "biases", "ids"), "gather", add_id,
        "a, plus for each row the row of the biases that its id selects. An id out of range fails the run.",
        (), (0,),
    ),
    Op(
        "acc", ("a", "b"), "move", block(NUMBERS), "a, with b added to its block at `start`, "
        "with elements `step` apart (empty: 1).", _START, (0,),
    ),
    Op(
        "set", ("a", "b"), "move", block(PLAIN), "a, with its block at `start` replaced by b, "
        "with elements `step` apart (empty: 1).", _START, (0,), EXACT,
    ),
    Op(
        "diag", ("x",), "move", diag, "Square matrices with x on the diagonal and 0 elsewhere.",
        tolerance=EXACT,
    ),
    Op(
        "diag_mask_inf", ("x",), "move", diag_mask,
        "x, but -inf where the column is after the row plus `n_past`.", _N_PAST, (0,), EXACT,
    ),
    Op(
        "diag_mask_zero", ("x",), "move", diag_mask,
        "x, but 0 where the column is after the row plus `n_past`.", _N_PAST, (0,), EXACT,
    ),
    Op(
        "tri", ("x",), "move", tri,
        "x, but 0 outside a triangle: `type` 0 upper with diagonal, 1 upper, 2 lower with diagonal, 3 lower.",
        (Attribute("type", "integer"),), (0,), EXACT,
    ),
    Op(
        "repeat", ("x",), "move", repeat, "x repeated to `shape`.",
        (Attribute("shape", "integers"),), (), EXACT,
    ),
)  # fmt: skip
