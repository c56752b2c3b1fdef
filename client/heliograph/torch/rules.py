"""The registry of rules: the function that expresses each op of ATen.

A rule is given its node, and then all arguments of the op's schema in their order, with defaults
filled in. Tensors are values of the graph. Its results are cast to the data types that torch gives
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule:
    """The function that expresses an op.

    `host`: tensors that are known before a run are given as tensors of torch.
    """

    function: Callable[..., Any]
    host: bool = False


#: Rules by the name of the op, "add", of one overload, "var.dim", or of a prim, "prims.fma".
RULES: dict[str, Rule] = {}
#: Activations for which there is one op here; PyTorch would make several of them.
ACTIVATIONS = frozenset({"hardsigmoid", "hardswish", "silu", "softplus"})
_COMPLEX = ("there are no complex numbers", "compute their parts, or leave the transform on the host")
_COUNTED = ("the shape of its result depends on what a run computes", "use torch.where, or a mask")
_MATRICES = (
    "there are no decompositions, inverses and solutions of matrices",
    "compute it on the host before, or by torch.compile, whose graph breaks around a function with "
    "torch.compiler.disable; products, norms and powers of matrices have rules",
)
#: Why an op that writes into its operands is refused, and what to do.
MUTABLE = ("it writes into a tensor", "torch.export and torch.compile replace such ops: lower what they give")
_OF_MATRICES = (
    *("_cholesky_solve_helper", "_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet"),
    *("_linalg_solve_ex", "_linalg_svd", "cholesky", "cholesky_inverse", "cholesky_solve", "geqrf"),
    *("linalg_cholesky_ex", "linalg_eig", "linalg_eigvals", "linalg_householder_product"),
    *("linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lstsq", "linalg_lu"),
    *("linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp", "linalg_pinv", "linalg_qr"),
    *("linalg_solve_triangular", "lu_unpack", "ormqr", "triangular_solve"),
)
#: Why an op is refused, by its name, and what to do.
REFUSED: dict[str, tuple[str, str]] = {
    "_fft_c2c": _COMPLEX,
    "_fft_c2r": _COMPLEX,
    "_fft_r2c": _COMPLEX,
    "complex": _COMPLEX,
    "masked_select": _COUNTED,
    "nonzero": _COUNTED,
    "repeat_interleave": _COUNTED,
    "resize_": ("it changes the memory of a tensor", "use view or reshape"),
    "_unique2": _COUNTED,
    "unique_consecutive": _COUNTED,
    "unique_dim": _COUNTED,
    "view_as_complex": _COMPLEX,
    "view_as_real": _COMPLEX,
    **dict.fromkeys(_OF_MATRICES, _MATRICES),
}
#: Ops whose result differs from call to call, which are therefore never computed on the host.
RANDOM = frozenset(
    {
        "bernoulli",
        "multinomial",
        "native_dropout",
        "normal_functional",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "uniform",
    }
)


def rule(*ops: str, host: bool = False) -> Callable[[_Function], _Function]:
    """Register a rule for ops."""

    def register(function: _Function) -> _Function:
        for op in ops:
            RULES[op] = Rule(function, host)
        return function

    return register


def find(target: Any) -> Rule | None:
    """Return the rule of an overload of ATen's, or of one of torch's prims; else None."""
    name = target._schema.name.rpartition("::")[2]
    if target.namespace == "prims":
        return RULES.get(f"prims.{name}")
    found = RULES.get(f"{name}.{target._overloadname}") or RULES.get(name)
    return found if target.namespace == "aten" else None
