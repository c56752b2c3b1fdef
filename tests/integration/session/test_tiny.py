"""Read this first: each promise of the README in a few lines, from nothing but the public client."""

from __future__ import annotations

import numpy as np
import pytest

import heliograph as hg


def softmax_graph() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4, 3), "f32")
    w = g.weight("w", np.ones((3, 2), np.float32))
    g.output("y", hg.softmax(x @ w + 1.0, axis=-1))
    return g


X = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_a_graph_runs_over_there(session: hg.Session) -> None:
    plan = session.compile(softmax_graph())
    assert np.array_equal(plan.run(x=X)["y"], np.full((4, 2), 0.5, np.float32))


def test_runs_can_be_in_flight_together(session: hg.Session) -> None:
    plan = session.compile(softmax_graph())
    futures = [plan.submit(x=X) for _ in range(20)]
    assert all(future.result(timeout=10)["y"].shape == (4, 2) for future in futures)


def test_tensors_can_stay_over_there(session: hg.Session) -> None:
    plan = session.compile(softmax_graph())
    t = session.put(X)
    kept = plan.run(x=t, fetch=False)["y"]
    t[1:3].set(np.zeros((2, 3), np.float32))
    assert np.array_equal(t.get()[1:3], np.zeros((2, 3), np.float32))
    assert np.array_equal(np.asarray(kept), np.full((4, 2), 0.5, np.float32))


def test_the_caller_may_overwrite_its_array_at_once(session: hg.Session) -> None:
    mine = X.copy()
    t = session.put(mine)
    mine[:] = -1
    assert np.array_equal(t.get(), X)


def test_variables_last_and_are_shared_by_plans(session: hg.Session) -> None:
    def counting(step: float) -> hg.Graph:
        g = hg.Graph()
        v = g.variable("count", (), "f32")
        g.output("count", hg.assign(v, v + step))
        return g

    one, ten = session.compile(counting(1.0)), session.compile(counting(10.0))
    one.run()
    ten.run()
    assert one.run()["count"] == 12.0
    assert ten.checkpoint() == {"count": 12.0}


def test_streams_are_ordered_by_events(session: hg.Session) -> None:
    device = session.devices[0]
    first, second = device.stream(), device.stream()
    event = first.record()
    second.wait(event)
    event.result(timeout=10)


def test_what_is_wrong_is_said_where_it_was_written() -> None:
    g = hg.Graph()
    x = g.input("x", (4, 3), "f32")
    with pytest.raises(hg.InvalidGraphError, match="test_tiny.py") as caught:
        x @ g.input("w", (2, 3), "f32")
    assert caught.value.advice


def test_an_input_that_is_missing_is_a_typed_error(session: hg.Session) -> None:
    plan = session.compile(softmax_graph())
    with pytest.raises(hg.InvalidInputError, match="'x'"):
        plan.run()
    with pytest.raises(hg.InvalidInputError, match="'x'"):
        plan.run(xs=X)


def test_the_same_bits_on_every_transport(session: hg.Session) -> None:
    rng = np.random.default_rng(0)
    g = hg.Graph()
    x = g.input("x", (5, 33), "f32")
    w = g.weight("w", rng.normal(size=(33, 17)).astype(np.float32))
    g.output("y", hg.gelu(x @ w))
    inputs = rng.normal(size=(5, 33)).astype(np.float32)
    found = session.compile(g).run(x=inputs)["y"]
    with hg.connect("local:") as local:
        assert np.array_equal(found, local.compile(g).run(x=inputs)["y"])
