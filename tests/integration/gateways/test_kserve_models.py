"""Models in a folder run for Triton's own clients, by gRPC and by HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as by_grpc
import tritonclient.grpc.aio as by_grpc_aio
import tritonclient.http as by_http
import tritonclient.http.aio as by_http_aio
from kserve_folders import ServedModels, add_graph, add_perceptron, doubling, given, given_http, served
from onnx.reference import ReferenceEvaluator
from tritonclient.utils import InferenceServerException
from waiting import until

import heliograph as hg
from heliograph_proto import __version__
from heliograph_proto.codec.inline_forms import varint

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
#: Heliograph's and NumPy's names.
DATATYPES = {
    "BOOL": ("bool", "bool"), "FP16": ("f16", "float16"), "FP32": ("f32", "float32"),
    "FP64": ("f64", "float64"),
    **{f"INT{bits}": (f"i{bits}", f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (f"u{bits}", f"uint{bits}") for bits in (8, 16, 32, 64)},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    add_perceptron(made)
    add_graph(made, "doubling", doubling())
    broken = made / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"no model")
    return made


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[ServedModels]:
    with served(folder) as found:
        yield found


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    reference = ReferenceEvaluator(str(folder / "perceptron" / "1" / "model.onnx"))
    return lambda x: reference.run(None, {"x": x})[0]


def rows(count: int) -> Array:
    return RNG.normal(size=(count, 8)).astype(np.float32)


def test_the_server_and_its_models_are_live_and_ready(models: ServedModels) -> None:
    for client in (models.grpc, models.http):
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("perceptron") and client.is_model_ready("perceptron", "1")
        assert not client.is_model_ready("broken")
    found = models.grpc.get_server_metadata()
    assert (found.name, found.version) == ("heliograph", __version__)
    assert models.http.get_server_metadata()["extensions"] == list(found.extensions)


def test_metadata_and_config_tell_of_the_batch(models: ServedModels) -> None:
    by_http_form = models.http.get_model_metadata("perceptron")
    assert by_http_form == models.grpc.get_model_metadata("perceptron", as_json=True) | by_http_form
    assert by_http_form["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    config = models.grpc.get_model_config("perceptron").config
    assert (config.max_batch_size, list(config.input[0].dims)) == (32, [8])
    assert list(config.dynamic_batching.preferred_batch_size) == [1, 2, 4, 8, 16, 32]
    assert models.http.get_model_config("perceptron")["input"][0]["data_type"] == "TYPE_FP32"
    saved = models.grpc.get_model_config("doubling").config
    assert (saved.max_batch_size, list(saved.input[0].dims), saved.platform) == (0, [2, 3], "hgraph")


@pytest.mark.parametrize("count", [1, 3, 32])
def test_a_model_of_any_batch_answers_as_its_reference(
    models: ServedModels, expected: Any, count: int
) -> None:
    x = rows(count)
    found = models.grpc.infer("perceptron", given(x), request_id="seven")
    np.testing.assert_allclose(found.as_numpy("y"), expected(x), rtol=1e-5, atol=1e-5)
    assert (found.get_response().id, found.get_response().model_version) == ("seven", "1")
    for binary in (True, False):
        wanted = [by_http.InferRequestedOutput("y", binary_data=binary)]
        over_http = models.http.infer("perceptron", given_http(x, binary=binary), outputs=wanted)
        np.testing.assert_array_equal(over_http.as_numpy("y"), found.as_numpy("y"))


@pytest.fixture(scope="module")
def typed_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    made = tmp_path_factory.mktemp("typed")
    for datatype, (dtype, _) in DATATYPES.items():
        g = hg.Graph()
        x = g.input("x", (2, 3), dtype)
        g.output("y", hg.logical_or(x, x) if dtype == "bool" else x + x)
        add_graph(made, datatype.lower(), g)
    with served(made) as found:
        yield found


@pytest.mark.parametrize("datatype", DATATYPES)
def test_each_data_type_goes_both_ways_raw_and_typed(typed_models: ServedModels, datatype: str) -> None:
    x = np.array([[0, 1, 1], [1, 0, 1]], DATATYPES[datatype][1])
    found = typed_models.grpc.infer(datatype.lower(), given(x, datatype)).as_numpy("y")
    np.testing.assert_array_equal(found, x + x)
    assert found.dtype == x.dtype
    # The client sends no halves as JSON.
    for binary in (True, False) if datatype != "FP16" else ():
        inputs = given_http(x, datatype, binary=binary)
        np.testing.assert_array_equal(typed_models.http.infer(datatype.lower(), inputs).as_numpy("y"), x + x)


def test_asyncio_clients_share_the_models(models: ServedModels, expected: Any) -> None:
    x = rows(2)

    async def run() -> list[Array]:
        async with by_grpc_aio.InferenceServerClient(models.grpc_url) as one:
            found = await asyncio.gather(*(one.infer("perceptron", given(x)) for _ in range(8)))
        async with by_http_aio.InferenceServerClient(models.http_url) as other:
            found.append(await other.infer("perceptron", given_http(x)))
        return [one.as_numpy("y") for one in found]

    for found in asyncio.run(run()):
        np.testing.assert_allclose(found, expected(x), rtol=1e-5, atol=1e-5)


def test_a_stream_answers_each_request_and_survives_errors(models: ServedModels) -> None:
    answers: list[tuple[Any, Any]] = []
    models.grpc.start_stream(lambda result, error: answers.append((result, error)))
    x = rows(2)
    models.grpc.async_stream_infer("perceptron", given(x), request_id="1")
    models.grpc.async_stream_infer("nothing", given(x), request_id="2")
    models.grpc.async_stream_infer("perceptron", given(x), request_id="3")
    models.grpc.stop_stream()
    named = {result.get_response().id: result for result, error in answers if error is None}
    assert sorted(named) == ["1", "3"]
    np.testing.assert_array_equal(named["1"].as_numpy("y"), named["3"].as_numpy("y"))
    assert [str(error) for _, error in answers if error is not None] == [
        "there is no model 'nothing'; the repository's index has the names"
    ]


def test_statistics_count_requests_rows_and_runs(models: ServedModels) -> None:
    def read() -> tuple[int, int, int]:
        (found,) = models.grpc.get_inference_statistics("doubling").model_stats
        return found.inference_stats.success.count, found.execution_count, found.inference_stats.fail.count

    before = read()
    models.grpc.infer("doubling", given(np.ones((2, 3), np.float32)))
    models.http.infer("doubling", given_http(np.ones((2, 3), np.float32)))
    after = read()
    assert tuple(new - old for new, old in zip(after, before, strict=True)) == (2, 2, 0)
    (same,) = models.http.get_inference_statistics("doubling")["model_stats"]
    assert same["inference_stats"]["success"]["count"] == after[0]
    everything = models.http.get_inference_statistics()["model_stats"]
    assert {one["name"] for one in everything} == {"perceptron", "doubling"}


ROWS = np.ones((2, 8), np.float32)
TEXTS = np.full((2, 8), b"a", object)
FAULTS = {
    "an unknown model": ("nothing", given(ROWS), "NOT_FOUND", "there is no model 'nothing'"),
    "a broken model": ("broken", given(ROWS), "UNAVAILABLE", "broken/1/model.onnx is no ONNX model"),
    "another input": ("perceptron", given(ROWS, name="z"), "INVALID_ARGUMENT", "no input 'z'"),
    "no input": ("perceptron", [], "INVALID_ARGUMENT", "input 'x' is missing"),
    "an input twice": ("perceptron", given(ROWS) * 2, "INVALID_ARGUMENT", "is given twice"),
    "another shape": ("perceptron", given(ROWS[:, :7]), "INVALID_ARGUMENT", "the shape [2, 7] is given"),
    "another rank": ("perceptron", given(ROWS[0]), "INVALID_ARGUMENT", "the shape [8] is given"),
    "another type": ("perceptron", given(ROWS.astype("d"), "FP64"), "INVALID_ARGUMENT", "'FP64' is given"),
    "texts": ("perceptron", given(TEXTS, "BYTES"), "INVALID_ARGUMENT", "'BYTES' is given"),
    "no rows": ("perceptron", given(ROWS[:0]), "INVALID_ARGUMENT", "0 rows"),
    "too many rows": ("perceptron", given(np.ones((33, 8), np.float32)), "INVALID_ARGUMENT", "33 rows"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_request_is_refused_and_hurts_no_other(models: ServedModels, fault: str) -> None:
    name, inputs, status, words = FAULTS[fault]
    with pytest.raises(InferenceServerException) as refused:
        models.grpc.infer(name, inputs)
    assert refused.value.status() == f"StatusCode.{status}"
    assert words in refused.value.message()
    assert models.grpc.infer("perceptron", given(ROWS)).as_numpy("y").shape == (2, 4)


def test_an_unknown_version_or_output_is_refused(models: ServedModels) -> None:
    with pytest.raises(InferenceServerException, match="has no version '2'"):
        models.grpc.infer("perceptron", given(ROWS), model_version="2")
    with pytest.raises(InferenceServerException, match="no output 'z'"):
        models.grpc.infer("perceptron", given(ROWS), outputs=[by_grpc.InferRequestedOutput("z")])
    with pytest.raises(InferenceServerException, match="keeps no state for sequences"):
        models.grpc.infer("perceptron", given(ROWS), sequence_id=3, sequence_start=True)


def test_bytes_that_are_no_message_end_their_call_alone(models: ServedModels) -> None:
    with grpc.insecure_channel(models.grpc_url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for data in (b"\xff\xff", b"\x0a\x7f", b"\x1f\x8b\x08"):
            with pytest.raises(grpc.RpcError) as refused:
                infer(data, timeout=30)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as refused:
            infer(b"", timeout=30)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as refused:
            list(stream(iter([b"\xff\xff"]), timeout=30))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"", timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert models.grpc.infer("perceptron", given(ROWS)).as_numpy("y").shape == (2, 4)


def length_delimited(number: int, data: bytes) -> bytes:
    """A field of a message."""
    return bytes((number << 3 | 2,)) + varint(len(data)) + data


@pytest.mark.parametrize("field", [5, 6], ids=["inputs", "outputs"])
def test_a_message_of_many_empty_fields_is_refused_before_it_is_decoded(
    models: ServedModels, field: int
) -> None:
    """Decoded, one of 60 MB would take gigabytes."""
    data = b"\x0a\x0aperceptron" + bytes((field << 3 | 2, 0)) * 2**19
    with grpc.insecure_channel(models.grpc_url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        sizes = b"\x0a\x0aperceptron" + length_delimited(5, length_delimited(3, b"\x01" * 2**22))
        with pytest.raises(grpc.RpcError, match="too many fields"):
            infer(sizes, timeout=30)
        with pytest.raises(grpc.RpcError, match="too many fields|more than .* puts") as refused:
            infer(data, timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as refused:
            list(stream(iter([data]), timeout=30))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert models.grpc.infer("perceptron", given(ROWS)).as_numpy("y").shape == (2, 4)


def test_large_requests_count_against_the_quota_of_their_tenant(tmp_path: Path) -> None:
    add_perceptron(tmp_path, settings="max_batch_size = 1024\n")
    (tmp_path / "serve.toml").write_text("[quota]\nstaging_bytes = 100_000\n")
    rows = np.zeros((1024, 8), np.float32)
    with served(tmp_path, "--config", str(tmp_path / "serve.toml")) as models:
        for _ in range(5):
            assert len(models.grpc.infer("perceptron", given(rows)).as_numpy("y")) == 1024
            assert len(models.http.infer("perceptron", given_http(rows)).as_numpy("y")) == 1024
        with pytest.raises(InferenceServerException, match="bytes of transfers"):
            models.grpc.infer("perceptron", given(np.zeros((4096, 8), np.float32)))
        with pytest.raises(InferenceServerException, match="bytes of transfers"):
            models.http.infer("perceptron", given_http(np.zeros((4096, 8), np.float32)))
        assert len(models.grpc.infer("perceptron", given(rows)).as_numpy("y")) == 1024


def test_answers_that_the_client_of_a_stream_does_not_take_count_too(tmp_path: Path) -> None:
    add_graph(tmp_path, "doubling", doubling((2048, 1024)))
    (tmp_path / "serve.toml").write_text("[quota]\nstaging_bytes = 36_000_000\n")
    array = np.ones((2048, 1024), np.float32)
    request = by_grpc.service_pb2.ModelInferRequest(
        model_name="doubling", raw_input_contents=[array.tobytes()]
    )
    request.inputs.add(name="x", datatype="FP32", shape=array.shape)
    are_sent = threading.Event()

    def requests() -> Iterator[bytes]:
        for number in range(3):
            yield request.SerializeToString()
            if number < 2:
                until(partial(lambda count: answered(models) > count, number), "it is answered")
        are_sent.set()

    with served(tmp_path, "--config", str(tmp_path / "serve.toml")) as models:
        with grpc.insecure_channel(models.grpc_url, [("grpc.max_receive_message_length", -1)]) as channel:
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            answers = stream(requests(), timeout=30)
            assert are_sent.wait(30)
            found = [by_grpc.service_pb2.ModelStreamInferResponse.FromString(one) for one in answers]
        # The answers to the first two wait for the client, with their requests.
        assert ["bytes of transfers" in one.error_message for one in found] == [False, False, True]
        assert models.grpc.infer("doubling", given(array)).as_numpy("y")[0, 0] == 2


def answered(models: ServedModels) -> int:
    """The requests that doubling has answered."""
    return int(models.grpc.get_inference_statistics("doubling").model_stats[0].inference_stats.success.count)


def test_a_request_beyond_the_bound_is_refused(models: ServedModels) -> None:
    large = np.zeros((2**21 + 1, 8), np.float32)
    with pytest.raises(InferenceServerException) as refused:
        models.grpc.infer("perceptron", given(large))
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    with pytest.raises(InferenceServerException, match="more than 67,108,864 bytes"):
        models.http.infer("perceptron", given_http(large))
    assert models.http.infer("perceptron", given_http(ROWS)).as_numpy("y").shape == (2, 4)
