"""Indexing by arrays and masks against NumPy, and gathering by masks of a known count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import heliograph as hg

X = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
ROWS, COLUMNS = np.array([1, 0, -1]), np.array([[0], [2]], np.int32)
MASK = np.arange(12).reshape(3, 4) % 3 == 0
KEYS: dict[str, Any] = {
    "a list": [1, 0, 1],
    "an array": ROWS,
    "an array behind a slice": (slice(None), np.array([2, 0])),
    "an array in front of slices": (np.array([1]), slice(1, None), slice(None, None, 2)),
    "a matrix of indices": COLUMNS % 2,
    "two arrays": (np.array([0, 1]), np.array([2, 0])),
    "arrays that broadcast": (np.array([0, 1]), COLUMNS),
    "arrays around a slice": (np.array([0, 1]), slice(None), np.array([3, 0])),
    "an int and an array": (1, slice(None), np.array([3, 0])),
    "an array and an int": (slice(None), np.array([2, 0]), 1),
    "an ellipsis": (..., np.array([3, 0, 0])),
    "a new dimension": (None, np.array([1, 0]), None),
    "a new dimension between": (np.array([1, 0]), None, np.array([1, 2])),
    "backwards and an array": (slice(None, None, -1), np.array([2, 0])),
    "three arrays": (ROWS, ROWS, ROWS),
    "a mask": X % 5 == 0,
    "a mask of two dimensions": (slice(None), MASK),
    "a mask in front": (np.array([True, False]),),
    "a mask and an array": (np.array([True, True]), np.array([1, 2])),
    "a mask of nothing": np.zeros((2, 3, 4), bool),
    "no indices": [],
    "unsigned": np.array([1, 0], np.uint8),
}


def compute(session: hg.Session, key: Any) -> np.ndarray[Any, Any]:
    g = hg.Graph()
    y = g.input("x", X.shape, "f32")[key]
    g.output("y", y)
    found: np.ndarray[Any, Any] = session.compute(g, x=X)["y"]
    assert found.shape == y.shape
    return found


@pytest.mark.parametrize("key", KEYS)
def test_arrays_choose_as_in_numpy(local: hg.Session, key: str) -> None:
    assert np.array_equal(compute(local, KEYS[key]), X[KEYS[key]])


@pytest.mark.parametrize("key", [one for one, key in KEYS.items() if not one.startswith(("a mask", "no "))])
def test_indices_may_come_with_the_run(local: hg.Session, key: str) -> None:
    parts = KEYS[key] if isinstance(KEYS[key], tuple) else (KEYS[key],)
    g = hg.Graph()
    given: dict[str, Any] = {"x": X}
    values: list[Any] = []
    for place, part in enumerate(parts):
        if isinstance(part, (list, np.ndarray)):
            given[f"i{place}"] = np.asarray(part)
            values.append(g.input(f"i{place}", given[f"i{place}"].shape, given[f"i{place}"].dtype))
        else:
            values.append(part)
    g.output("y", g.input("x", X.shape, "f32")[tuple(values)])
    assert np.array_equal(local.compute(g, given)["y"], X[KEYS[key]])


def test_indices_outside_fail_the_run_and_are_no_other_elements(local: hg.Session) -> None:
    g = hg.Graph()
    x, i = g.input("x", X.shape, "f32"), g.input("i", (2,), "i64")
    g.output("one", x[i])
    g.output("two", x[:, i, i])
    plan = local.compile(g)
    assert np.array_equal(plan.run(x=X, i=[0, -1])["two"], X[:, [0, -1], [0, -1]])
    for wrong in ([0, 2], [0, -3]):
        with pytest.raises(hg.OutOfRangeError):
            plan.run(x=X, i=wrong)
    pair = hg.Graph()
    j = pair.input("j", (1,), "i64")
    pair.output("y", pair.input("x", X.shape, "f32")[:, [0], j])
    with pytest.raises(hg.OutOfRangeError):
        # It would be the first element of the next row.
        local.compute(pair, x=X, j=[4])


def test_gradients_pass_indices(local: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", X.shape, "f32")
    g.output("d", hg.grad(hg.sum(x[:, [0, 0, 2]] * 2.0), x))
    expected = np.zeros_like(X)
    np.add.at(expected, (slice(None), [0, 0, 2]), 2.0)
    assert np.array_equal(local.compute(g, x=X)["d"], expected)


def test_masks_of_a_run_choose_a_known_count(local: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", X.shape, "f32")
    least = g.input("least", (), "f32")
    g.output("some", hg.take_masked(x, x >= least, count=4))
    g.output("rows", hg.take_masked(x, hg.max(x, axis=(0, 2)) >= least, count=1, axis=1))
    g.output("none", hg.take_masked(x, x < 0.0, count=0))
    plan = local.compile(g)
    found = plan.run(x=X, least=np.float32(20))
    assert found["some"].tolist() == [20, 21, 22, 23] and found["none"].shape == (0,)
    with pytest.raises(hg.OutOfRangeError):
        plan.run(x=X, least=np.float32(21))
    assert np.array_equal(plan.run(x=X, least=np.float32(20), fetch=["some"])["some"], X[X >= 20])
    g = hg.Graph()
    mask = np.array([True, False, True])
    g.output("rows", hg.take_masked(g.input("x", X.shape, "f32"), mask, count=2, axis=1))
    assert np.array_equal(local.compute(g, x=X)["rows"], X[:, [0, 2]])


def test_keys_that_do_not_fit_are_refused() -> None:
    g = hg.Graph()
    x = g.input("x", X.shape, "f32")
    for message, call in {
        "index 2 is outside of a dimension of 2": lambda: x[[0, 2]],
        "index -4 is outside of a dimension of 3": lambda: x[:, np.array([-4])],
        "an index array of float64": lambda: x[np.array([0.5])],
        r"a mask of shape \(3,\) for dimensions \(2,\)": lambda: x[np.ones(3, bool)],
        "4 indices for f32": lambda: x[[0], [0], [0], [0]],
        "at most one ...": lambda: x[..., [0], ...],
        "str is no index": lambda: x[[0], "a"],
        "bool is no index": lambda: x[[0], True],
        "indices are f32": lambda: x[x],
        "hg.take_masked": lambda: x[x > 0.0],
        "cannot be broadcast|do not broadcast|broadcast": lambda: x[[0, 1], [0, 1, 2]],
        "belongs to another graph": lambda: x[hg.Graph().input("i", (1,), "i32")],
        "take_masked: a mask": lambda: hg.take_masked(x, x[0] > 0.0, count=1),
        "take_masked: 25 of 24": lambda: hg.take_masked(x, x > 0.0, count=25),
    }.items():
        with pytest.raises(hg.HeliographError, match=message) as caught:
            call()
        assert "test_array_indexing.py" in caught.value.origin.source


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([[4], [0]], r"index 4 is not one of 4 rows, at \[0, 0\]"),
        ([[0], [-5]], r"index -5 is not one of 4 rows, at \[1, 0\]"),
        ([[0], [4]], r"index 4 is not one of 4 rows, at \[1, 0\]"),
    ],
)
def test_an_index_along_an_axis_that_is_outside_reads_no_other_row(
    local: hg.Session, places: Any, said: str
) -> None:
    g = hg.Graph()
    g.output("y", hg.take_along_axis(g.input("x", (2, 4), "f32"), g.input("i", (2, 1), "i64"), axis=1))
    plan = local.compile(g)
    with pytest.raises(hg.OutOfRangeError, match=said):
        plan.run(x=X[0, :2], i=np.array(places))
    inside = np.array([[3], [-4]])
    assert np.array_equal(plan.run(x=X[0, :2], i=inside)["y"], np.take_along_axis(X[0, :2], inside, 1))
