"""Suggestions for names that `hg` lacks: near names, and NumPy's names for array API functions."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches

from heliograph_proto.types import DTYPES

#: The replacement for a name of NumPy or others.
SYNONYMS = {
    "absolute": "hg.abs",
    "amax": "hg.max",
    "amin": "hg.min",
    "arccos": "hg.acos",
    "arccosh": "hg.acosh",
    "arcsin": "hg.asin",
    "arcsinh": "hg.asinh",
    "arctan": "hg.atan",
    "arctan2": "hg.atan2",
    "arctanh": "hg.atanh",
    "array": "g.constant(array) or hg.asarray",
    "average": "hg.mean",
    "bitwise_not": "hg.bitwise_invert",
    "cast": "hg.astype",
    "compress": "hg.take_masked",
    "concatenate": "hg.concat",
    "conjugate": "hg.conj",
    "cumprod": "hg.cumulative_prod",
    "cumsum": "hg.cumulative_sum",
    "dot": "hg.matmul",
    "e": "math.e",
    "fabs": "hg.abs",
    "fix": "hg.trunc",
    "float_power": "hg.pow",
    "gather": "hg.take",
    "hstack": "hg.concat",
    "identity": "hg.eye",
    "inf": "math.inf",
    "inner": "hg.vecdot",
    "invert": "hg.bitwise_invert",
    "layernorm": "hg.layer_norm",
    "left_shift": "hg.bitwise_left_shift",
    "mod": "hg.remainder",
    "nan": "math.nan",
    "newaxis": "None, as in x[:, None]",
    "pi": "math.pi",
    "power": "hg.pow",
    "product": "hg.prod",
    "ravel": "hg.flatten",
    "right_shift": "hg.bitwise_right_shift",
    "rint": "hg.round",
    "swapaxes": "hg.moveaxis or hg.permute_dims",
    "transpose": "hg.permute_dims, or .T and .mT",
    "true_divide": "hg.divide",
    "vstack": "hg.concat",
}

_BY_VALUES = "shapes are static, and that of its result would depend on values"
#: Names of the array API that hg lacks, and the reason.
ABSENT = {
    "fft": "there are no Fourier transforms",
    "imag": "no data type is complex",
    "linalg": "there are no decompositions; products are under hg. itself",
    "nonzero": _BY_VALUES,
    "unique_all": _BY_VALUES,
    "unique_counts": _BY_VALUES,
    "unique_inverse": _BY_VALUES,
    "unique_values": _BY_VALUES,
}


_NOT_YET = "a value has no elements while the graph is built: name it as an output, and run the plan"
_ANY_DEVICE = "a plan has devices: session.compile(graph, devices=...)"
_ITSELF = "values never change and have no memory: use the value itself"
#: Advice for methods and attributes of arrays of NumPy and tensors of torch that values lack.
_METHODS = {
    **dict.fromkeys(("item", "numpy", "tobytes", "tolist"), _NOT_YET),
    **dict.fromkeys(("cpu", "cuda", "device"), _ANY_DEVICE),
    **dict.fromkeys(("clone", "contiguous", "copy"), _ITSELF),
    **dict.fromkeys(("backward", "grad", "requires_grad"), "use hg.grad or hg.value_and_grad"),
    **dict.fromkeys(
        ("bool", "double", "float", "half", "int", "long", "to", "type_as"), "use x.astype(dtype)"
    ),
    "addmm": "use x + a @ b",
    "bmm": "use x @ y",
    "chunk": "use hg.unstack, or slices",
    "clamp": "use hg.clip",
    "detach": "use hg.stop_gradient",
    "dim": "use x.ndim",
    "expand": "use hg.broadcast_to",
    "fill": "use hg.full_like",
    "gather": "use hg.take_along_axis",
    "index_select": "use hg.take",
    "masked_fill": "use hg.where",
    "mm": "use x @ y",
    "norm": "use hg.sqrt and hg.sum",
    "numel": "use x.size",
    "permute": "use hg.permute_dims",
    "split": "use slices",
    "t": "use x.T",
    "topk": "use hg.sort or hg.argsort, and a slice",
    "unbind": "use hg.unstack",
    "unsqueeze": "use hg.expand_dims",
    "view": "use x.reshape",
}


def method_advice(name: str, known: Iterable[str]) -> str:
    """Advise on an attribute that a value lacks; `known`: those that it has. Empty without advice."""
    if name.startswith("_"):
        return ""
    plain = name.removesuffix("_")
    if found := _METHODS.get(name) or _METHODS.get(plain):
        return f"; {found}"
    if exact := _exact(plain):
        return f"; use {exact}" if plain == name else f"; values never change: use the result of {exact}"
    near = get_close_matches(name, [one for one in known if not one.startswith("_")], 1, cutoff=0.75)
    return f"; did you mean .{near[0]}?" if near else hint(name)


def numpy_advice(name: str) -> str:
    """Advise on a function of NumPy that was called on a value."""
    if name in ABSENT:
        return f"hg has none: {ABSENT[name]}"
    found = _exact(name)
    return f"use {found}" if found else "what there is for values is listed by dir(hg) and dir(hg.ops)"


def hint(name: str) -> str:
    """Suggest a name for an unknown hg.NAME, or say why it is missing; empty without a near
    name."""
    if name.startswith("_"):
        return ""
    if name in ABSENT:
        return f": {ABSENT[name]}"
    plain = [
        row for row in DTYPES.values() if name in (row.name, row.numpy_name) or f"{row.numpy_name}_" == name
    ]
    if plain:
        return f"; data types are strings: {plain[0].name!r}"
    near = get_close_matches(name, _known(), 1, cutoff=0.75)
    found = _exact(name) or (f"hg.{near[0]}" if near else "")
    return f"; did you mean {found}?" if found else ""


def _exact(name: str) -> str:
    if name in SYNONYMS:
        return SYNONYMS[name]
    return f"hg.{name}" if name in _known() else ""


def _known() -> list[str]:
    return list(getattr(sys.modules.get("heliograph"), "__all__", ()))
