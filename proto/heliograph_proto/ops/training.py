"""Rows and rules of training ops: gradients, losses, and optimizer steps."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops import rope
from heliograph_proto.ops.activations import require_finite
from heliograph_proto.ops.products import accumulated, divides, require_indices
from heliograph_proto.ops.row import Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    Attributes,
    Types,
    require_kind,
    require_one_dtype,
    require_rank,
    require_within,
    rows_with_eps,
)
from heliograph_proto.types import TensorType

#: The number of parameters of each optimizer's step.
SGD_PARAMETERS, ADAMW_PARAMETERS = 2, 7


def require_same_shape(types: Types) -> None:
    """Raise unless all operands have one shape."""
    if len({found.shape for found in types}) > 1:
        raise InvalidGraphError(f"operands are {', '.join(map(str, types))}; their shapes must be equal")


def repeat_back(types: Types, attributes: Attributes) -> TensorType:
    """To `shape`, whose sizes divide the operand's; missing dimensions are in front."""
    (x,) = types
    require_kind(types, FLOATS)
    shape = tuple(attributes["shape"])
    aligned = (1,) * (x.ndim - len(shape)) + shape
    if len(shape) > x.ndim or not all(map(divides, aligned, x.shape)):
        raise InvalidGraphError(f"repeat_back of {x} to {shape}: sizes must divide the operand's")
    return TensorType(x.dtype, shape)


def same_floats(types: Types, attributes: Attributes) -> TensorType:
    """Operands of one type, which is the result's."""
    require_kind(types, FLOATS)
    require_one_dtype(types)
    require_same_shape(types)
    return types[0]


def rms_norm_back(types: Types, attributes: Attributes) -> TensorType:
    """As same_floats, along rows; eps finite and not negative."""
    same_floats(types, attributes)
    return rows_with_eps(types[:1], attributes)


def soft_max_back(types: Types, attributes: Attributes) -> TensorType:
    """As same_floats, along rows; scale is finite."""
    require_finite(attributes, "scale")
    require_rank(types[0], 1)
    return same_floats(types, attributes)


def get_rows_back(types: Types, attributes: Attributes) -> TensorType:
    """Gradients [.., r, d] and indices [.., r] give [.., rows, d] in f32; f64 stays."""
    gradient, indices = types
    dtype = accumulated(types[:1])
    require_indices(indices)
    require_rank(gradient, 2)
    require_within("rows", attributes["rows"], 0)
    if indices.shape != gradient.shape[:-1]:
        raise InvalidGraphError(f"get_rows_back of {gradient} at {indices}: one index for each row needed")
    return TensorType(dtype, (*gradient.shape[:-2], attributes["rows"], gradient.shape[-1]))


def cross_entropy_loss(types: Types, attributes: Attributes) -> TensorType:
    """Logits and labels [.., n], of one shape and not empty, give one number in f32; f64 stays."""
    dtype = accumulated(types)
    require_rank(types[0], 1)
    require_same_shape(types)
    if types[0].size == 0:
        raise InvalidGraphError(f"logits {types[0]}: the mean of an empty tensor is undefined")
    return TensorType(dtype, ())


def cross_entropy_loss_back(types: Types, attributes: Attributes) -> TensorType:
    """The loss's gradient, one number, logits and labels give the logits' gradients in f32; f64
    stays."""
    gradient, logits, _ = types
    dtype = accumulated(types)
    cross_entropy_loss(types[1:], attributes)
    if gradient.size != 1:
        raise InvalidGraphError(f"the loss's gradient is {gradient}; it must be one element")
    return TensorType(dtype, logits.shape)


def opt_step_sgd(types: Types, attributes: Attributes) -> TensorType:
    """Weights, their gradients, and two numbers."""
    *tensors, parameters = types
    _require_parameters(parameters, SGD_PARAMETERS)
    return same_floats(tensors, attributes)


def opt_step_adamw(types: Types, attributes: Attributes) -> TensorType:
    """Weights, their gradients, the two moments, and seven numbers give [3, *shape]."""
    *tensors, parameters = types
    _require_parameters(parameters, ADAMW_PARAMETERS)
    found = same_floats(tensors, attributes)
    return TensorType(found.dtype, (3, *found.shape))


def _require_parameters(parameters: TensorType, count: int) -> None:
    require_kind([parameters], FLOATS)
    if parameters.shape != (count,):
        raise InvalidGraphError(f"parameters are {parameters}; {count} numbers needed")


_ROPE = next(row for row in rope.ROWS if row.name == "rope")

ROWS: tuple[Op, ...] = (
    Op(
        "repeat_back", ("x",), "reduction", repeat_back,
        "The sum of the tiles of `shape` in x: the gradient of repeat.",
        (Attribute("shape", "integers"),), (), 1e-6,
    ),
    Op(
        "relu_back", ("gradient", "x"), "elementwise", same_floats,
        "The gradient of relu at x, or at relu(x): 0 where x <= 0, else the gradient.", (), (0, 1), 0.0,
    ),
    Op(
        "silu_back", ("gradient", "x"), "elementwise", same_floats,
        "The gradient of silu at x: gradient * s * (1 + x (1 - s)), where s is sigmoid(x).", (), (0, 1), 1e-6,
    ),
    Op(
        "rms_norm_back", ("gradient", "x"), "rows", rms_norm_back,
        "The gradient of rms_norm at x.", (Attribute("eps", "real", 1e-5),), (0, 1), 1e-6,
    ),
    Op(
        "soft_max_back", ("gradient", "y"), "rows", soft_max_back,
        "The gradient of soft_max whose result was y: scale * y * (gradient - sum(gradient * y)) by rows.",
        (Attribute("scale", "real", 1.0),), (0, 1), 1e-6,
    ),
    Op(
        "rope_back", ("gradient", "positions", "factors?"), "rows", rope.rope,
        "The gradient of rope with the same attributes: rotates every pair back by its angle.",
        _ROPE.attributes, (0,), rope.ANGLE_TOLERANCE,
    ),
    Op(
        "get_rows_back", ("gradient", "indices"), "gather", get_rows_back,
        "The gradient of get_rows from `rows` rows: each is the sum of the gradients at its index, in f32. "
        "An index out of range fails the run.",
        (Attribute("rows", "integer"),), (), 1e-6,
    ),
    Op(
        "cross_entropy_loss", ("logits", "labels"), "reduction", cross_entropy_loss,
        "The mean over all rows of -sum(labels * log(soft_max(logits))), one number in f32.", (), (), 1e-6,
    ),
    Op(
        "cross_entropy_loss_back", ("gradient", "logits", "labels"), "rows", cross_entropy_loss_back,
        "The gradient of cross_entropy_loss: gradient * (soft_max(logits) - labels) / rows, in f32.",
        (), (), 1e-6,
    ),
    Op(
        "opt_step_adamw", ("weights", "gradient", "m", "v", "parameters"), "rows",
        opt_step_adamw,
        "A step of AdamW: the new weights and moments m and v, [3, *shape]. The parameters are alpha, beta1, "
        "beta2, eps, weight decay, 1 / (1 - beta1^t) and 1 / (1 - beta2^t).",
        (), (), 1e-6,
    ),
    Op(
        "opt_step_sgd", ("weights", "gradient", "parameters"), "rows", opt_step_sgd,
        "weights * (1 - alpha * decay) - alpha * gradient, where the parameters are alpha and decay.",
        (), (0, 1), 1e-6,
    ),
)  # fmt: skip
