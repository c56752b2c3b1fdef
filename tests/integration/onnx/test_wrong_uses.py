"""Wrong arguments of `hg.onnx` end in typed errors, which say what was expected, at the first call."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from onnx_models import model, node, perceptron, perceptron_result, tensor

import heliograph as hg

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)


@pytest.fixture
def loaded() -> hg.onnx.Model:
    return hg.onnx.load(perceptron().SerializeToString())


def test_a_model_comes_from_a_message_or_from_bytes_of_any_kind(here: hg.Session) -> None:
    """The message stays as it was, though large constants are taken out of a model."""
    made = perceptron()
    data = made.SerializeToString()
    for source in (made, data, bytearray(data), memoryview(data)):
        assert hg.onnx.supported(source) == ()
        found = hg.onnx.load(source).compile(here).run(x=X)["y"]
        assert np.allclose(found, perceptron_result(made, X), rtol=1e-5, atol=1e-4)
    assert made.SerializeToString() == data


@pytest.mark.parametrize("source", [None, 3, perceptron().graph, io.BytesIO(b"")])
def test_what_is_no_source_of_a_model_is_named(source: Any) -> None:
    for read in (hg.onnx.load, hg.onnx.supported):
        with pytest.raises(hg.InvalidArgumentError, match=rf"type {type(source).__name__}\n.*ModelProto"):
            read(source)


def test_a_batch_may_be_one_size(loaded: hg.onnx.Model, here: hg.Session) -> None:
    plan = loaded.compile(here, batch=8)
    assert [plan.run(x=X[:count])["y"].shape for count in (1, 3)] == [(1, 4), (3, 4)]
    assert len(plan.plans) == 1


@pytest.mark.parametrize("batch", [True, 8.0, "8", (), [0], {"batch": 8}])
def test_a_batch_of_no_size_is_refused(batch: Any, loaded: hg.onnx.Model, here: hg.Session) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="it must be 1 to 16 sizes above 0"):
        loaded.compile(here, batch=batch)


def test_a_session_is_checked_before_the_first_run(loaded: hg.onnx.Model) -> None:
    with pytest.raises(
        hg.InvalidArgumentError,
        match=r"takes a session, and the URL[^$]*hg.connect\('grpc://127.0.0.1:7070'\)",
    ):
        loaded.compile("grpc://127.0.0.1:7070")  # type: ignore[arg-type]
    with pytest.raises(hg.InvalidArgumentError, match="takes a session, and NoneType is given"):
        loaded.compile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": 3}, "there is no option 'sizes'"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"shapes": 8}, "shapes must be a mapping by name"),
        ({"shapes": {"batch": "8"}}, "'batch' has the size '8'"),
        ({"shapes": {"batch": -1}}, "'batch' has the size -1"),
        ({"shapes": {"x": (3, None)}}, "the shape of input 'x' has the size None"),
        ({"values": [X]}, "values must be a mapping by name"),
        ({"values": {"z": X}}, "there is no input or symbol 'z'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_run(
    arguments: Any, message: str, loaded: hg.onnx.Model, here: hg.Session
) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=message):
        loaded.compile(here, **arguments)


@pytest.mark.parametrize("arguments", [{"shapes": {"x": (3, 9)}}, {"values": {"x": X[:, :4]}}])
def test_shapes_that_the_model_does_not_declare_are_refused(
    arguments: Any, loaded: hg.onnx.Model, here: hg.Session
) -> None:
    with pytest.raises(hg.InvalidInputError, match=r"input 'x' has shape \['batch', 8\], and \[3, "):
        loaded.compile(here, **arguments)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        (X, r"the inputs are of type ndarray[^$]*run\({name: array}\)"),
        ([X], "the inputs are of type list"),
        ({}, r"input 'x' is missing[^$]*tensor\(float\) \['batch', 8\]"),
        ({"x": X, "z": X}, "there is no input 'z'"),
        ({"x": X.tolist()}, r"'x' is a tensor, and a list is given[^$]*tensor\(float\) \['batch', 8\]"),
        ({"x": None}, "'x' is a tensor, and None is given"),
        ({"x": X.astype(int)}, r"'x' is of float, and int64 is given[^$]*astype\(np.float32\)"),
        ({"x": X[0]}, r"'x' has shape \['batch', 8\], and \[8\] is given"),
    ],
)  # fmt: skip
def test_a_wrong_feed_is_named_with_what_was_expected(
    feeds: Any, message: str, loaded: hg.onnx.Model, here: hg.Session
) -> None:
    with pytest.raises(hg.InvalidInputError, match=message):
        loaded.compile(here).run(feeds)


def test_the_advice_for_a_narrow_type_names_its_package(here: hg.Session) -> None:
    made = model(
        [node("Identity", "x", "y")],
        [tensor("x", [2], TensorProto.FLOAT8E4M3FN)],
        [tensor("y", [2], TensorProto.FLOAT8E4M3FN)],
    )
    with pytest.raises(hg.InvalidInputError, match=r"astype\(ml_dtypes.float8_e4m3fn\)"):
        hg.onnx.load(made).compile(here).run(x=X[0, :2])


def test_a_wrong_timeout_and_wrong_names_of_outputs_are_refused(
    loaded: hg.onnx.Model, here: hg.Session
) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="timeout is 'soon'"):
        loaded.compile(here).run({"x": X}, timeout="soon")
    session = hg.onnx.InferenceSession(perceptron(), session=here)
    with pytest.raises(hg.InvalidArgumentError, match="names of outputs are of type int"):
        session.run(5, {"x": X})
