"""Rows: ggml's matrix products, and what puts rows, blocks and triangles into a tensor."""

from __future__ import annotations

from heliograph_proto.rules import NUMBERS, PLAIN, products, rows
from heliograph_proto.table.row import EXACT, PRODUCT_TOLERANCE, Attribute, Op

_START = (Attribute("start", "integers"), Attribute("step", "integers", ()))
_N_PAST = (Attribute("n_past", "integer", 0),)

ROWS: tuple[Op, ...] = (
    Op(
        "mul_mat", ("weights", "activations"), "matmul", products.mul_mat,
        "activations [.., m, k] times the transpose of weights [.., n, k], in f32; each matrix of weights "
        "serves as many consecutive ones of the activations as their leading sizes ask for. Weights may be "
        "blocks, and the activations q8_0 where they are q4_0, q5_0 or q8_0.",
        tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "mul_mat_id", ("experts", "activations", "ids"), "matmul", products.mul_mat_id,
        "For each token and each of its expert ids, that expert's matrix times the token's row, in f32, of "
        "mul_mat's data types. An id outside is an error of the run.",
        tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "out_prod", ("a", "b"), "matmul", products.out_prod,
        "The transpose of b [.., k, m] times a [.., k, n], in f32; a's matrices repeat as in mul_mat.",
        tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "set_rows", ("target", "rows", "indices"), "gather", rows.set_rows,
        "The target, which may be blocks, with the rows in place of those at the indices. Floats become what "
        "the target stores, also i32. An index outside is an error of the run.",
        (), (0,), EXACT,
    ),
    Op(
        "add1", ("a", "b"), "elementwise", rows.add1,
        "a + b, where b is one number. b may be f32 where a is f16, bf16 or blocks.", (), (0,),
    ),
    Op(
        "add_id", ("a", "biases", "ids"), "gather", rows.add_id,
        "a, plus for each of its rows the row of the biases that its id names. An id outside is an error of "
        "the run.",
        (), (0,),
    ),
    Op(
        "acc", ("a", "b"), "move", rows.block(NUMBERS), "a, with b added to its block at `start`, "
        "whose elements are `step` apart (none: 1).", _START, (0,),
    ),
    Op(
        "set", ("a", "b"), "move", rows.block(PLAIN), "a, with b in place of its block at `start`, "
        "whose elements are `step` apart (none: 1).", _START, (0,), EXACT,
    ),
    Op(
        "diag", ("x",), "move", rows.diag, "Square matrices with x along the diagonal, else 0.",
        tolerance=EXACT,
    ),
    Op(
        "diag_mask_inf", ("x",), "move", rows.diag_mask,
        "x, but -inf where the column is after the row plus `n_past`.", _N_PAST, (0,), EXACT,
    ),
    Op(
        "diag_mask_zero", ("x",), "move", rows.diag_mask,
        "x, but 0 where the column is after the row plus `n_past`.", _N_PAST, (0,), EXACT,
    ),
    Op(
        "tri", ("x",), "move", rows.tri,
        "x, but 0 outside of a triangle: `type` 0 upper with diagonal, 1 upper, 2 lower with it, 3 lower.",
        (Attribute("type", "integer"),), (0,), EXACT,
    ),
    Op(
        "repeat", ("x",), "move", rows.repeat, "x over and over again up to `shape`.",
        (Attribute("shape", "integers"),), (), EXACT,
    ),
)  # fmt: skip
