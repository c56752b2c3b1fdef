"""Models are loaded, unloaded and reloaded while the daemon runs, by calls and when files change."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import numpy as np
import onnx
import pytest
from kserve_folders import add_graph, add_model, add_perceptron, doubling, given, served, states
from onnx.reference import ReferenceEvaluator
from onnx_models import model, node, perceptron, tensor
from tritonclient.utils import InferenceServerException
from waiting import until

import heliograph as hg
from heliograph import admin

X = np.ones((1, 8), np.float32)


def test_a_model_is_unloaded_and_loaded_by_calls(tmp_path: Path) -> None:
    add_perceptron(tmp_path)
    with served(tmp_path) as models:
        before = models.grpc.infer("perceptron", given(X)).as_numpy("y")
        models.grpc.unload_model("perceptron")
        assert states(models.grpc) == {("perceptron", "1"): "UNAVAILABLE"}
        assert not models.http.is_model_ready("perceptron")
        with pytest.raises(InferenceServerException, match="unavailable: unloaded"):
            models.grpc.infer("perceptron", given(X))
        models.http.load_model("perceptron")
        np.testing.assert_array_equal(models.grpc.infer("perceptron", given(X)).as_numpy("y"), before)
        with pytest.raises(InferenceServerException, match="no model 'nothing'"):
            models.grpc.load_model("nothing")
        with pytest.raises(InferenceServerException, match="no model '../secret'"):
            models.grpc.load_model("../secret")


def test_requests_like_those_before_go_to_the_model_that_is_loaded_now(tmp_path: Path) -> None:
    add_graph(tmp_path, "doubling", doubling())
    x = np.ones((2, 3), np.float32)
    with served(tmp_path) as models:
        for factor in (1, 2, 3):
            found = models.grpc.infer("doubling", given(x * factor)).as_numpy("y")
            np.testing.assert_array_equal(found, x * factor * 2)
        g = hg.Graph()
        given_x = g.input("x", (2, 3), "f32")
        g.output("negative", -given_x)
        g.output("sum", hg.sum(given_x))
        hg.save(g, tmp_path / "doubling" / "1" / "model.hgraph")
        models.grpc.load_model("doubling")
        for factor in (1, 2, 3):
            answer = models.grpc.infer("doubling", given(x * factor))
            np.testing.assert_array_equal(answer.as_numpy("negative"), x * -factor)
            np.testing.assert_array_equal(answer.as_numpy("sum"), 6 * factor)
            assert answer.as_numpy("y") is None
        models.grpc.unload_model("doubling")
        with pytest.raises(InferenceServerException, match="unavailable: unloaded"):
            models.grpc.infer("doubling", given(x))


def test_the_latest_version_serves_unless_settings_name_others(tmp_path: Path) -> None:
    first, second = add_perceptron(tmp_path, 1), add_perceptron(tmp_path, 2)
    with served(tmp_path) as models:
        assert states(models.grpc) == {("perceptron", "2"): "READY"}
        (tmp_path / "perceptron" / "model.toml").write_text("versions = [1, 2]")
        models.grpc.load_model("perceptron")
        assert set(states(models.grpc).values()) == {"READY"}
        for version, made in (("1", first), ("2", second), ("", second)):
            found = models.grpc.infer("perceptron", given(X), model_version=version).as_numpy("y")
            (wanted,) = ReferenceEvaluator(made).run(None, {"x": X})
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        metadata = models.grpc.get_model_metadata("perceptron")
        assert list(metadata.versions) == ["1", "2"]


@pytest.mark.slow
def test_changed_files_are_loaded_and_removed_ones_are_unloaded(tmp_path: Path) -> None:
    add_perceptron(tmp_path)
    with served(tmp_path) as models:
        add_graph(tmp_path, "doubling", doubling())
        until(lambda: ("doubling", "1") in states(models.grpc), "the new model is seen")
        until(lambda: states(models.grpc)["doubling", "1"] == "READY", "the new model is loaded")
        onnx.save_model(perceptron(seed=9), tmp_path / "perceptron" / "1" / "model.onnx")
        (wanted,) = ReferenceEvaluator(perceptron(seed=9)).run(None, {"x": X})

        def is_new() -> bool:
            return np.allclose(models.grpc.infer("perceptron", given(X)).as_numpy("y"), wanted, rtol=1e-5)

        until(is_new, "the changed file is in use")
        shutil.rmtree(tmp_path / "doubling")
        until(lambda: ("doubling", "1") not in states(models.grpc), "the removed model is unloaded")
        with pytest.raises(InferenceServerException, match="there is no model 'doubling'"):
            models.grpc.get_model_metadata("doubling")
        add_graph(tmp_path, "doubling", doubling())
        until(lambda: ("doubling", "1") in states(models.grpc), "it is seen again")
        until(lambda: states(models.grpc)["doubling", "1"] == "READY", "it is loaded again")


def test_a_reload_that_fails_leaves_the_model_before_in_use(tmp_path: Path) -> None:
    add_perceptron(tmp_path)
    with served(tmp_path) as models:
        wanted = models.grpc.infer("perceptron", given(X)).as_numpy("y")
        (tmp_path / "perceptron" / "1" / "model.onnx").write_bytes(b"broken")
        with pytest.raises(InferenceServerException, match="no ONNX model"):
            models.grpc.load_model("perceptron")
        np.testing.assert_array_equal(models.grpc.infer("perceptron", given(X)).as_numpy("y"), wanted)
        (entry,) = models.grpc.get_model_repository_index().models
        assert entry.state == "READY" and "no ONNX model" in entry.reason
        assert str(tmp_path) not in entry.reason


def test_a_model_may_be_loaded_again_while_a_request_arrives(tmp_path: Path) -> None:
    add_perceptron(tmp_path)
    data = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1] * 8}]})
    with served(tmp_path) as models:
        host, _, port = models.http_url.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as client, client.makefile("rb") as replies:
            head = f"POST /v2/models/perceptron/infer HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            client.sendall(f"{head}Content-Length: {len(data)}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert b"100 Continue" in replies.readline(), "the body is wanted now"
            models.grpc.load_model("perceptron")
            client.sendall(data.encode())
            assert b"HTTP/1.1 200 OK" in replies.read()


def test_bad_settings_keep_a_model_out_and_say_why(tmp_path: Path) -> None:
    add_perceptron(tmp_path, settings="max_batch = 3")
    add_graph(tmp_path, "doubling", doubling(), "max_batch_size = 5")
    add_graph(tmp_path, "good", doubling())
    with served(tmp_path) as models:
        found = {one.name: one.reason for one in models.grpc.get_model_repository_index().models}
        assert found["perceptron"] == "perceptron/model.toml: unknown key 'max_batch'"
        assert "dimension 0 is no batch of 5" in found["doubling"]
        assert models.grpc.is_model_ready("good")


def test_a_folder_that_is_no_model_keeps_no_other_out(tmp_path: Path) -> None:
    add_perceptron(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "perceptron" / "9").symlink_to("9")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model.toml").write_text("instances = 1")
    with served(tmp_path) as models:
        assert states(models.grpc) == {("perceptron", "1"): "READY", ("empty", ""): "UNAVAILABLE"}
        assert not models.http.is_model_ready("empty")
        with pytest.raises(InferenceServerException, match="unavailable: the model 'empty' has no version"):
            models.grpc.infer("empty", given(X))
        with pytest.raises(InferenceServerException, match="no model 'ééé"):
            models.grpc.load_model("é" * 200)
        models.grpc.load_model("perceptron")


def test_settings_are_in_force_and_plans_are_made_before_the_first_request(tmp_path: Path) -> None:
    settings = (
        'max_batch_size = 4\nbatch_sizes = [1, 4]\nwindow_ms = 2.5\ninstances = 2\ndevices = ["cpu0"]\n'
        "priorities = 3\ndefault_priority = 2\n"
    )
    any_size = model([node("Relu", "x", "y")], [tensor("x", ["batch", "n"])], [tensor("y", ["batch", "n"])])
    add_model(tmp_path, "relu", any_size, f"{settings}warm_up = {{x = [16]}}")
    add_model(tmp_path, "badly_warmed", any_size, "warm_up = {z = [16]}")
    with served(tmp_path) as models:
        config = models.grpc.get_model_config("relu").config
        batching = config.dynamic_batching
        assert (config.max_batch_size, config.instance_group[0].count) == (4, 2)
        assert list(batching.preferred_batch_size) == [1, 4]
        assert (batching.max_queue_delay_microseconds, batching.priority_levels) == (2500, 3)
        reasons = {one.name: one.reason for one in models.grpc.get_model_repository_index().models}
        assert "warm_up names 'z'" in reasons["badly_warmed"]
        with admin.connect(models.url) as operator:
            (session,) = operator.sessions()
            assert session.plans == 2
            x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 16)
            found = models.grpc.infer("relu", given(x)).as_numpy("y")
            np.testing.assert_array_equal(found, np.maximum(x, 0))
            (session,) = operator.sessions()
            assert session.plans == 2


def test_a_graph_of_fixed_rows_takes_fewer(tmp_path: Path) -> None:
    add_graph(tmp_path, "doubling", doubling((4, 3)), "max_batch_size = 4")
    with served(tmp_path) as models:
        for rows in (1, 3, 4):
            x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
            np.testing.assert_array_equal(models.grpc.infer("doubling", given(x)).as_numpy("y"), x + x)


def test_models_are_sessions_of_a_tenant_of_the_daemon(tmp_path: Path) -> None:
    add_perceptron(tmp_path)
    with served(tmp_path) as models:
        with admin.connect(models.url) as operator:
            (session,) = operator.sessions()
        assert (session.tenant, session.client) == ("kserve", "kserve perceptron 1")
        models.grpc.unload_model("perceptron")
        with admin.connect(models.url) as operator:
            assert not operator.sessions()
