"""Rows and rules of ggml's matrix products, in row-major order."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.row import PRODUCT_TOLERANCE, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    WEIGHTS,
    Attributes,
    Types,
    require_kind,
    require_rank,
)
from heliograph_proto.types import F32, F64, DType, TensorType


def accumulated(types: Types, weights: int = 0) -> DType:
    """Return the data type of sums of products: f32 as in ggml; f64 if all operands are f64.

    The first `weights` operands may be quantized.
    """
    require_kind(types[:weights], WEIGHTS)
    require_kind(types[weights:], FLOATS)
    wide = {found.dtype.name == "f64" for found in types}
    if len(wide) > 1:
        raise InvalidGraphError(
            f"operands have different data types, one of them f64: {', '.join(map(str, types))}",
            advice="convert: hg.astype(x, 'f64')",
        )
    return F64 if wide.pop() else F32


def multiplied(weights: TensorType, activations: TensorType) -> DType:
    """Return the data type of a product: `accumulated`, or f32 for blocks with q8_0."""
    if activations.dtype.name == "q8_0" and weights.dtype.kind == "quantized":
        return F32
    return accumulated((weights, activations), weights=1)


def require_indices(found: TensorType) -> None:
    """Raise unless the operand can index."""
    if found.dtype.name not in ("i32", "i64"):
        raise InvalidGraphError(f"indices are {found}; they must be i32 or i64")


def divides(part: int, whole: int) -> bool:
    """True if whole repetitions of a dimension of size `part` fill one of size `whole`."""
    return part == whole or (part > 0 and whole % part == 0)


def require_repeats(part: TensorType, whole: TensorType, drop: int) -> None:
    """Raise unless part's leading dimensions, without the last `drop`, divide whole's."""
    inner, outer = part.shape[: part.ndim - drop], whole.shape[: whole.ndim - drop]
    aligned = (1,) * (len(outer) - len(inner)) + inner
    if len(inner) > len(outer) or not all(map(divides, aligned, outer)):
        raise InvalidGraphError(
            f"the leading dimensions of {part} do not divide those of {whole}",
            advice="the second operand's leading sizes are multiples of the first's",
        )


def mul_mat(types: Types, attributes: Attributes) -> TensorType:
    """Weights [.., n, k] and activations [.., m, k] give [.., m, n]: activations @ weights^T."""
    weights, activations = types
    dtype = multiplied(weights, activations)
    require_rank(weights, 2)
    require_rank(activations, 2)
    if weights.shape[-1] != activations.shape[-1]:
        raise InvalidGraphError(
            f"mul_mat of {weights} and {activations}: rows have {weights.shape[-1]} and "
            f"{activations.shape[-1]} elements",
            advice="both operands' rows are along the inner dimension: weights [n, k], activations [m, k]",
        )
    require_repeats(weights, activations, 2)
    return TensorType(dtype, (*activations.shape[:-1], weights.shape[-2]))


def out_prod(types: Types, attributes: Attributes) -> TensorType:
    """[.., k, n] and [.., k, m] give [.., m, n]: b^T @ a, a sum of k outer products."""
    a, b = types
    dtype = accumulated(types, weights=1)
    require_rank(a, 2)
    require_rank(b, 2)
    if a.shape[-2] != b.shape[-2]:
        raise InvalidGraphError(f"out_prod of {a} and {b}: {a.shape[-2]} and {b.shape[-2]} rows")
    require_repeats(a, b, 2)
    return TensorType(dtype, (*b.shape[:-2], b.shape[-1], a.shape[-1]))


def mul_mat_id(types: Types, attributes: Attributes) -> TensorType:
    """Experts [e, n, k], activations [t, u, k] and ids [t, used] give [t, used, n]; u divides
    used."""
    experts, activations, ids = types
    dtype = multiplied(experts, activations)
    require_indices(ids)
    if (experts.ndim, activations.ndim, ids.ndim) != (3, 3, 2):
        raise InvalidGraphError(
            f"mul_mat_id of {experts}, {activations} and {ids}: [experts, n, k], [tokens, u, k] and "
            "[tokens, used] needed"
        )
    tokens, own, inner = activations.shape
    if inner != experts.shape[2] or tokens != ids.shape[0] or not divides(own, ids.shape[1]):
        raise InvalidGraphError(f"mul_mat_id of {experts}, {activations} and {ids}: sizes do not fit")
    return TensorType(dtype, (*ids.shape, experts.shape[1]))


ROWS: tuple[Op, ...] = (
    Op(
        "mul_mat", ("weights", "activations"), "matmul", mul_mat,
        "activations [.., m, k] times the transpose of weights [.., n, k], in f32; each matrix of weights "
        "repeats for consecutive ones of the activations, by the ratio of leading sizes. Weights may be "
        "blocks; then the activations may be q8_0, and a device may multiply integers.",
        tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "mul_mat_id", ("experts", "activations", "ids"), "matmul", mul_mat_id,
        "For each token and each of its expert ids, that expert's matrix times the token's row, in f32, with "
        "mul_mat's data types. An id out of range fails the run.",
        tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "out_prod", ("a", "b"), "matmul", out_prod,
        "The transpose of b [.., k, m] times a [.., k, n], in f32; a's matrices repeat as in mul_mat.",
        tolerance=PRODUCT_TOLERANCE,
    ),
)  # fmt: skip
