"""Cases of Core ATen: for each overload arguments, whose tensors are made of several data types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, torch.bool)
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Of:
    """A tensor of a case: its shape, and from where to where its elements go.

    `dtype`: of another type than the case's. `distinct`: no element is twice in it.
    """

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    dtype: torch.dtype | None = None
    distinct: bool = False

    def make(self, dtype: torch.dtype) -> torch.Tensor:
        found = self.dtype or dtype
        count = int(torch.Size(self.shape).numel())
        if self.distinct:
            return (torch.randperm(count) - count // 2).reshape(self.shape).to(found)
        if found == torch.bool:
            return torch.rand(self.shape) < 0.5
        if found.is_floating_point:
            return (torch.rand(self.shape, dtype=torch.float64) * (self.high - self.low) + self.low).to(found)
        low, high = (int(one) for one in (self.low, self.high))
        if not found.is_signed:
            low = max(0, low)
        return torch.randint(low, max(low + 1, high + 1), self.shape).to(found)


def t(*shape: int, low: float = -2.0, high: float = 2.0) -> Of:
    """A tensor of the case's data type."""
    return Of(shape, low, high)


def at(*shape: int, below: int) -> Of:
    """Places, from 0 to below a size."""
    return Of(shape, 0, below - 1, torch.int64)


def mask(*shape: int) -> Of:
    """A tensor of truth values."""
    return Of(shape, dtype=torch.bool)


def apart(*shape: int) -> Of:
    """A tensor of which no two elements are equal."""
    return Of(shape, distinct=True)


@dataclass(frozen=True)
class Case:
    """Arguments of an op, and the data types that they are made of."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    dtypes: Sequence[torch.dtype]


CASES: dict[str, list[Case]] = {}


def case(op: str, *arguments: Any, dtypes: Sequence[torch.dtype] = FLOATS, **options: Any) -> None:
    """Add a case for an overload."""
    CASES.setdefault(op if "." in op else f"{op}.default", []).append(Case(arguments, options, dtypes))


def tensors_in(item: Any) -> Iterator[Of]:
    """Yield the tensors of a case's arguments in their order."""
    if isinstance(item, Of):
        yield item
    elif isinstance(item, (list, tuple)):
        for one in item:
            yield from tensors_in(one)


