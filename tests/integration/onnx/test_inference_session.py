"""`hg.onnx.InferenceSession`: the calls of onnxruntime, on a real daemon."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from onnx import TensorProto
from onnx_models import constant, model, node, perceptron, perceptron_result, tensor

import heliograph as hg


def test_one_line_is_all_that_changes(daemon: DaemonUrls, tmp_path: Path) -> None:
    """A program for onnxruntime names outputs or None, and asks for names, types and shapes."""
    made = perceptron()
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    with hg.onnx.InferenceSession(str(tmp_path / "model.onnx"), server=daemon.tcp) as session:
        (first,) = session.get_inputs()
        assert (first.name, first.type, list(first.shape)) == ("x", "tensor(float)", ["batch", 8])
        assert [one.name for one in session.get_outputs()] == ["y"]
        x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
        for names in (None, ["y"]):
            (y,) = session.run(names, {first.name: x})
            assert np.allclose(y, perceptron_result(made, x), rtol=1e-5, atol=1e-4)
        with pytest.raises(hg.InvalidArgumentError, match="no output 'z'"):
            session.run(["z"], {"x": x})


def test_sequences_and_loops_are_resolved(daemon: DaemonUrls) -> None:
    """A list goes in; a loop of constant length adds its elements up."""
    made = model(
        [node("SequenceAt", "s zero", "a"), node("SequenceAt", "s one", "b"), node("Sub", "b a", "y")],
        [],
        [tensor("y", [2])],
        [constant("zero", np.array(0)), constant("one", np.array(-1))],
    )
    sequence = made.graph.input.add()
    sequence.name = "s"
    sequence.type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    with hg.onnx.InferenceSession(made.SerializeToString(), server=daemon.unix) as session:
        feed = [np.full(2, number, np.float32) for number in (1, 5, 9)]
        assert session.run(None, {"s": feed})[0].tolist() == [8, 8]
