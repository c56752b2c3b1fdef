"""`hg.onnx.InferenceSession`: the calls of onnxruntime, on a real daemon."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from onnx import TensorProto, helper
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


def test_what_a_script_for_onnxruntime_asks_for_is_there(daemon: DaemonUrls) -> None:
    """Options and providers are taken with a note; metadata is that of the file."""
    import heliograph.onnx as ort

    made = perceptron()
    helper.set_model_props(made, {"names": "cat, dog"})
    made.producer_name, made.model_version = "trainer", 3
    options = ort.SessionOptions(intra_op_num_threads=2)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with pytest.warns(UserWarning, match="providers and provider_options are not used"):
        session = ort.InferenceSession(
            made.SerializeToString(), options, ["CPUExecutionProvider"], server=daemon.tcp
        )
    with session:
        assert session.get_providers() == ort.get_available_providers() == ["HeliographExecutionProvider"]
        assert list(session.get_provider_options()) == session.get_providers()
        assert session.get_session_options() is options
        assert session.get_overridable_initializers() == []
        found = session.get_modelmeta()
        assert found.custom_metadata_map == {"names": "cat, dog"}
        assert (found.producer_name, found.version, found.graph_name) == ("trainer", 3, "graph")
        x = np.ones((2, 8), np.float32)
        assert [len(session.run(names, {"x": x})) for names in (None, [], "y", ["y", "y"])] == [1, 1, 1, 2]
