"""ONNX models on a server, over every transport."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, load_model
from onnx_models import constant, model, node, perceptron, perceptron_result, saved_outside, tensor

import heliograph as hg
from heliograph._base.kept_plans import MOST_PLANS

RNG = np.random.default_rng(11)


def rows(count: int) -> np.ndarray:
    return RNG.normal(size=(count, 8)).astype(np.float32)


def test_a_model_computes_what_numpy_does(session: hg.Session) -> None:
    made = perceptron()
    plan = hg.onnx.load(made.SerializeToString()).compile(session, shapes={"batch": 3})
    x = rows(3)
    assert np.allclose(plan.run(x=x)["y"], perceptron_result(made, x), rtol=1e-5, atol=1e-4)


def test_symbols_are_bound_by_each_run(session: hg.Session) -> None:
    """Without shapes nothing is compiled before the first run, and then once for each batch."""
    made = perceptron()
    plan = hg.onnx.load(made.SerializeToString()).compile(session)
    assert not plan.plans
    for count in (1, 5, 1, 5):
        x = rows(count)
        assert np.allclose(plan.run(x=x)["y"], perceptron_result(made, x), rtol=1e-5, atol=1e-4)
    assert len(plan.plans) == 2


def test_the_plans_of_the_last_shapes_are_kept(session: hg.Session) -> None:
    made = model([node("Relu", "x", "y")], [tensor("x", ["n"])], [tensor("y", ["n"])])
    plan = hg.onnx.load(made.SerializeToString()).compile(session)
    for count in range(1, MOST_PLANS + 1):
        plan.run(x=np.zeros(count, np.float32))
    first = plan.plans[0]
    plan.run(x=np.zeros(1, np.float32))
    assert plan.plans[-1] is first
    plan.run(x=np.zeros(MOST_PLANS + 1, np.float32))
    assert len(plan.plans) == MOST_PLANS and first in plan.plans


def test_weights_beside_the_model_are_uploaded_once(session: hg.Session, tmp_path: Path) -> None:
    """They are mapped, and two shapes share the content of one upload."""
    # Weights that the daemon does not have by another transport.
    made = perceptron(seed=sum(map(ord, session.address)))
    plan = hg.onnx.load(saved_outside(made, tmp_path)).compile(session)
    weights = sum(len(one.raw_data) for one in made.graph.initializer)
    counts = [session.server_traffic().content_bytes]
    for count in (2, 7):
        x = rows(count)
        assert np.allclose(plan.run(x=x)["y"], perceptron_result(made, x), rtol=1e-4, atol=1e-5)
        counts.append(session.server_traffic().content_bytes)
    assert [later - earlier for earlier, later in pairwise(counts)] == [weights, 0]


def test_inputs_that_decide_shapes_are_fixed_by_the_run(session: hg.Session) -> None:
    made = model(
        [node("Reshape", "x shape", "y")],
        [tensor("x", [6]), tensor("shape", [2], TensorProto.INT64)],
        [tensor("y", None)],
    )
    plan = hg.onnx.load(made.SerializeToString()).compile(session)
    x = np.arange(6, dtype=np.float32)
    for shape in ((2, 3), (3, 2), (-1, 1)):
        assert np.array_equal(plan.run(x=x, shape=np.array(shape))["y"], x.reshape(shape))


def test_names_of_any_characters_serve(session: hg.Session) -> None:
    names = ["x:0", "a/b.c", "with space", "tab\there", "ä", "timeout"]
    made = model([node("Sum", "_", "y\n")], [tensor(one, [2]) for one in names], [tensor("y\n", [2])])
    made.graph.node[0].input[:] = names
    made.graph.node[0].output[:] = ["y\n"]
    plan = hg.onnx.load(made.SerializeToString()).compile(session)
    found = plan.run({name: np.full(2, place, np.float32) for place, name in enumerate(names)})
    assert list(found) == ["y\n"] and found["y\n"].tolist() == [15, 15]


def test_what_is_constant_needs_no_device(session: hg.Session) -> None:
    made = model(
        [node("Shape", "x", "s"), node("Gather", "s i", "y")],
        [tensor("x", ["a", "b"])],
        [tensor("y", [], TensorProto.INT64)],
        [constant("i", np.array(1))],
    )
    plan = hg.onnx.load(made.SerializeToString()).compile(session)
    assert plan.run(x=np.zeros((2, 5), np.float32))["y"] == 5
    assert not plan.plans


def test_a_run_of_another_type_or_shape_is_refused(session: hg.Session) -> None:
    plan = hg.onnx.load(perceptron().SerializeToString()).compile(session)
    with pytest.raises(hg.InvalidInputError, match="is of float, and double is given"):
        plan.run(x=np.zeros((1, 8)))
    with pytest.raises(hg.InvalidInputError, match=r"has shape \['batch', 8\], and \[1, 9\] is given"):
        plan.run(x=np.zeros((1, 9), np.float32))
    with pytest.raises(hg.InvalidInputError, match="input 'x' is missing"):
        plan.run()
    with pytest.raises(hg.InvalidInputError, match="no input 'z'"):
        plan.run(x=rows(1), z=rows(1))


def test_narrow_types_travel_as_codes(session: hg.Session) -> None:
    """float8 and int4 have no data type on a device; arrays of ml_dtypes go in and come out."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = model(
        [node("Cast", "x", "f", to=TensorProto.FLOAT), node("Cast", "f", "y", to=TensorProto.INT4)],
        [tensor("x", [5], TensorProto.FLOAT8E4M3FN)],
        [tensor("y", [5], TensorProto.INT4)],
        opset=21,
    )
    plan = hg.onnx.load(made.SerializeToString()).compile(session)
    x = np.array([-8, -1.5, 0, 3.25, 7]).astype(ml_dtypes.float8_e4m3fn)
    found = plan.run(x=x)["y"]
    assert found.dtype == ml_dtypes.int4 and found.astype(int).tolist() == [-8, -1, 0, 3, 7]