def filled(item: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return arguments with tensors in the places of their descriptions."""
    if isinstance(item, Of):
        return next(tensors)
    if isinstance(item, (list, tuple)):
        return [filled(one, tensors) for one in item]
    return item


def core_ops() -> dict[str, torch._ops.OpOverload]:
    """Return torch's own list of Core ATen: the overloads with the tag, by name."""
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if space != "aten" or not hasattr(torch.ops.aten, packet):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if op is not None and torch.Tag.core in op.tags:
            found[f"{packet}.{overload or 'default'}"] = op
    return found


# Element by element

for name in ("abs", "neg", "sign", "ceil", "floor", "trunc", "round"):
    case(name, t(3, 4, low=-5, high=5), dtypes=NUMBERS)
for name in ("cos", "cosh", "erf", "exp", "expm1", "sigmoid", "sin", "sinh", "tan", "tanh", "asinh", "atan"):
    case(name, t(3, 4, low=-1.4, high=1.4), dtypes=ALL)
for name in ("acos", "asin", "atanh"):
    case(name, t(3, 4, low=-0.9, high=0.9))
for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"):
    case(name, t(3, 4, low=0.5, high=5), dtypes=(*FLOATS, torch.int32))
case("acosh", t(3, 4, low=1.5, high=5))
case("relu", t(3, 4), dtypes=(*FLOATS, torch.int32))
case("leaky_relu", t(3, 4), 0.2)
case("elu", t(3, 4))
case("elu", t(3, 4), 0.5, 2.0, 1.5)
case("gelu", t(3, 4))
case("gelu", t(3, 4), approximate="tanh")
for name in ("hardsigmoid", "hardswish", "silu"):
    case(name, t(3, 4, low=-5, high=5))
case("softplus", t(3, 4, low=-9, high=9), 2.0, 5.0)
case("hardtanh", t(3, 4), -0.5, 1.0, dtypes=(*FLOATS, torch.int32))
case("bitwise_not", t(3, 4, low=0, high=9), dtypes=(*INTEGERS, torch.bool))
case("logical_not", t(3, 4), dtypes=ALL)
case("isinf", t(3, 4), dtypes=(torch.float32, torch.int32))
case("isnan", t(3, 4), dtypes=(torch.float32, torch.int32))
for name in ("add", "sub"):
    case(f"{name}.Tensor", t(3, 4), t(4), dtypes=NUMBERS)
    case(f"{name}.Tensor", t(3, 1), t(1, 4), alpha=2, dtypes=NUMBERS)
    case(f"{name}.Tensor", t(3, 4), Of((), dtype=torch.float64), dtypes=(*FLOATS, torch.int32))
    case(f"{name}.Scalar", t(3, 4), 3, dtypes=NUMBERS)
    case(f"{name}.Scalar", t(3, 4), 1.5, 2, dtypes=FLOATS)
case("add.Tensor", t(3), mask(3), dtypes=ALL)
case("add.Scalar", t(3, 4), 1.5, dtypes=INTEGERS)
case("mul.Tensor", t(3, 4), t(4), dtypes=ALL)
case("mul.Scalar", t(3, 4), 2.5, dtypes=NUMBERS)
case("div.Tensor", t(3, 4), t(3, 1, low=1, high=3), dtypes=ALL[:-1])
case("div.Scalar", t(3, 4), 3, dtypes=NUMBERS)
for mode in ("floor", "trunc", None):
    case("div.Tensor_mode", t(3, 4, low=-9, high=9), t(4, low=1, high=3), rounding_mode=mode, dtypes=NUMBERS)
    case("div.Scalar_mode", t(3, 4, low=-9, high=9), 4, rounding_mode=mode, dtypes=(torch.float32, *INTEGERS))
for name in ("maximum", "minimum"):
    case(name, t(3, 4), t(4), dtypes=ALL)
for name in ("fmod", "remainder"):
    case(f"{name}.Tensor", t(3, 4, low=-9, high=9), t(4, low=1, high=3), dtypes=NUMBERS)
    case(f"{name}.Scalar", t(3, 4, low=-9, high=9), 2, dtypes=NUMBERS)
    case(f"{name}.Scalar", t(3, 4, low=-9, high=9), -2.5, dtypes=(torch.float32, torch.float64))
case("pow.Tensor_Tensor", t(3, 4, low=1, high=3), t(4, low=0, high=3), dtypes=NUMBERS)
case("pow.Scalar", 2, t(3, 4, low=0, high=3), dtypes=NUMBERS)
for exponent in (0, 1, 2, 3, 7):
    case("pow.Tensor_Scalar", t(3, 4), exponent, dtypes=(torch.float32, torch.float64, torch.int64))
for exponent in (0.5, -1.5):
    case("pow.Tensor_Scalar", t(3, 4, low=0.5, high=2), exponent)
case("atan2", t(3, 4), t(4, low=1, high=2), dtypes=FLOATS)
for name in ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"):
    scalar = "Tensor_Scalar" if "bitwise" in name else "Scalar"
    case(f"{name}.Tensor", t(3, 4, low=0, high=9), t(4, low=0, high=3), dtypes=INTEGERS)
    case(f"{name}.{scalar}", t(3, 4, low=0, high=9), 2, dtypes=INTEGERS)
case("ldexp.Tensor", t(3, 4), Of((4,), -3, 3, torch.int32))
case("view.dtype", t(3, 4), torch.int32, dtypes=(torch.float32,))
case("view.dtype", t(3, 4), torch.int16, dtypes=(torch.float16, torch.bfloat16))
for name in ("eq", "ge", "gt", "le", "lt", "ne"):
    case(f"{name}.Tensor", t(3, 4), t(4), dtypes=ALL)
    case(f"{name}.Tensor", t(3, 4), Of((4,), dtype=torch.float32), dtypes=INTEGERS)
    case(f"{name}.Scalar", t(3, 4), 1, dtypes=NUMBERS)
    case(f"{name}.Scalar", t(3, 4), 0.5, dtypes=NUMBERS)
    case(f"{name}.Scalar", t(3, 4), -1, dtypes=(torch.uint8,))
for name in ("and", "or", "xor"):
    case(f"logical_{name}", t(3, 4), t(4), dtypes=ALL)
    case(f"bitwise_{name}.Tensor", t(3, 4), t(4), dtypes=(*INTEGERS, torch.bool))
    case(f"bitwise_{name}.Scalar", t(3, 4), 5, dtypes=INTEGERS)
case("clamp", t(3, 4), -1, 1, dtypes=NUMBERS)
case("clamp", t(3, 4), None, 0.5)
case("clamp", t(3, 4), 1.0, -1.0)
case("clamp.Tensor", t(3, 4), t(4, high=0), t(3, 1, low=0), dtypes=NUMBERS)
case("where.self", mask(3, 4), t(4), t(3, 1), dtypes=ALL)
case("where.self", mask(3, 4), t(3, 4), Of((), dtype=torch.float64), dtypes=FLOATS)
case("_to_copy", t(3, 4), dtype=torch.float32, dtypes=ALL)
case("_to_copy", t(3, 4, low=0), dtype=torch.int64, dtypes=ALL)
case("_to_copy", t(3, 4), dtype=torch.bfloat16, dtypes=ALL)
case("_to_copy", t(3, 4), dtype=torch.bool, dtypes=ALL)
case("clone", t(3, 4), dtypes=ALL)
case("alias", t(3, 4), dtypes=ALL)
case("copy", t(3, 4), t(4), dtypes=ALL)
case("copy", t(3, 4), Of((4,), dtype=torch.float64), dtypes=NUMBERS)

# Rows and products

for name in ("_softmax", "_log_softmax"):
    case(name, t(3, 4), -1, False)
    case(name, t(3, 4, 2), 1, False)
    case(name, t(), 0, False, dtypes=(torch.float32,))
case("mm", t(3, 4), t(4, 5), dtypes=(*FLOATS, torch.int64))
case("bmm", t(2, 3, 4), t(2, 4, 5), dtypes=FLOATS)
case("addmm", t(5), t(3, 4), t(4, 5))
case("addmm", t(3, 5), t(3, 4), t(4, 5), beta=0.5, alpha=2)
case("addbmm", t(3, 5), t(2, 3, 4), t(2, 4, 5), beta=0.5, alpha=2, dtypes=_WIDE)
case("_int_mm", t(32, 16), t(16, 8), dtypes=(torch.int8,))
case("_trilinear", t(3, 4), t(5, 4, 6), t(3, 6), [1, 3], [0], [1, 2], [2, 3], dtypes=_WIDE)
case("dist", t(3, 4), t(4), 3.0, dtypes=_WIDE)
for p in (0.0, 1.0, 2.0, 3.0, float("inf")):
    case("_cdist_forward", t(2, 3, 4), t(2, 5, 4), p, None, dtypes=(torch.float32, torch.float64))
    case("_pdist_forward", t(5, 4), p, dtypes=(torch.float32, torch.float64))
case("native_layer_norm", t(3, 4, 6), [6], t(6), t(6), 1e-5)
case("native_layer_norm", t(3, 4, 6), [4, 6], None, None, 1e-5)
case("native_group_norm", t(2, 6, 4), t(6), t(6), 2, 6, 4, 3, 1e-5)
case("native_group_norm", t(2, 6, 4), None, None, 2, 6, 4, 2, 1e-5)
case(
    "native_group_norm_backward", t(2, 6, 4), t(2, 6, 4), t(2, 3), t(2, 3, low=0.5), t(6), 2, 6, 4, 3,
    [True, True, True], dtypes=(torch.float32, torch.float64),
)  # fmt: skip
_MOMENTS = (t(4), t(4, low=0.5, high=2))
case("_native_batch_norm_legit_no_training", t(2, 4, 3, 3), t(4), t(4), *_MOMENTS, 0.1, 1e-5)
case("_native_batch_norm_legit_no_training", t(5, 4), None, None, *_MOMENTS, 0.1, 1e-5, dtypes=_WIDE)
case("_native_batch_norm_legit.no_stats", t(2, 4, 3), t(4), t(4), True, 0.1, 1e-5, dtypes=_WIDE)

# Reductions

for name in ("amax", "amin"):
    case(name, t(3, 4, 2), dtypes=ALL)
    case(name, t(3, 4, 2), [0, -1], True, dtypes=NUMBERS)
for name in ("argmax", "argmin"):
    case(name, apart(3, 4, 2), None, dtypes=NUMBERS[:-1])
    case(name, apart(3, 4, 2), 1, True, dtypes=NUMBERS[:-1])
for name in ("max", "min"):
    case(f"{name}.dim", apart(3, 4, 2), 1, dtypes=NUMBERS[:-1])
    case(f"{name}.dim", apart(3, 4), -1, True, dtypes=NUMBERS[:-1])
case("any", t(3, 4), dtypes=ALL)
case("any.dim", t(3, 4), 1, dtypes=ALL)
case("any.dims", t(3, 4, 2), [0, 2], True, dtypes=ALL)
case("mean", t(3, 4))
case("mean.dim", t(3, 4, 2), [0, 2], True)
case("mean.dim", t(3, 4), [1], dtype=torch.float32, dtypes=NUMBERS)
case("sum.dim_IntList", t(3, 4, 2), [1], dtypes=ALL)
case("sum.dim_IntList", t(3, 4, 2), [], True, dtypes=ALL)
case("sum.dim_IntList", t(3, 4), [0], dtype=torch.float64, dtypes=NUMBERS)
case("prod", t(3, 2), dtypes=ALL)
case("prod.dim_int", t(3, 4), 1, True, dtypes=NUMBERS)
case("var.correction", t(3, 4, 5), [0, 2])
case("var.correction", t(3, 4, 5), [1], correction=0, keepdim=True)
case("var.dim", t(3, 4, 5), [2], False, dtypes=_WIDE)
case("cumsum", t(3, 4), 1, dtypes=ALL)
case("cumsum", t(3, 4), 0, dtype=torch.float32, dtypes=(torch.int32,))
for name in ("cummax", "cummin"):
    case(name, t(3, 7), 1, dtypes=ALL)
    case(name, t(5, 2), 0, dtypes=(torch.float32,))
    case(name, t(), 0, dtypes=(torch.float32,))
case("logcumsumexp", t(3, 7), 1)

# Shapes

case("view", t(3, 4), [2, 6], dtypes=ALL)
case("view", t(3, 4), [-1], dtypes=ALL)
case("permute", t(2, 3, 4), [2, 0, -2], dtypes=ALL)
case("expand", t(3, 1), [2, -1, 4], dtypes=ALL)
case("unsqueeze", t(3, 4), -2, dtypes=ALL)
case("squeeze.dim", t(3, 1, 4), 1, dtypes=ALL)
case("squeeze.dim", t(3, 4), 0, dtypes=ALL)
case("squeeze.dims", t(1, 3, 1), [0, -1], dtypes=ALL)
case("slice.Tensor", t(5, 4), 0, 1, 9, 2, dtypes=ALL)
case("slice.Tensor", t(5, 4), 1, -3, -1, dtypes=ALL)
case("select.int", t(3, 4), 1, -2, dtypes=ALL)
case("split_with_sizes", t(5, 4), [1, 0, 4], dtypes=ALL)
case("cat", [t(2, 3), t(1, 3), t(4, 3)], dtypes=ALL)
case("cat", [t(2, 3), Of((2, 2), dtype=torch.float32)], 1, dtypes=NUMBERS)
case("repeat", t(2, 3), [2, 1, 3], dtypes=ALL)
case("flip", t(2, 3, 4), [0, -1], dtypes=ALL)
case("constant_pad_nd", t(2, 3), [1, 2, 0, 1], 3, dtypes=ALL)
case("constant_pad_nd", t(4, 5), [-1, 1], 0, dtypes=NUMBERS)
case("reflection_pad1d", t(2, 5), [2, 1])
case("reflection_pad2d", t(2, 4, 5), [2, 1, 1, 0])
case("reflection_pad3d", t(1, 2, 3, 4, 5), [1, 1, 2, 0, 1, 2])
case("replication_pad2d", t(2, 4, 5), [2, 1, 1, 3])
case("replication_pad3d", t(1, 2, 3, 4, 5), [1, 1, 2, 0, 1, 2])
case("diagonal", t(3, 4, 5), 1, 0, 2, dtypes=ALL)
case("diagonal", t(4, 3), -2, dtypes=ALL)
case("as_strided", t(3, 4), [2, 2, 3], [1, 4, 2], 1, dtypes=ALL)

# Places

case("embedding", t(6, 3), at(2, 4, below=6))
case("index_select", t(4, 5, 2), 1, at(3, below=5), dtypes=ALL)
case("gather", t(4, 5), 1, at(3, 2, below=5), dtypes=ALL)
case("index.Tensor", t(4, 5, 2), [at(3, below=4)], dtypes=ALL)
case("index.Tensor", t(4, 5, 2), [None, at(3, 1, below=5), at(2, below=2)], dtypes=ALL)
case("index.Tensor", t(4, 5, 2), [at(3, below=4), None, at(3, below=2)], dtypes=ALL)
case("index_put", t(4, 5), [at(3, below=4)], t(5), True)
case("index_put", t(8, 5), [Of((4,), distinct=True, dtype=torch.int64)], t(4, 5), dtypes=ALL)
case("index_put", t(4, 5, 2), [None, Of((3,), -5, -5, torch.int64)], t(1), dtypes=NUMBERS)
case("index_put", t(4, 5), [mask(4, 5)], t(), dtypes=ALL)
case("scatter.src", t(4, 5), 0, Of((3, 1), 0, 0, torch.int64), t(3, 2), dtypes=ALL)
case("scatter.value", t(4, 5), 1, at(4, 2, below=5), 7, dtypes=NUMBERS)
case("scatter_add", t(4, 5), 1, at(4, 6, below=5), t(4, 7))
case("put", t(4, 5), Of((3,), distinct=True, dtype=torch.int64), t(3), dtypes=ALL)
case("put", t(4, 5), at(3, 2, below=20), t(3, 2), True)
for how in ("prod", "mean", "amax", "amin"):
    for own in (True, False):
        case(
            "index_reduce", t(4, 5), 1, at(3, below=5), t(4, 3), how, include_self=own,
            dtypes=(torch.float32, torch.float64, torch.int64),
        )  # fmt: skip
case("diagonal_scatter", t(4, 5), t(3), 2, dtypes=ALL)
case("diagonal_scatter", t(3, 4, 2), t(4, 2), 0, 0, -1, dtypes=_WIDE)
for how in ("sum", "prod", "mean", "amax", "amin"):
    for own in (True, False):
        case(
            "scatter_reduce.two", t(4, 5), 0, at(6, 5, below=4), t(6, 5), how, include_self=own,
            dtypes=(torch.float32, torch.float64, torch.int64),
        )  # fmt: skip
case("select_scatter", t(4, 5), t(4), 1, -2, dtypes=ALL)
case("slice_scatter", t(4, 5), t(4, 2), 1, 1, 5, 2, dtypes=ALL)
case("masked_scatter", t(4, 5), mask(4, 5), t(20), dtypes=ALL)
case("sort", apart(3, 7), dtypes=NUMBERS[:-1])
case("sort", apart(3, 7), 0, True, dtypes=NUMBERS[:-1])
case("median.dim", apart(3, 7), 1, dtypes=NUMBERS[:-1])
case("median.dim", apart(4, 6), 0, True, dtypes=NUMBERS[:-1])
for name in ("median", "nanmedian"):
    case(name, apart(4, 6), dtypes=NUMBERS[:-1])
case("nanmedian.dim", apart(4, 6), 0, True, dtypes=NUMBERS[:-1])
case("kthvalue", apart(4, 6), 3, dtypes=NUMBERS[:-1])
case("kthvalue", apart(4, 6), 1, 0, True, dtypes=(torch.float32,))
_ROWS = Of((2, 5), -2, -2, torch.float32)
for right in (False, True):
    case("searchsorted.Tensor", _ROWS, t(2, 3), right=right, dtypes=(torch.float32,))
case("topk", apart(3, 7), 4, dtypes=NUMBERS[:-1])
case("topk", apart(3, 7), 2, 0, False, dtypes=NUMBERS[:-1])
_BAG = (t(9, 4), at(8, below=9), Of((3,), 0, 0, torch.int64))
case("_embedding_bag", *_BAG, dtypes=_WIDE)

# Windows

_CONVOLUTIONS: tuple[tuple[Any, ...], ...] = (
    (t(2, 4, 9), t(6, 2, 3), t(6), [2], [1], [2], False, [0], 2),
    (t(2, 3, 8, 7), t(5, 3, 3, 2), t(5), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    (t(2, 4, 6, 6), t(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    (t(1, 2, 4, 5, 4), t(3, 2, 2, 3, 2), t(3), [1, 2, 1], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    (t(2, 4, 5, 5), t(4, 3, 3, 3), t(6), [2, 2], [1, 1], [1, 1], True, [1, 0], 2),
    (t(1, 3, 6), t(3, 2, 4), None, [3], [1], [1], True, [0], 1),
)
for arguments in _CONVOLUTIONS:
    case("convolution", *arguments, dtypes=_WIDE)
case("convolution", *_CONVOLUTIONS[1], dtypes=(torch.float16, torch.bfloat16))
case("max_pool2d_with_indices", apart(1, 2, 7, 6), [3, 2], [2, 2], [1, 0], [1, 2], True)
case("max_pool2d_with_indices", apart(2, 6, 6), [2, 2], dtypes=_WIDE)
case("max_pool3d_with_indices", apart(1, 2, 4, 5, 4), [2, 2, 2], [1, 2, 2], dtypes=_WIDE)
case("avg_pool1d", t(2, 3, 8), [3], [2], [1], True)
case("avg_pool2d", t(2, 3, 7, 6), [3, 2], [2, 2], [1, 1], True, False)
case("avg_pool2d", t(3, 7, 6), [2, 2], [], [0, 0], False, True, 3)
case("avg_pool3d", t(1, 2, 4, 5, 4), [2, 2, 2], [1, 2, 2], [1, 0, 1], dtypes=_WIDE)
case("adaptive_avg_pool1d", t(2, 3, 7), [3])
case("_adaptive_avg_pool2d", t(2, 3, 7, 5), [3, 2])
case("_adaptive_avg_pool2d", t(2, 3, 7, 5), [1, 1])
case("_adaptive_avg_pool3d", t(2, 3, 4, 7, 5), [2, 3, 2], dtypes=_WIDE)
case("adaptive_max_pool2d", apart(2, 3, 7, 5), [3, 2])
case("adaptive_max_pool3d", apart(1, 2, 4, 5, 3), [3, 2, 2], dtypes=_WIDE)
case("col2im", t(2, 12, 14), [5, 6], [2, 2], [1, 1], [0, 1], [2, 1], dtypes=_WIDE)
for mode in (0, 1, 2):
    for border in (0, 1, 2):
        case(
            "grid_sampler_2d", t(2, 3, 4, 5), t(2, 3, 2, 2, low=-1.2, high=1.2), mode, border, border == 1,
            dtypes=_WIDE,
        )  # fmt: skip
case("grid_sampler_3d", t(2, 3, 4, 5, 3), t(2, 3, 2, 2, 3, low=-1.2, high=1.2), 0, 1, True, dtypes=_WIDE)
case("grid_sampler_3d", t(2, 3, 4, 5, 3), t(2, 3, 2, 2, 3, low=-1.2, high=1.2), 1, 0, False, dtypes=_WIDE)
case("upsample_bilinear2d.vec", t(1, 2, 4, 5), [7, 3], True, None, dtypes=_WIDE)
case("upsample_bilinear2d.vec", t(1, 2, 4, 5), None, False, [2.0, 1.5], dtypes=_WIDE)
case("upsample_nearest2d.vec", t(1, 2, 4, 5), [7, 3], None)
case("upsample_nearest2d.vec", t(1, 2, 4, 5), None, [2.0, 1.5])
for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    for sizes in ([3, 2], [6, 9]):
        case(name, t(1, 2, 7, 5), sizes, False, dtypes=_WIDE)

# Made from nothing, or from the type of a tensor

case("full_like", t(3, 4), 2, dtypes=ALL)
case("full_like", t(3, 4), 2.5, dtype=torch.float32, dtypes=NUMBERS)
case("fill.Scalar", t(3, 4), 3, dtypes=ALL)
case("full", [2, 3], 1.5, dtypes=_WIDE[:1])
case("arange.start_step", 1, 9, 2, dtypes=_WIDE[:1])
case("scalar_tensor", 2.5, dtype=torch.float64, dtypes=_WIDE[:1])
