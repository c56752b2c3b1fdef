"""The HTTP form of the open inference protocol, as curl and other programs write it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from kserve_folders import ServedModels, add_perceptron, served

PATH = "/v2/models/perceptron/infer"
X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [[1.0] * 8]}
WITHOUT = {"name": "x", "datatype": "FP32", "shape": [1, 8]}
ONES: dict[str, Any] = {"inputs": [X]}
SIZE = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    folder = tmp_path_factory.mktemp("models")
    add_perceptron(folder)
    with served(folder) as found:
        yield found


def call(
    models: ServedModels, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """The status of a reply and its JSON."""
    host, _, port = models.http_url.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        reply = connection.getresponse()
        found = reply.read()
        return reply.status, json.loads(found) if found else None


def test_elements_may_be_flat_or_nested(models: ServedModels) -> None:
    flat = {"inputs": [{**X, "data": [1.0] * 8}]}
    status, nested_reply = call(models, "POST", PATH, ONES | {"id": "a"})
    assert (status, nested_reply["id"], nested_reply["model_name"]) == (200, "a", "perceptron")
    _, flat_reply = call(models, "POST", "/v2/models/perceptron/versions/1/infer", flat)
    assert flat_reply["outputs"] == nested_reply["outputs"]
    (output,) = flat_reply["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("y", "FP32", [1, 4])


def test_health_metadata_and_the_repository_are_plain_gets_and_posts(models: ServedModels) -> None:
    assert call(models, "GET", "/v2/health/live") == (200, None)
    assert call(models, "GET", "/v2/health/ready") == (200, None)
    assert call(models, "GET", "/v2/models/perceptron/versions/1/ready") == (200, None)
    assert call(models, "GET", "/v2")[1]["name"] == "heliograph"
    assert call(models, "POST", "/v2/repository/index", {"ready": True})[1] == [
        {"name": "perceptron", "version": "1", "state": "READY", "reason": ""}
    ]


FAULTS: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{", 400, "the body is not JSON"),
    "a list": ([], 400, "the body is no JSON object"),
    "no inputs": ({}, 400, "input 'x' is missing"),
    "inputs that are no list": ({"inputs": 3}, 400, "inputs is no JSON array"),
    "too few elements": ({"inputs": [{**X, "data": [1.0]}]}, 400, "and 1 are given"),
    "texts": ({"inputs": [{**X, "data": ["a"] * 8}]}, 400, "are not of FP32"),
    "ragged lists": ({"inputs": [{**X, "data": [[1.0], [1.0, 2.0]]}]}, 400, "are no array"),
    "a negative size": ({"inputs": [{**X, "shape": [-1, 8]}]}, 400, "the shape [-1, 8] is given"),
    "a size that is none": ({"inputs": [{**X, "shape": ["1", 8]}]}, 400, "no integers"),
    "a bad priority": (ONES | {"parameters": {"priority": -1}}, 400, "'priority' is -1"),
    "an unknown output": (ONES | {"outputs": [{"name": "z"}]}, 400, "no output 'z'"),
    "outputs beyond the model's": (
        ONES | {"outputs": [{"name": "y"}] * 9}, 400, "9 outputs are named, and the model has 1",
    ),
    "a shape beyond the bound": ({"inputs": [{**X, "shape": [2**40, 8]}]}, 413, "more than 2,147,483,648"),
    "bytes that are missing": (
        {"inputs": [WITHOUT | {"parameters": {"binary_data_size": 32}}]},
        400, "binary_data_size is 32, and 0 bytes are left",
    ),
    "a region": ({"inputs": [{**X, "parameters": {"shared_memory_region": "r"}}]}, 501, "takes no shared"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_body_is_refused_with_an_error(models: ServedModels, fault: str) -> None:
    body, status, words = FAULTS[fault]
    found, reply = call(models, "POST", PATH, body)
    assert (found, list(reply)) == (status, ["error"])
    assert words in reply["error"]
    assert call(models, "POST", PATH, ONES)[0] == 200


def test_bad_paths_headers_and_loads_are_refused(models: ServedModels) -> None:
    assert call(models, "GET", "/v2/nothing") == (404, {"error": "Not Found"})
    assert call(models, "GET", PATH) == (405, {"error": "Method Not Allowed"})
    assert call(models, "GET", "/v2/models/nothing")[0] == 404
    assert call(models, "GET", "/v2/models/perceptron/versions/2/stats")[0] == 404
    assert call(models, "POST", PATH, ONES, {SIZE: "-3"})[0] == 400
    for size in ("999999", "0" * 20 + "999999", "1" * 5000):
        assert call(models, "POST", PATH, ONES, {SIZE: size})[0] == 400
    assert call(models, "POST", PATH, ONES, {"Content-Encoding": "gzip"})[0] == 400
    data = json.dumps(ONES).encode()
    status, reply = call(models, "POST", PATH, data + b"x", {SIZE: str(len(data))})
    assert (status, reply["error"]) == (400, "1 bytes of the body belong to no input")
    load = "/v2/repository/models/perceptron/load"
    assert call(models, "POST", load, {"parameters": {"config": "{}"}})[0] == 400


def test_outputs_that_are_not_finite_need_bytes(models: ServedModels) -> None:
    large = {"inputs": [{**X, "data": [3e38] * 8}]}
    status, reply = call(models, "POST", PATH, large)
    assert status == 400 and "not finite" in reply["error"]
    wanted = large | {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    host, _, port = models.http_url.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        connection.request("POST", PATH, json.dumps(wanted).encode())
        raw = connection.getresponse()
        data, size = raw.read(), int(raw.headers[SIZE])
    assert json.loads(data[:size])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert not np.isfinite(np.frombuffer(data[size:], np.float32)).all()
