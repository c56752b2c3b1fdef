"""Variables that begin with given elements: `g.variable(..., init=array)`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import heliograph as hg

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def counting(init: object, name: str = "v") -> hg.Graph:
    """A graph whose runs add 1 to a variable and give its value before."""
    g = hg.Graph()
    v = g.variable(name, (2, 3), "f32", init=init)
    g.output("before", hg.ops.cont(v))
    hg.assign(v, v + 1.0)
    return g


def test_a_variable_begins_with_its_elements_once(session: hg.Session) -> None:
    plan = session.compile(counting(ROWS))
    assert np.array_equal(plan.run()["before"], ROWS)
    # The same variable in another graph goes on where it is.
    other = session.compile(counting(ROWS * 100))
    assert np.array_equal(other.run()["before"], ROWS + 1)
    plan.free()
    other.free()
    session.free_variable("v")
    assert np.array_equal(session.compile(counting(ROWS * 100)).run()["before"], ROWS * 100)


def test_one_number_fills_a_variable_and_other_floats_are_cast(session: hg.Session) -> None:
    g = hg.Graph()
    for name, dtype, init in (
        ("half", "f16", 0.5), ("wide", "f32", np.float64([1, 2])), ("narrow", "bf16", np.float32([1, 2.5])),
        ("whole", "i32", [3, 4]), ("true", "bool", True),
    ):  # fmt: skip
        g.output(name, hg.astype(g.variable(name, (2,), dtype, init=init), "f32"))
    found = session.compile(g).run()
    assert {name: one.tolist() for name, one in found.items()} == {
        "half": [0.5, 0.5], "wide": [1, 2], "narrow": [1, 2.5], "whole": [3, 4], "true": [1, 1],
    }  # fmt: skip


def test_a_bound_tensor_keeps_its_elements(session: hg.Session) -> None:
    tensor = session.empty((2, 3), "f32")
    tensor.set(ROWS * 7)
    plan = session.compile(counting(ROWS, "bound"), variables={"bound": tensor})
    assert np.array_equal(plan.run()["before"], ROWS * 7)


def test_a_file_keeps_the_first_elements(session: hg.Session, tmp_path: Path) -> None:
    g = counting(ROWS, "filed")
    g.output("sum", g.variables["filed"] + g.weight("filed", ROWS * 2))
    hg.save(g, tmp_path / "model.hgraph")
    loaded = hg.load(tmp_path / "model.hgraph")
    assert np.array_equal(session.compile(loaded).run()["before"], ROWS)
    # Once more the same bytes.
    hg.save(loaded, tmp_path / "again.hgraph")
    assert (tmp_path / "again.hgraph").read_bytes() == (tmp_path / "model.hgraph").read_bytes()


def test_a_copied_plan_has_the_present_values(session: hg.Session) -> None:
    plan = session.compile(counting(ROWS, "copied"))
    plan.run()
    with hg.connect("local:") as other:
        assert np.array_equal(hg.copy_plan(plan, other).run()["before"], ROWS + 1)


def test_elements_that_do_not_fit_are_refused() -> None:
    g = hg.Graph()
    with pytest.raises(hg.InvalidGraphError, match=r"init has shape \(3,\)"):
        g.variable("a", (2, 3), "f32", init=ROWS[0])
    with pytest.raises(hg.InvalidGraphError, match="init has float32 elements, for i32"):
        g.variable("a", (2, 3), "i32", init=ROWS)
    with pytest.raises(hg.InvalidGraphError, match="for q8_0") as caught:
        g.variable("a", (2, 32), "q8_0", init=np.ones((2, 32), np.float32))
    assert "hg.quantize" in caught.value.advice
    # A refused variable takes no name.
    assert g.variable("a", (2, 3), "f32", init=ROWS).shape == (2, 3)
