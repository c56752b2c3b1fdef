"""Rows: gradients, losses, and steps of optimizers."""

from __future__ import annotations

from heliograph_proto.rules import rope, training
from heliograph_proto.table import rope as rope_rows
from heliograph_proto.table.row import Attribute, Op

_ROPE = next(row for row in rope_rows.ROWS if row.name == "rope")

ROWS: tuple[Op, ...] = (
    Op(
        "repeat_back", ("x",), "reduction", training.repeat_back,
        "The sum of the tiles of `shape` that x consists of: the gradient of repeat.",
        (Attribute("shape", "integers"),), (), 1e-6,
    ),
    Op(
        "silu_back", ("gradient", "x"), "elementwise", training.same_floats,
        "The gradient of silu at x: gradient * s * (1 + x (1 - s)), where s is sigmoid(x).", (), (0, 1), 1e-6,
    ),
    Op(
        "rms_norm_back", ("gradient", "x"), "rows", training.rms_norm_back,
        "The gradient of rms_norm at x.", (Attribute("eps", "real", 1e-5),), (0, 1), 1e-6,
    ),
    Op(
        "soft_max_back", ("gradient", "y"), "rows", training.soft_max_back,
        "The gradient of soft_max whose result was y: scale * y * (gradient - sum(gradient * y)) by rows.",
        (Attribute("scale", "real", 1.0),), (0, 1), 1e-6,
    ),
    Op(
        "rope_back", ("gradient", "positions", "factors?"), "rows", rope.rope,
        "The gradient of rope with the same attributes: every pair turns back by its angle.",
        _ROPE.attributes, (0,), rope_rows.ANGLE_TOLERANCE,
    ),
    Op(
        "get_rows_back", ("gradient", "indices"), "gather", training.get_rows_back,
        "The gradient of get_rows from `rows` rows: each is the sum of the gradients at its index, in f32. "
        "An index outside is an error of the run.",
        (Attribute("rows", "integer"),), (), 1e-6,
    ),
    Op(
        "cross_entropy_loss", ("logits", "labels"), "reduction", training.cross_entropy_loss,
        "The mean over all rows of -sum(labels * log(soft_max(logits))), one number in f32.", (), (), 1e-6,
    ),
    Op(
        "cross_entropy_loss_back", ("gradient", "logits", "labels"), "rows", training.cross_entropy_loss_back,
        "The gradient of cross_entropy_loss: gradient * (soft_max(logits) - labels) / rows, in f32.",
        (), (), 1e-6,
    ),
    Op(
        "opt_step_adamw", ("weights", "gradient", "m", "v", "parameters"), "rows",
        training.opt_step_adamw,
        "A step of AdamW: the new weights and moments m and v, [3, *shape]. The parameters are alpha, beta1, "
        "beta2, eps, weight decay, 1 / (1 - beta1^t) and 1 / (1 - beta2^t).",
        (), (), 1e-6,
    ),
    Op(
        "opt_step_sgd", ("weights", "gradient", "parameters"), "rows", training.opt_step_sgd,
        "weights * (1 - alpha * decay) - alpha * gradient, where the parameters are alpha and decay.",
        (), (0, 1), 1e-6,
    ),
)  # fmt: skip
