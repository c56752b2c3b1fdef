"""`session.function`: a function of values as a function of arrays, with plans by kinds of calls."""

from __future__ import annotations

import asyncio
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import heliograph as hg

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Counted:
    """A function, and how often it was traced."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, x: hg.Value, factor: float = 2.0, *, bias: Any = None) -> hg.Value:
        self.times += 1
        y = x * factor
        return y if bias is None else y + bias


def test_a_function_is_traced_once_for_shapes_types_and_constants(session: hg.Session) -> None:
    function = Counted()
    traced = session.function(function)
    for _ in range(3):
        assert np.array_equal(traced(X), X * 2)
    assert function.times == 1
    assert np.array_equal(traced(X[:1]), X[:1] * 2) and function.times == 2
    assert traced(X.astype(np.float64)).dtype == np.float64 and function.times == 3
    assert np.array_equal(traced(X, 3.0), X * 3) and function.times == 4
    assert np.array_equal(traced(X, factor=3.0), X * 3) and function.times == 4
    assert np.array_equal(traced(X, bias=X), X * 3) and function.times == 5
    # A number that changes is an input as an array.
    for number in range(3):
        assert np.array_equal(traced(X, np.float32(number)), X * number)
    assert function.times == 6


def test_arguments_and_results_have_structures(session: hg.Session) -> None:
    @session.function
    def layer(model: dict[str, Any], x: hg.Value, *more: hg.Value, scale: str = "none") -> dict[str, Any]:
        """Compute a layer."""
        y = x @ model["w"] + model["b"][0]
        return {"y": y, "sums": (hg.sum(y), [one * 2.0 for one in more]), "scale": scale, "none": None}

    assert layer.__name__ == "layer" and layer.__doc__ == "Compute a layer."
    w, b = np.ones((3, 2), np.float32), np.float32([1, 2])
    found = layer({"w": w, "b": [b, None]}, X, X, X[0], scale="some")
    assert np.array_equal(found["y"], X @ w + b) and found["sums"][0] == (X @ w + b).sum()
    assert np.array_equal(found["sums"][1][1], X[0] * 2)
    assert (found["scale"], found["none"]) == ("some", None)
    assert "layer" in repr(layer) and "1 plan" in repr(layer)


def test_tensors_are_arguments_and_results_may_stay(session: hg.Session) -> None:
    double = session.function(lambda x: x * 2.0, fetch=False)
    tensor = session.put(X)
    once = double(tensor)
    assert isinstance(once, hg.Tensor)
    assert np.array_equal(double(once).get(), X * 4)
    assert double.plan(tensor).inputs == {"x": tensor.type}


def test_a_step_of_training_keeps_its_state_on_the_server(session: hg.Session) -> None:
    @session.function
    def step(x: hg.Value, y: hg.Value) -> hg.Value:
        w = x.graph.variable("traced/w", (3,), "f32", init=0.5)
        loss, slope = hg.value_and_grad(lambda w: hg.mean((x @ w - y) ** 2), w)
        hg.optim.sgd(w, slope, 0.01)
        return loss

    losses = [float(step(X, np.float32([1, 2]))) for _ in range(40)]
    assert losses[-1] < losses[0] / 4


def test_the_plans_that_were_used_longest_ago_go_first(session: hg.Session) -> None:
    function = Counted()
    traced = session.function(function, max_plans=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(X, 1.0)
        traced(X, 2.0)
        traced(X, 1.0)
    with pytest.warns(UserWarning, match="more than 2 kinds of calls") as caught:
        traced(X, 3.0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(X, 1.0)
        assert function.times == 3
        # It is told once.
        traced(X, 2.0)
    assert function.times == 4 and "2 plans" in repr(traced)


def test_threads_share_a_function(session: hg.Session) -> None:
    traced = session.function(Counted(), max_plans=2)
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as threads:
        warnings.simplefilter("ignore")
        found = list(threads.map(lambda n: traced(X, float(n % 4)), range(40)))
    assert all(np.array_equal(one, X * (number % 4)) for number, one in enumerate(found))


def test_control_flow_by_elements_is_refused_and_by_shapes_is_not(session: hg.Session) -> None:
    @session.function
    def by_elements(x: hg.Value) -> hg.Value:
        if hg.sum(x) > 0:
            return x
        return -x

    @session.function
    def by_count(x: hg.Value, n: hg.Value) -> hg.Value:
        for _ in range(n):  # type: ignore[call-overload]
            x = x * 2.0
        return x

    @session.function
    def by_shape(x: hg.Value) -> hg.Value:
        for row in range(x.shape[0]):
            x = x + float(row)
        return x

    with pytest.raises(TypeError, match=r"has no truth value while the graph is being built; use hg.where"):
        by_elements(X)
    with pytest.raises(TypeError, match="while the graph is being built"):
        by_count(X, np.int64(3))
    assert np.array_equal(by_shape(X), X + 1)


def test_what_is_no_function_of_values_is_refused(session: hg.Session) -> None:
    async def waits(x: hg.Value) -> hg.Value:
        return x

    escaped: list[hg.Value] = []
    identity = session.function(lambda x: x)
    for message, call in {
        "is no function of values": lambda: session.function(waits),
        "max_plans is 0": lambda: session.function(lambda x: x, max_plans=0),
        "was given no array": lambda: identity(3.0),
        r"x\[1\] is bytearray.*neither an array nor a constant": lambda: identity([X, bytearray(2)]),
        "an array of complex64": lambda: identity(np.zeros(2, np.complex64)),
        "returned no value of the graph but 3": lambda: session.function(lambda x: 3)(X),
        "returned generator": lambda: session.function(lambda x: (one for one in [x]))(X),
        "a value of a graph": lambda: session.function(lambda x: identity(x))(X),
        "belongs to another graph": lambda: (
            session.function(lambda x: escaped.append(x) or x)(X),
            session.function(lambda x: x + escaped[0])(X),
        ),
    }.items():
        with pytest.raises((hg.InvalidArgumentError, hg.InvalidGraphError), match=message):
            call()
    with pytest.raises(TypeError, match="missing a required argument"):
        identity()


def test_under_asyncio_it_is_awaited() -> None:
    async def main() -> None:
        async with await hg.aio.connect("local:") as session:
            traced = session.function(Counted())
            found = await asyncio.gather(*(traced(X, float(n)) for n in range(3)))
            assert all(np.array_equal(one, X * n) for n, one in enumerate(found))
            assert (await traced.plan(X, 1.0)).inputs["x"].shape == (2, 3)

    asyncio.run(main())


def test_float64_arrays_are_cast_to_f32_inputs_and_it_is_told_once(
    session: hg.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heliograph._base.tensor._told_of_casts", False)
    g = hg.Graph()
    g.output("y", g.input("x", (2, 3), "f32") * 2.0)
    plan = session.compile(g)
    with pytest.warns(UserWarning, match="a float64 array was cast to f32") as caught:
        assert np.array_equal(plan.run(x=X.astype(np.float64))["y"], X * 2)
    assert caught[0].filename == __file__
    assert np.array_equal(plan.submit(x=X.astype(np.float64)).result()["y"], X * 2)
    with pytest.raises(hg.InvalidInputError, match="i64"):
        plan.run(x=X.astype(np.int64))
