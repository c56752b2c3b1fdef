"""Every op's cases, as graphs of one node, and the comparison with what they expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import op_cases_activations
import op_cases_attention
import op_cases_basic
import op_cases_elementary
import op_cases_patches
import op_cases_products
import op_cases_recurrent
import op_cases_reductions
import op_cases_rope
import op_cases_training
import op_cases_windows
from backend_graphs import Array, Maker, normalised_error
from op_cases import Case, Cases, narrow
from op_cases_basic import slicing

from heliograph_proto.ops.table import EXACT, OPS

#: The CPU stays within this even where a row allows other devices more.
TIGHT = 1e-6

_FAMILIES = (
    op_cases_activations, op_cases_attention, op_cases_basic, op_cases_elementary, op_cases_products,
    op_cases_reductions, op_cases_rope, op_cases_windows, op_cases_training, op_cases_recurrent,
    op_cases_patches,
)  # fmt: skip
CASES: dict[str, Cases] = {op: cases for family in _FAMILIES for op, cases in family.CASES.items()}


def as_it_is(made: Maker, array: Array) -> int:
    return made.input(array)


def permuted(made: Maker, array: Array) -> int:
    """The array, as a view of its transpose."""
    axes = tuple(reversed(range(array.ndim)))
    return made.node("permute", made.input(array.transpose(axes).copy()), axes=axes)


def sliced(made: Maker, array: Array) -> int:
    """The array, as every second element along every dimension of a larger one."""
    larger = np.ones(tuple(2 * size + 1 for size in array.shape), array.dtype)
    larger[tuple(slice(1, None, 2) for _ in array.shape)] = array
    attributes = slicing((1,) * array.ndim, larger.shape, (2,) * array.ndim)
    return made.node("slice", made.input(larger), **attributes)


LAYOUTS = (as_it_is, permuted, sliced)


def made_of(case: Case, layout: Callable[[Maker, Array], int], *, chain: bool = False) -> Maker:
    """The graph of one node, its operands laid out so; `chain` puts two more nodes behind it."""
    made = Maker()
    operands = [layout(made, array) for array in case.operands]
    if case.op == "assign":
        operands[0] = made.variable(case.operands[0])
    value = made.node(case.op, *operands, **case.attributes)
    if chain:
        value = made.node("neg", made.node("neg", value))
    made.output(value)
    return made


def check(case: Case, found: Array) -> None:
    """Compares with the reference as the op's row says."""
    expected = narrow(case.expected, found.dtype)
    about = f"{case.op}{[(str(a.dtype), a.shape) for a in case.operands]} {dict(case.attributes)}"
    assert found.shape == expected.shape, about
    if found.dtype.kind != "f" or OPS[case.op].tolerance == EXACT:
        np.testing.assert_array_equal(found, expected, err_msg=about)
        return
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=f"NaN: {about}")
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(np.where(np.isinf(found), found, 0), np.where(infinite, expected, 0), about)
    reference = np.where(infinite, expected, case.expected)
    error = normalised_error(found, reference)
    # A float16 cannot be nearer than its own rounding, which is more than most rows allow.
    rounding = normalised_error(expected, reference) if found.dtype == np.float16 else 0.0
    assert error <= min(OPS[case.op].tolerance, TIGHT) + 2 * rounding, f"error {error}: {about}"


def layouts_of(number: int) -> Callable[[Maker, Array], int]:
    return LAYOUTS[number % len(LAYOUTS)]


def cases_of(op: str, random: np.random.Generator) -> Iterator[Case]:
    # The references divide by zero and overflow where they should.
    with np.errstate(all="ignore"):
        yield from CASES[op](op, random)
