"""Gradients of every op against differences of its results, and which ops have none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from backend_graphs import Array
from op_cases import SEED, Case
from op_cases_all import cases_of

import heliograph as hg
from heliograph.autodiff.table import FLAT, REFUSED, RULES
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import F64, TensorType

#: Cases for each op, and directions for each operand of one.
CASES, DIRECTIONS = 4, 2
#: By the data type of the result: the length of a step, and the error that its rounding explains.
STEPS = {"f64": (1e-6, 2e-5), "f32": (1e-2, 5e-3)}
#: Operands whose shape alone matters, or which choose: no gradient reaches them.
UNREACHED = {
    ("im2col", 0), ("im2col_3d", 0), ("im2col_back", 1), ("pool_2d_back", 1), ("cpy", 1), ("copysign", 1),
    ("assign", 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def session() -> Iterator[hg.Session]:
    with hg.connect("local:") as made:
        # Its threads start before the first test.
        made.synchronize()
        made.compute(ones())["y"]
        yield made


def ones() -> hg.Graph:
    g = hg.Graph()
    g.output("y", hg.ones(3, graph=g))
    return g


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def differentiable(op: str, random: np.random.Generator) -> Iterator[Case]:
    """Cases in float64, of other shapes or attributes each, a little off kinks and ties."""
    seen = set()
    for case in cases_of(op, random):
        form = (*(one.shape for one in case.operands), str(sorted(case.attributes.items(), key=str)))
        operands = [off_ties(one, random) if one.dtype.kind == "f" else one for one in case.operands]
        if op == "rope" or op == "rope_back":
            # Its factors are f32 whatever the rows are.
            operands[2:] = case.operands[2:]
        if op.endswith("_rows") and op != "sum_rows" and case.operands[0].dtype.kind != "f":
            continue
        if form in seen or not any(one.dtype == np.float64 and one.size for one in operands):
            continue
        seen.add(form)
        wide = {"dtype": F64} if any(one.name == "dtype" for one in OPS[op].attributes) else {}
        yield Case(op, operands, case.expected, {**case.attributes, **wide})


def off_ties(array: Array, random: np.random.Generator) -> Array:
    return np.asarray(array.astype(np.float64) * (1 - random.uniform(1e-3, 1e-2, array.shape)))


class Differences:
    """The loss of one node's result, and its gradients as hg.grad builds them."""

    def __init__(self, session: hg.Session, case: Case, random: np.random.Generator) -> None:
        g = hg.Graph()
        self.operands = [np.asarray(one) for one in case.operands]
        values = [g.input(f"x{place}", one.shape, one.dtype) for place, one in enumerate(self.operands)]
        if case.op == "assign":
            values[0] = g.variable(f"v{values[0].shape}", values[0].shape, values[0].dtype)
        y = g.apply(case.op, values, case.attributes)
        self.kind, self.fits = y.dtype.name, y.dtype.name in STEPS and y.size > 0
        self.places = [] if not self.fits else [
            place for place, one in enumerate(self.operands)
            if one.dtype == np.float64 and one.size and (case.op, place) not in UNREACHED
        ]  # fmt: skip
        if not self.places:
            return
        finite = hg.where(hg.isfinite(y), hg.astype(y, "f64"), 0.0)
        loss = hg.sum(finite * random.standard_normal(y.shape))
        g.output("loss", loss)
        gradients = hg.grad(loss, [values[place] for place in self.places])
        for place, gradient in zip(self.places, gradients, strict=True):
            assert gradient.type == values[place].type
            g.output(f"d{place}", gradient)
        self.names = set(g.inputs)
        self.plan = session.compile(g)
        self.found = self.plan.run(self.feeds(self.operands))

    def feeds(self, operands: list[Array]) -> dict[str, Array]:
        named = {f"x{place}": one for place, one in enumerate(operands)}
        return {name: one for name, one in named.items() if name in self.names}

    def check(self, place: int, direction: Array) -> None:
        """The slope along a direction, by the gradient and by a difference."""
        length, tolerance = STEPS[self.kind]
        ends = []
        for sign in (1, -1):
            moved = list(self.operands)
            moved[place] = moved[place] + sign * length * direction
            ends.append(float(self.plan.run(self.feeds(moved))["loss"]))
        gradient = self.found[f"d{place}"]
        by_gradient, by_difference = float((gradient * direction).sum()), (ends[0] - ends[1]) / (2 * length)
        scale = 1e-3 + abs(by_gradient) + 1e-4 * np.abs(gradient).sum()
        assert abs(by_gradient - by_difference) <= tolerance * scale, (place, by_gradient, by_difference)


@pytest.mark.parametrize("op", sorted(RULES))
def test_a_gradient_is_the_slope_of_the_result(
    op: str, session: hg.Session, random: np.random.Generator
) -> None:
    checked = 0
    for case in islice(differentiable(op, random), 40):
        if checked == CASES:
            break
        differences = Differences(session, case, random)
        if not differences.places:
            continue
        checked += 1
        print(op, [one.shape for one in case.operands], dict(case.attributes))
        for place in differences.places:
            for _ in range(DIRECTIONS):
                differences.check(place, random.standard_normal(case.operands[place].shape))
        differences.plan.free()
    assert checked


def test_every_op_has_a_rule_or_a_reason() -> None:
    assert not RULES.keys() & FLAT and not RULES.keys() & REFUSED.keys() and not FLAT & REFUSED.keys()
    for op in OPS.keys() - RULES.keys() - FLAT - REFUSED.keys():
        # The others give integers or bool, or have no operands.
        assert op in WHOLE, op


#: Ops whose results are no floats, or that read nothing.
WHOLE = {
    "logical_not", "isnan", "isinf", "isfinite", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_xor", "argmax", "fill", "arange", "signbit",
    "bitwise_invert", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift",
    "count_equal", "philox", "argsort", "top_k", "searchsorted",
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(REFUSED))
def test_an_op_without_a_gradient_is_refused_by_name(op: str, random: np.random.Generator) -> None:
    case = next(iter(cases_of(op, random)))
    g = hg.Graph()
    values = [g.input(f"x{place}", one.shape, one.dtype) for place, one in enumerate(case.operands)]
    made = g.apply(op, values, case.attributes)
    with pytest.raises(hg.InvalidGraphError, match=f"{op} has no gradient") as caught:
        hg.grad(hg.sum(hg.astype(made, "f64")), values[0])
    assert "g.apply(op, values" in caught.value.origin.source


@pytest.mark.parametrize("op", sorted(FLAT))
def test_an_op_of_jumps_is_refused_where_it_is_the_only_way(op: str) -> None:
    g = hg.Graph()
    x = g.input("x", (3,), "f64")
    made = g.apply(op, [x] * len(OPS[op].operands), {})
    with pytest.raises(hg.InvalidGraphError, match=f"{op} has no gradient"):
        hg.grad(hg.sum(made), x)
    assert hg.grad(hg.sum(made + x), x).type == TensorType(x.dtype, (3,))
