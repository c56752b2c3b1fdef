"""Names that people look for under `hg.`: near ones, and NumPy's for what the array API calls otherwise."""

from __future__ import annotations

import sys
from difflib import get_close_matches

from heliograph_proto.types import DTYPES

#: What serves for a name that NumPy or others have.
SYNONYMS = {
    "absolute": "hg.abs",
    "amax": "hg.max",
    "amin": "hg.min",
    "array": "g.constant(array)",
    "asarray": "g.constant(array)",
    "average": "hg.mean",
    "bitwise_and": "hg.logical_and",
    "bitwise_not": "hg.logical_not",
    "bitwise_or": "hg.logical_or",
    "bitwise_xor": "hg.logical_xor",
    "cast": "hg.astype",
    "concatenate": "hg.concat",
    "dot": "hg.matmul",
    "einsum": "hg.matmul, hg.vecdot or hg.tensordot",
    "empty": "hg.zeros, or session.empty for a tensor",
    "fabs": "hg.abs",
    "fix": "hg.trunc",
    "float_power": "hg.pow",
    "gather": "hg.take",
    "hstack": "hg.concat",
    "inner": "hg.vecdot",
    "invert": "hg.logical_not",
    "layernorm": "hg.layer_norm",
    "log10": "hg.log(x) / math.log(10)",
    "log2": "hg.log(x) / math.log(2)",
    "mod": "hg.remainder",
    "moveaxis": "hg.permute_dims",
    "newaxis": "None, as in x[:, None]",
    "power": "hg.pow",
    "product": "hg.prod",
    "ravel": "hg.flatten",
    "rint": "hg.round",
    "swapaxes": "hg.permute_dims",
    "tan": "hg.sin(x) / hg.cos(x)",
    "transpose": "hg.permute_dims, or .T and .mT",
    "true_divide": "hg.divide",
    "vstack": "hg.concat",
}


def numpy_advice(name: str) -> str:
    """What to do instead of calling a function of NumPy on a value."""
    found = _exact(name)
    return f"use {found}" if found else "what there is for values is listed by dir(hg) and dir(hg.ops)"


def hint(name: str) -> str:
    """What somebody who asks for hg.NAME may mean; empty when nothing is like it."""
    if name.startswith("_"):
        return ""
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
