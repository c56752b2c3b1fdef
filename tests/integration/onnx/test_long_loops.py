"""Loops and scans of more turns than are unrolled: they run on the server, as plans of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx_models import constant, model, node, tensor

import heliograph as hg

INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
X = np.array([1.0, -2.0, 3.0], np.float32)


def body(nodes: list[NodeProto], *results: str) -> GraphProto:
    """A body over the turn i, the condition c and the state v; it gives go, w and these results."""
    return helper.make_graph(
        nodes,
        "body",
        [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("v", [3])],
        [tensor("go", [], BOOL), tensor("w", [3]), *(tensor(one, None) for one in results)],
    )


def halving(nodes: list[NodeProto], *results: str) -> GraphProto:
    """A body with w = v / 2 + i."""
    steps = [node("Mul", "v half", "h"), node("Cast", "i", "f", to=1), node("Add", "h f", "w")]
    return body([*steps, *nodes], *results)


def halved(turns: int) -> np.ndarray[Any, Any]:
    """The states of `halving` after each turn, by NumPy."""
    states = [X]
    for turn in range(turns):
        states.append(states[-1] * np.float32(0.5) + np.float32(turn))
    return np.stack(states)


def looping(inner: GraphProto, inputs: str, outputs: str, *more: NodeProto, **values: Any) -> ModelProto:
    """A loop over x, and nodes after it. `values`: its constants."""
    return model(
        [node("Loop", inputs, outputs, "long", body=inner), *more],
        [tensor("x", [3])],
        [tensor(one, None) for one in [*outputs.split(), *(one.output[0] for one in more)]],
        [constant(name, one) for name, one in {"half": np.float32(0.5), **values}.items()],
    )


def test_a_long_loop_runs_on_the_server_between_two_plans(session: hg.Session) -> None:
    """Nodes before and after it, and what the body captures, are computed once."""
    made = looping(
        halving([node("Identity", "c", "go"), node("Sub", "w offset", "each")], "each"),
        "n _ x",
        "last each",
        node("Add", "last offset", "y"),
        node("Shape", "each", "size"),
        n=np.array(3000),
    )
    made.graph.node.insert(0, node("Neg", "x", "offset"))
    plan = hg.onnx.load(made).compile(session)
    states = halved(3000)
    for _ in range(2):
        found = plan.run(x=X)
        assert np.array_equal(found["last"], states[-1]) and np.array_equal(found["y"], states[-1] - X)
        assert np.array_equal(found["each"], states[1:] + X) and found["size"].tolist() == [3000, 3]
    assert len(plan.plans) == 3


def test_runs_of_several_threads_do_not_mix(session: hg.Session) -> None:
    nodes = [node("Add", "v x", "w"), node("Identity", "c", "go"), node("Identity", "w", "each")]
    made = looping(body(nodes, "each"), "n _ x", "last each", n=np.array(1500))
    plan = hg.onnx.load(made).compile(session)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(plan.run, {"x": X * number}) for number in range(8)]
        for number, run in enumerate(runs):
            assert np.array_equal(run.result(timeout=60)["each"][-1], X * number * 1501)


@pytest.mark.parametrize("begins", [True, False])
def test_a_condition_of_the_body_ends_a_long_loop(begins: bool, session: hg.Session) -> None:
    """Results of each turn have as many rows as there were turns."""
    made = looping(
        halving([node("Less", "i limit", "go"), node("Identity", "w", "each")], "each"),
        "n c x",
        "last each",
        n=np.array(5000),
        limit=np.array(1999),
    )
    made.graph.input.append(tensor("c", [], BOOL))
    found = hg.onnx.load(made).compile(session).run(x=X, c=np.array(begins))
    states = halved(2000 if begins else 0)
    assert np.array_equal(found["last"], states[-1]) and np.array_equal(found["each"], states[1:])


@pytest.mark.parametrize("most", [None, 2**63 - 1])
def test_a_loop_that_only_its_condition_ends_needs_no_bound(most: int | None, session: hg.Session) -> None:
    """As exporters write `while`; without results of each turn."""
    inner = body(
        [
            node("Add", "v one", "w"),
            node("ReduceMax", "w", "top", keepdims=0),
            node("Less", "top limit", "go"),
        ]
    )
    made = looping(
        inner, "_ _ x" if most is None else "n _ x", "last", one=np.float32(1), limit=np.float32(4000)
    )
    if most is not None:
        made.graph.initializer.append(constant("n", np.array(most)))
    found = hg.onnx.load(made).compile(session).run(x=X)
    assert found["last"].tolist() == (X + 3997).tolist()


def test_a_second_long_loop_takes_what_the_first_one_stacked(here: hg.Session) -> None:
    made = looping(
        halving([node("Identity", "c", "go"), node("Greater", "w half", "above")], "above"),
        "n _ x",
        "last flags",
        node("Loop", "n _ last", "end", "second", body=body(
            [node("Gather", "flags i", "flag"), node("Where", "flag v x", "w"), node("Identity", "c", "go")]
        )),
        n=np.array(1100),
    )  # fmt: skip
    plan = hg.onnx.load(made).compile(here)
    states, end = halved(1100), halved(1100)[-1]
    found = plan.run(x=X)
    for row in states[1:] > 0.5:
        end = np.where(row, end, X)
    assert np.array_equal(found["flags"], states[1:] > 0.5) and np.array_equal(found["end"], end)
    assert len(plan.plans) == 5


@pytest.mark.parametrize(("axis", "backwards"), [(0, 0), (1, 1)])
def test_a_long_scan_takes_slices_and_stacks_results(axis: int, backwards: int, session: hg.Session) -> None:
    inner = helper.make_graph(
        [node("Add", "s v", "t"), node("Identity", "t", "u")], "body",
        [tensor("s", [2]), tensor("v", [2])], [tensor("t", [2]), tensor("u", [2])],
    )  # fmt: skip
    options = {f"scan_{one}_axes": [axis] for one in ("input", "output")}
    options |= {f"scan_{one}_directions": [backwards] for one in ("input", "output")}
    rows = np.arange(3000, dtype=np.float32).reshape(1500, 2)
    x = np.ascontiguousarray(np.moveaxis(rows[::-1] if backwards else rows, 0, axis))
    made = model(
        [node("Scan", "start x", "end sums", body=inner, num_scan_inputs=1, **options)],
        [tensor("start", [2]), tensor("x", x.shape)],
        [tensor("end", [2]), tensor("sums", None)],
    )
    found = hg.onnx.load(made).compile(session).run(start=np.zeros(2, np.float32), x=x)
    sums = rows.cumsum(axis=0)
    assert np.array_equal(found["end"], sums[-1])
    assert np.array_equal(found["sums"], np.moveaxis(sums[::-1] if backwards else sums, 0, axis))


def test_random_numbers_of_each_turn_are_others(here: hg.Session) -> None:
    drawn = [
        node("RandomUniform", "", "r", shape=[3]),
        node("Identity", "r", "w"),
        node("Identity", "r", "each"),
    ]
    made = looping(
        body([*drawn, node("Identity", "c", "go")], "each"), "n _ x", "last each", n=np.array(1200)
    )
    plans = [hg.onnx.load(made).compile(here, seed=5) for _ in range(2)]
    first, again = (plan.run(x=X)["each"] for plan in plans)
    assert np.array_equal(first, again) and len(np.unique(first)) > 3500
    assert abs(float(first.mean()) - 0.5) < 0.05


def test_what_a_long_loop_cannot_do_is_refused_by_name(here: hg.Session) -> None:
    grows = looping(body([node("Concat", "v v", "w", axis=0), node("Identity", "c", "go")]), "n _ x", "last",
        n=np.array(2000))  # fmt: skip
    with pytest.raises(
        hg.UnsupportedError, match=r"'long' \(Loop\): its state changes from f32\[3\] to f32\[6\]"
    ):
        hg.onnx.load(grows).compile(here)
    many = looping(halving([node("Less", "i n", "go"), node("Identity", "w", "each")], "each"), "n _ x",
        "last each", n=np.array(2**40))  # fmt: skip
    with pytest.raises(hg.UnsupportedError, match=r"'long' \(Loop\): it has more than 1024 turns"):
        hg.onnx.load(many).compile(here)


def test_a_long_loop_is_no_part_of_a_single_graph() -> None:
    made = looping(halving([node("Identity", "c", "go")]), "n _ x", "last", n=np.array(2000))
    with pytest.raises(
        hg.UnsupportedError, match=r"'long' \(Loop\): it has more than 1024[^$]*model.compile"
    ):
        hg.onnx.load(made).graph()


def test_a_plan_that_is_rebuilt_is_a_single_graph(here: hg.Session) -> None:
    """Its runs are repeated, and they are given arrays alone."""
    made = looping(halving([node("Identity", "c", "go")]), "n _ x", "last", n=np.array(2000))
    with pytest.raises(hg.UnsupportedError, match="more than 1024 turns"):
        hg.onnx.load(made).compile(here, on_loss="rebuild")
    boxes = model(
        [node("NonMaxSuppression", "boxes scores most", "y")],
        [tensor("boxes", [1, 70, 4]), tensor("scores", [1, 1, 70])],
        [tensor("y", None, INT64)],
        [constant("most", np.array(70))],
    )
    plan = hg.onnx.load(boxes).compile(here, on_loss="rebuild")
    feeds = {"boxes": np.ones((1, 70, 4), np.float32), "scores": np.ones((1, 1, 70), np.float32)}
    assert plan.run(feeds)["y"].shape == (70, 3) and len(plan.plans) == 1
