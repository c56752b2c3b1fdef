"""Tensors of requests in POSIX shared memory, as Triton's clients register it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from kserve_folders import ServedModels, add_graph, add_perceptron, given, served, summing
from tritonclient.utils import InferenceServerException

from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.config import ServerConfig

X = np.random.default_rng(3).normal(size=(4, 8)).astype(np.float32)
OUTPUT_BYTES = 4 * 4 * 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    folder = tmp_path_factory.mktemp("models")
    add_perceptron(folder)
    add_graph(folder, "summing", summing(), "sequences = 1")
    with served(folder, "--kserve-shared-memory", str(os.getuid())) as found:
        yield found


@contextmanager
def memory(size: int = X.nbytes + OUTPUT_BYTES) -> Iterator[tuple[Path, str]]:
    """A shared-memory object with X at its begin, as a file of Linux, and its key."""
    key = f"/heliograph-{uuid.uuid4().hex}"
    path = Path(f"/dev/shm{key}")
    path.touch(0o600)
    try:
        path.write_bytes(X.tobytes().ljust(size, b"\0"))
        yield path, key
    finally:
        path.unlink()


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_inputs_and_outputs_lie_in_registered_regions(models: ServedModels, kind: str) -> None:
    client, library = (models.grpc, by_grpc) if kind == "grpc" else (models.http, by_http)
    wanted = models.grpc.infer("perceptron", given(X)).as_numpy("y")
    with memory() as (path, key):
        client.register_system_shared_memory("in", key, X.nbytes)
        client.register_system_shared_memory("out", key, OUTPUT_BYTES, offset=X.nbytes)
        x, y = library.InferInput("x", list(X.shape), "FP32"), library.InferRequestedOutput("y")
        x.set_shared_memory("in", X.nbytes)
        y.set_shared_memory("out", OUTPUT_BYTES)
        result = client.infer("perceptron", [x], outputs=[y])
        found = np.frombuffer(path.read_bytes()[X.nbytes :], np.float32).reshape(4, 4)
        np.testing.assert_array_equal(found, wanted)
        assert result.get_output("y") is not None
        listed = client.get_system_shared_memory_status()
        names = sorted(listed.regions) if kind == "grpc" else sorted(one["name"] for one in listed)
        assert names == ["in", "out"]
        client.unregister_system_shared_memory("in")
        with pytest.raises(InferenceServerException, match="no region 'in'"):
            client.infer("perceptron", [x], outputs=[y])
        client.unregister_system_shared_memory()


def test_a_stream_keeps_the_order_of_a_sequence_with_regions(models: ServedModels) -> None:
    answers: dict[str, Any] = {}

    def note(result: Any, error: Any) -> None:
        answers[result.get_response().id if result else "error"] = error or result.as_numpy("y")[0]

    with memory() as (path, key):
        path.write_bytes(np.ones(2, np.float32).tobytes())
        models.grpc.register_system_shared_memory("ones", key, 8)
        try:
            models.grpc.start_stream(note)
            for number in range(8):
                inputs = given(np.ones(2, np.float32))
                if number % 2 == 0:
                    # It is read on a thread, while the request after it has its bytes.
                    inputs[0].set_shared_memory("ones", 8)
                models.grpc.async_stream_infer(
                    "summing",
                    inputs,
                    request_id=str(number),
                    sequence_id=1,
                    sequence_start=number == 0,
                    sequence_end=number == 7,
                )
            models.grpc.stop_stream()
        finally:
            models.grpc.unregister_system_shared_memory("ones")
    assert answers == {str(number): number + 1.0 for number in range(8)}


def infer(models: ServedModels, size: int = X.nbytes, offset: int = 0, out: int = OUTPUT_BYTES) -> None:
    x, y = by_grpc.InferInput("x", list(X.shape), "FP32"), by_grpc.InferRequestedOutput("y")
    x.set_shared_memory("part", size, offset=offset)
    y.set_shared_memory("part", out, offset=X.nbytes)
    models.grpc.infer("perceptron", [x], outputs=[y])


def test_parts_that_do_not_fit_and_memory_that_shrinks_are_errors(models: ServedModels) -> None:
    with memory() as (path, key):
        models.grpc.register_system_shared_memory("part", key, X.nbytes + OUTPUT_BYTES)
        try:
            infer(models)
            with pytest.raises(InferenceServerException, match="are not in the region"):
                infer(models, offset=OUTPUT_BYTES + 1)
            with pytest.raises(InferenceServerException, match="has 128 bytes, and 64 are given"):
                infer(models, size=64)
            with pytest.raises(InferenceServerException, match="and its part of the region 'part' 8"):
                infer(models, out=8)
            with pytest.raises(InferenceServerException, match="registered already"):
                models.grpc.register_system_shared_memory("part", key, 8)
            os.truncate(path, 64)
            with pytest.raises(InferenceServerException, match="became smaller"):
                infer(models)
        finally:
            models.grpc.unregister_system_shared_memory("part")
    assert models.grpc.infer("perceptron", given(X)).as_numpy("y").shape == (4, 4)


def test_only_objects_of_the_configured_user_can_be_named(models: ServedModels, tmp_path: Path) -> None:
    register = models.grpc.register_system_shared_memory
    link = Path("/dev/shm", f"heliograph-{uuid.uuid4().hex}")
    (tmp_path / "secret").write_bytes(bytes(64))
    link.symlink_to(tmp_path / "secret")
    try:
        for key in (link.name, "/../../etc/passwd", "", "/", "..", "/nothing", "a/b"):
            with pytest.raises(InferenceServerException, match="no shared memory") as refused:
                register("part", key, 8)
            assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
        host, _, port = models.http_url.rpartition(":")
        with closing(HTTPConnection(host, int(port), timeout=30)) as connection:
            # No file has this name: half of a surrogate pair.
            body = json.dumps({"key": "\ud800", "byte_size": 8})
            connection.request("POST", "/v2/systemsharedmemory/region/part/register", body)
            reply = connection.getresponse()
            assert (reply.status, "no shared memory" in reply.read().decode()) == (400, True)
    finally:
        link.unlink()
    with memory() as (_, key), pytest.raises(InferenceServerException, match="are no region"):
        register("part", key, 10**6)


def test_regions_are_refused_unless_a_user_is_configured(tmp_path: Path) -> None:
    add_perceptron(tmp_path)
    with served(tmp_path) as models, memory() as (_, key):
        assert "system_shared_memory" not in models.grpc.get_server_metadata().extensions
        with pytest.raises(InferenceServerException, match="takes no shared-memory regions"):
            models.grpc.register_system_shared_memory("part", key, 8)
        with pytest.raises(InferenceServerException, match="takes no shared-memory regions"):
            infer(models)


def test_shared_memory_is_for_clients_on_this_host() -> None:
    exposed = {"kserve": "0.0.0.0:0", "models": "m", "insecure": True, "kserve_shared_memory": "root"}
    with pytest.raises(ConfigurationError, match="for clients on this host"):
        ServerConfig(**exposed)
