"""Leaves that are tensors, plans that are updated, estimates, and outputs in tensors, on all transports."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

import heliograph as hg
from heliograph.head.members import compile_frozen
from heliograph_proto.graph import LeafKind
from heliograph_proto.plans import PlanOptions

X = np.arange(12, dtype=np.float32).reshape(4, 3)
W = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
BIG = np.random.default_rng(3).random((900, 1000)).astype(np.float32)


def product(weight: np.ndarray | None = None) -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4, 3), "f32")
    w = g.bound_weight("w", (3, 5), "f32") if weight is None else g.weight("w", weight)
    g.output("y", x @ w)
    return g


def plus(number: float, shape: tuple[int, ...] = (4, 3)) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", shape, "f32") + number)
    return g


def counter() -> hg.Graph:
    g = hg.Graph()
    count = g.variable("count", (2,), "f32")
    g.output("now", hg.assign(count, count + 1.0))
    return g


# Bound weights


def test_a_weight_can_be_a_tensor(session: hg.Session) -> None:
    expected = session.compute(product(W), x=X)["y"]
    w = session.put(W)
    plan = session.compile(product(), weights={"w": w})
    assert np.array_equal(plan.run(x=X)["y"], expected)
    w.free()
    gc.collect()
    session.synchronize(timeout=10)
    assert np.array_equal(plan.run(x=X)["y"], expected)


def test_a_weight_is_what_was_sent_before_compiling(session: hg.Session) -> None:
    w, x = session.empty((1000, 64), "f32"), np.ones((2, 1000), np.float32)
    g = hg.Graph()
    g.output("y", g.input("x", x.shape, "f32") @ g.bound_weight("w", w.shape, "f32"))
    for value in (1.0, 2.0):
        w.set(np.full(w.shape, value, np.float32))
        plan = session.compile(g, weights={"w": w})
        assert np.array_equal(plan.run(x=x)["y"], np.full((2, 64), 1000 * value))
        plan.free()


def test_contents_of_bound_weights_are_not_uploaded(session: hg.Session, url: str) -> None:
    told: list[tuple[int, int]] = []
    with hg.connect(url, progress=lambda done, total: told.append((done, total))) as other:
        plan = other.compile(product(W), weights={"w": other.put(W * 2)})
        assert told == [] and np.array_equal(plan.run(x=X)["y"], session.compute(product(W * 2), x=X)["y"])


def test_names_of_bound_weights_have_their_scopes(session: hg.Session) -> None:
    g = hg.Graph()
    with g.scope("layer0"):
        g.output("y", g.input("x", (3,), "f32") * g.bound_weight("w", (3,), "f32"))
    w = session.put(np.array([1, 2, 3], np.float32))
    assert session.compile(g, weights={"layer0/w": w}).run({"layer0/x": [1, 1, 1]})["layer0/y"].tolist() == [
        1, 2, 3
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (lambda s: {}, r"'w' has no content(.|\n)*weights=\{'w': tensor\}"),
        (lambda s: {"weights": {"v": s.put(W)}}, r"no weight 'v'(.|\n)*there are: w"),
        (lambda s: {"weights": {"ww": s.put(W)}}, "did you mean 'w'"),
        (lambda s: {"weights": {"w": W}}, r"weights\['w'\] is ndarray(.|\n)*session\.put"),
        (
            lambda s: {"weights": {"w": s.put(X)}},
            r"f32\[4, 3\]; the graph says f32\[3, 5\](.|\n)*shapes are fixed",
        ),
        (lambda s: {"weights": {"w": s.put(W.T.copy())}}, r"'w'(.|\n)*x\.reshape\(\(3, 5\)\)"),
        (
            lambda s: {"weights": {"w": s.put(W.astype(np.float64))}},
            r"f64\[3, 5\](.|\n)*session\.empty\(\(3, 5\), 'f32'\)",
        ),
        (lambda s: {"weights": {"w": s.empty((3, 10), "f32")[:, ::2]}}, "view with gaps"),
        (lambda s: {"weights": [s.put(W)]}, "weights is list"),
        (lambda s: {"variables": {"w": s.put(W)}}, "no variable 'w'"),
        (lambda s: {"weights": {"w": s.put(W)}, "threads": -1}, "threads is -1"),
        (lambda s: {"weights": {"w": s.put(W)}, "threads": 1.5}, "threads is 1.5"),
    ],
)
def test_bindings_that_do_not_fit(
    session: hg.Session, bindings: Callable[[hg.Session], dict], words: str
) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=words):
        session.compile(product(), **bindings(session))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.zeros((2, 3), np.float32), r"'x' is f32\[4, 3\], not f32\[2, 3\](.|\n)*shapes are fixed"),
        (np.zeros((3, 4), np.float32), r"'x'(.|\n)*x\.reshape\(\(4, 3\)\)"),
        (np.zeros((4, 3), np.float64), r"'x'(.|\n)*session\.empty\(\(4, 3\), 'f32'\)"),
    ],
)
def test_an_input_tensor_of_another_type_says_what_the_plan_takes(
    session: hg.Session, given: np.ndarray, words: str
) -> None:
    plan = session.compile(product(W))
    with pytest.raises(hg.InvalidInputError, match=words):
        plan.run(x=session.put(given))
    if given.dtype == np.float32:
        with pytest.raises(hg.InvalidInputError, match="'x' has shape"):
            plan.run(x=given)


def test_tensors_of_others_and_freed_ones_are_no_weights(session: hg.Session, url: str) -> None:
    w = session.put(W)
    with hg.connect(url) as other, pytest.raises(hg.UnknownHandleError, match="another session"):
        other.compile(product(), weights={"w": w})
    w.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        session.compile(product(), weights={"w": w})


def test_a_weight_that_failed_makes_compiling_fail(session: hg.Session) -> None:
    w = session.empty((2**45,), "f32")[:15].reshape(3, 5)
    with pytest.raises(hg.OutOfMemoryError):
        session.compile(product(), weights={"w": w})
    session.synchronize(timeout=10)


def test_a_weight_without_content_is_estimated(session: hg.Session) -> None:
    assert session.estimate(product()) == session.estimate(product(W))


# Bound variables


def test_a_variable_can_be_a_tensor(session: hg.Session) -> None:
    mine, plan = session.put(np.array([5, 6], np.float32)), session.compile(counter())
    bound = session.compile(counter(), variables={"count": mine})
    bound.run()
    assert bound.run()["now"].tolist() == [7, 8] and mine.get().tolist() == [7, 8]
    assert plan.run()["now"].tolist() == [1, 1]
    assert bound.variables["count"].get().tolist() == [7, 8]
    mine.set([0, 0])
    assert bound.run()["now"].tolist() == [1, 1]


def test_fewer_threads_compute_the_same(session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", BIG.shape, "f32") @ g.weight("w", BIG.T.copy()))
    all_of_them, one = session.compile(g), session.compile(g, threads=1)
    assert np.array_equal(all_of_them.run(x=BIG)["y"], one.run(x=BIG)["y"])


# Updates


def test_a_plan_becomes_that_of_another_graph(session: hg.Session) -> None:
    plan = session.compile(plus(1.0))
    before = plan.submit(x=X)
    for number in (2.0, 3.0):
        plan.update(plus(number))
        assert np.array_equal(plan.run(x=X)["y"], X + number)
    assert np.array_equal(before.result(timeout=10)["y"], X + 1)
    plan.update(plus(1.0, (2, 2)))
    assert plan.inputs["x"].shape == (2, 2) and plan.run(x=[[1, 2], [3, 4]])["y"].tolist() == [[2, 3], [4, 5]]
    plan.update(product(W))
    assert np.array_equal(plan.run(x=X)["y"], session.compute(product(W), x=X)["y"])


def test_updating_takes_no_more_memory(session: hg.Session) -> None:
    g, w = product(), session.put(W)
    plan = session.compile(g, weights={"w": w})
    session.synchronize(timeout=10)
    before = session.devices[0].memory().free_bytes
    for _ in range(5):
        plan.update(g, weights={"w": w})
    deadline = time.monotonic() + 10
    while session.devices[0].memory().free_bytes < before:
        session.synchronize(timeout=10)
        assert time.monotonic() < deadline


def test_an_update_that_is_refused_changes_nothing(session: hg.Session) -> None:
    plan = session.compile(plus(1.0))
    refused = hg.Graph()
    refused.input("x", (1,), "f32")
    with pytest.raises(hg.InvalidGraphError, match="no outputs"):
        plan.update(refused)
    with pytest.raises(hg.InvalidArgumentError, match="update takes a graph"):
        plan.update("graph")
    with pytest.raises(hg.InvalidArgumentError, match="no content"):
        plan.update(product())
    assert np.array_equal(plan.run(x=X)["y"], X + 1) and "live" in repr(plan)
    plan.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.update(plus(2.0))


# Estimates, and computing once


def test_an_estimate_takes_nothing(session: hg.Session) -> None:
    session.synchronize(timeout=10)
    before = session.devices[0].memory().free_bytes
    found = session.estimate(product(W), timeout=30)
    assert (found.device, found.weights_bytes) == (session.devices[0].name, W.nbytes)
    assert found.variables_bytes == 0 and found.total_bytes >= W.nbytes
    assert session.estimate(counter()).variables_bytes == 8
    assert session.devices[0].memory().free_bytes == before
    with pytest.raises(hg.InvalidArgumentError, match="estimate takes a graph"):
        session.estimate(5)


def test_computing_once_leaves_nothing(session: hg.Session) -> None:
    session.compute(product(W), x=X)
    session.synchronize(timeout=10)
    before = session.devices[0].memory().free_bytes
    kept = session.compute(plus(2.0), {"x": X}, fetch=False, devices=session.devices[0])["y"]
    assert np.array_equal(kept.get(), X + 2)
    kept.free()
    deadline = time.monotonic() + 10
    while session.devices[0].memory().free_bytes < before:
        session.synchronize(timeout=10)
        assert time.monotonic() < deadline
    with pytest.raises(hg.InvalidInputError, match="no input 'z'"):
        session.compute(plus(1.0), z=X)


# Outputs in tensors


def test_outputs_are_written_to_tensors(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (4, 3), "f32")
    g.output("a", x + 1.0)
    g.output("b", x + 2.0)
    plan, t = session.compile(g), session.empty((4, 3), "f32")
    found = plan.run(x=X, out={"b": t})
    assert found["b"] is t and np.array_equal(found["a"], X + 1) and np.array_equal(t.get(), X + 2)
    assert list(plan.run(x=X, fetch=(), out={"a": t})) == ["a"] and np.array_equal(t.get(), X + 1)
    kept = plan.submit(x=X * 2, fetch=False, out={"b": t}).result(timeout=10)
    assert kept["b"] is t and np.array_equal(t.get(), X * 2 + 2)
    assert np.array_equal(kept["a"].get(), X * 2 + 1)


def test_large_outputs_are_written_in_place(session: hg.Session) -> None:
    plan, buffer = session.compile(plus(1.0, BIG.shape)), session.buffer(2 * BIG.nbytes)
    one, two = (buffer.place(BIG.shape, "f32", place * BIG.nbytes) for place in range(2))
    one.set(BIG)
    for source, into in ((one, two), (two, one)):
        plan.submit(x=source, out={"y": into})
    assert np.array_equal(one.get(), BIG + 1 + 1)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda s: {"z": s.put(X)}, "no output 'z'"),
        (lambda s: {"y": X}, r"out\['y'\] is ndarray"),
        (lambda s: {"y": s.put(W)}, r"output 'y' is f32\[4, 3\], not f32\[3, 5\]"),
        (lambda s: [s.put(X)], "out is list"),
    ],
)
def test_tensors_that_no_output_goes_to(
    session: hg.Session, out: Callable[[hg.Session], object], words: str
) -> None:
    plan = session.compile(plus(1.0))
    with pytest.raises(hg.InvalidArgumentError, match=words):
        plan.run(x=X, out=out(session))
    with pytest.raises(hg.InvalidArgumentError, match="is both fetched and written"):
        plan.run(x=X, fetch=["y"], out={"y": session.put(X)})


def test_an_output_does_not_go_where_an_input_or_another_lies(session: hg.Session) -> None:
    plan, t = session.compile(plus(1.0)), session.put(X)
    with pytest.raises(hg.HeliographError, match="overlap|share"):
        plan.run(x=t, out={"y": t})
    g = hg.Graph()
    x = g.input("x", (4, 3), "f32")
    g.output("a", x + 1.0)
    g.output("b", x + 2.0)
    with pytest.raises(hg.HeliographError, match="overlap|share"):
        session.compile(g).run(x=X, out={"a": t, "b": t.reshape(4, 3)})
    t.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.run(x=X, out={"y": t})


def test_an_input_named_out_goes_in_a_mapping(session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", g.input("out", (3,), "f32") + 1.0)
    plan = session.compile(g)
    assert plan.run({"out": [1, 2, 3]})["y"].tolist() == [2, 3, 4]
    with pytest.raises(hg.InvalidInputError, match=r"plan\.run\(\{'out': ARRAY\}\)"):
        plan.run()


# Graphs of the contract


def test_a_graph_of_the_contract_is_compiled_with_its_leaves_bound(session: hg.Session) -> None:
    """What a server that uses other servers needs."""
    g, w = product(), session.put(W)
    (number, _) = g._leaves_of(LeafKind.WEIGHT)["w"]
    plan = compile_frozen(session, g._outline(), PlanOptions(), bindings={number: w})
    expected = session.compute(product(W), x=X)["y"]
    assert np.array_equal(plan.run(x=X)["y"], expected)
    with pytest.raises(hg.InvalidGraphError):
        compile_frozen(session, g._outline(), PlanOptions(), bindings={}, updates=plan)
    assert np.array_equal(plan.run(x=X)["y"], expected)
    updated = compile_frozen(session, g._outline(), PlanOptions(), bindings={number: w}, updates=plan)
    assert np.array_equal(updated.run(x=X)["y"], expected)
    with pytest.raises(hg.UnknownHandleError):
        plan.run(x=X)
    session.synchronize(timeout=10)


def test_options_are_kept_in_a_dictionary_and_unknown_ones_are_refused(session: hg.Session) -> None:
    options: hg.CompileOptions = {"fusion": False, "threads": 1, "memory": {"cpu0": "1GiB"}}
    plan = session.compile(product(W), **options)
    x = np.ones((4, 3), np.float32)
    assert np.allclose(plan.run(x=x)["y"], x @ W)
    plan.update(product(W), fusion=True)
    with pytest.raises(TypeError, match=r"compile\(\).*'pin'; did you mean 'pins'\?"):
        session.compile(product(W), pin={})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"update\(\).*'pipeline'"):
        plan.update(product(W), pipeline=2)  # type: ignore[call-arg]


def test_a_weight_whose_array_changed_is_compiled_with_its_new_elements(session: hg.Session) -> None:
    g, array = hg.Graph(), np.ones(3, np.float32)
    g.output("y", g.input("x", (3,), "f32") * g.weight("w", array))
    array[:] = 2
    x = np.ones(3, np.float32)
    plan = session.compile(g)
    assert plan.run(x=x)["y"].tolist() == [2, 2, 2]
    array[:] = 3
    assert session.compile(g).run(x=x)["y"].tolist() == [3, 3, 3]
    assert plan.run(x=x)["y"].tolist() == [2, 2, 2]


def test_a_view_of_a_variable_is_assigned_to(session: hg.Session) -> None:
    g = hg.Graph()
    v, x = g.variable("v", (4, 6), "f32"), g.input("x", (2, 3), "f32")
    before = v[0]
    block = hg.assign(v[1:3, ::2], x)
    column = hg.assign(v.T[1], 7.0)
    row = hg.assign(v[3:][0][2:4].reshape((1, 2)), x[:1, :2])
    for name, value in (("block", block), ("column", column), ("row", row), ("before", before), ("v", v)):
        g.output(name, value)
    plan, given, expected = session.compile(g), np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((4, 6))
    for _ in range(2):
        first = expected[0].copy()
        expected[1:3, ::2], expected[:, 1], expected[3, 2:4] = given, 7, given[0, :2]
        found = plan.run(x=given)
        assert np.array_equal(found["v"], expected) and np.array_equal(found["before"], first)
        assert np.array_equal(found["block"], given) and np.array_equal(found["row"], given[:1, :2])
        assert found["column"].tolist() == [7] * 4


def test_a_value_that_is_no_view_of_a_variable_is_not_assigned_to() -> None:
    g = hg.Graph()
    v = g.variable("v", (4,), "f32")
    with pytest.raises(hg.InvalidArgumentError, match="nor a view of one"):
        hg.assign((v + 1)[:2], 1.0)
    with pytest.raises(hg.InvalidArgumentError, match="the types must be equal"):
        hg.assign(v[:2], np.ones(3, np.float32))