def test_batches_are_padded_to_a_few_sizes(session: hg.Session) -> None:
    """Four plans at most serve every batch up to the largest size; one beyond has its own."""
    made = perceptron()
    plan = hg.onnx.load(made.SerializeToString()).compile(session, batch=(8, 1, 3))
    assert len(plan.plans) == 1, "the smallest size is compiled at once"
    for count in (1, 2, 3, 5, 8, 4, 0, 11, 5, 0, 2, 11):
        x = rows(count)
        found = plan.run(x=x)["y"]
        assert found.shape == (count, 4) and np.allclose(
            found, perceptron_result(made, x), rtol=1e-5, atol=1e-4
        )
    assert {one.inputs["x"].shape[0] for one in plan.plans} == {0, 1, 3, 8, 11}
    for wrong in (rows(5).astype(np.float64), rows(5)[:, :-1]):
        with pytest.raises(hg.InvalidInputError):
            plan.run(x=wrong)


def test_the_batch_is_found_in_each_output(session: hg.Session) -> None:
    """Also where the output declares no symbol, and where several places belong to a row."""
    made = model(
        [
            node("Transpose", "x", "turned"),
            node("Reshape", "x flat", "flat_x"),
            node("Add", "table table", "kept"),
        ],
        [tensor("x", ["n", "two"])],
        [tensor("turned", None), tensor("flat_x", None), tensor("kept", None)],
        [constant("flat", np.array([-1])), constant("table", np.arange(5, dtype=np.float32))],
    )
    plan = hg.onnx.load(made.SerializeToString()).compile(session, batch=(4,))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = plan.run(x=x)
    assert np.array_equal(found["turned"], x.T) and np.array_equal(found["flat_x"], x.reshape(-1))
    assert found["kept"].tolist() == [0, 2, 4, 6, 8]


def test_what_cannot_be_padded_is_refused(session: hg.Session) -> None:
    two = model(
        [node("MatMul", "x y", "z")], [tensor("x", ["a", 2]), tensor("y", ["b", 3])], [tensor("z", None)]
    )
    with pytest.raises(hg.InvalidArgumentError, match="no symbol, or several"):
        hg.onnx.load(two.SerializeToString()).compile(session, batch=(4,))
    with pytest.raises(hg.InvalidArgumentError, match="1 to 16 sizes above 0"):
        hg.onnx.load(perceptron().SerializeToString()).compile(session, batch=(0, 4))
    size = model([node("Shape", "x", "y")], [tensor("x", ["n"])], [tensor("y", None, TensorProto.INT64)])
    with pytest.raises(hg.UnsupportedError, match="output 'y' depends on the size of the batch"):
        hg.onnx.load(size.SerializeToString()).compile(session, batch=(4,))


def test_weights_lie_beyond_4_gib_of_a_file(session: hg.Session, tmp_path: Path) -> None:
    """A sparse file: only what the model reads is mapped."""
    path = saved_outside(perceptron(), tmp_path)
    made = load_model(path, load_external_data=False)
    far = 5 * 2**30
    with (tmp_path / "weights.bin").open("r+b") as file:
        data = file.read()
        file.seek(far)
        file.write(data)
    for one in made.graph.initializer:
        for field in one.external_data:
            if field.key == "offset":
                field.value = str(int(field.value) + far)
    path.write_bytes(made.SerializeToString())
    x = rows(3)
    found = hg.onnx.load(path).compile(session).run(x=x)["y"]
    assert np.allclose(found, perceptron_result(perceptron(), x), rtol=1e-5, atol=1e-4)


def test_a_url_where_a_session_belongs_is_refused_at_once() -> None:
    """Without shapes a plan is made by the first run, and the URL would be noticed then."""
    loaded = hg.onnx.load(perceptron().SerializeToString())
    with pytest.raises(hg.InvalidArgumentError, match=r"takes a session.*\n.*hg.connect\('local:'\)"):
        loaded.compile("local:")  # type: ignore[arg-type]
