"""Language models of GGUF files embed and write texts for Triton's own clients."""

from __future__ import annotations

import asyncio
import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as by_grpc
import tritonclient.grpc.aio as by_grpc_aio
import tritonclient.http as by_http
from gguf_files import write_model
from kserve_folders import ServedModels, doubling, served, states
from llm_models import write_encoder
from tritonclient.utils import InferenceServerException
from waiting import until

import heliograph as hg

PROMPT, TOKENS = "the cat sat on", 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
TEXTS = ["the cat", "a dog sat on the mat", "the", "the cat"]


def add(folder: Path, name: str, settings: str = "") -> Path:
    place = folder / name / "1"
    place.mkdir(parents=True)
    (folder / name / "model.toml").write_text(settings)
    return place / "model.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts")
    write_encoder(add(made, "encoder"), "bert")
    write_model(add(made, "writer", "max_batch_size = 4\nmax_queue = 8\ncontext = 128"), "llama", "f16")
    write_model(add(made, "decoder", 'task = "embed"'), "llama", "f32")
    write_model(add(made, "rounded", 'task = "embed"'), "llama", "q8_0")
    write_model(add(made, "wide", 'task = "embed"\nactivations = "f32"'), "llama", "q8_0")
    write_model(add(made, "parts", "context = 128"), "llama", "f16", part_tensors=4)
    return made


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[ServedModels]:
    with served(folder) as found:
        yield found


def texts(given: list[Any], name: str = "text") -> by_grpc.InferInput:
    made = by_grpc.InferInput(name, [len(given)], "BYTES")
    made.set_data_from_numpy(np.array([one.encode() for one in given], np.object_))
    return made


def truth(name: str, *, value: bool) -> by_grpc.InferInput:
    made = by_grpc.InferInput(name, [1], "BOOL")
    made.set_data_from_numpy(np.array([value]))
    return made


@pytest.fixture(scope="module")
def expected(models: ServedModels) -> str:
    """The answer of the model by our own client."""
    with hg.connect(models.url) as session:
        llm = hg.llm.load(session, models.folder / "writer" / "1" / "model.gguf", context=128)
        return llm.generate(PROMPT, temperature=0, max_tokens=TOKENS).text


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def continued(models: ServedModels) -> str:
    """The answer to the prompt by gRPC."""
    return text_of(models.grpc.infer("writer", [texts([PROMPT], "text_input")], parameters=GREEDY))


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_texts_become_the_vectors_of_our_own_client(models: ServedModels, name: str) -> None:
    found = models.grpc.infer(name, [texts(TEXTS)]).as_numpy("embedding")
    with hg.connect(models.url) as session:
        llm = hg.llm.load(session, models.folder / name / "1" / "model.gguf")
        np.testing.assert_allclose(found, llm.embed(TEXTS), rtol=1e-5, atol=1e-6)
    for binary in (True, False):
        given = by_http.InferInput("text", [len(TEXTS)], "BYTES")
        given.set_data_from_numpy(np.array(TEXTS, np.object_), binary_data=binary)
        over_http = models.http.infer(name, [given])
        np.testing.assert_allclose(over_http.as_numpy("embedding"), found, rtol=1e-5, atol=1e-6)


def test_settings_say_whether_rows_are_rounded(models: ServedModels) -> None:
    found = {one: models.grpc.infer(one, [texts(TEXTS)]).as_numpy("embedding") for one in ("rounded", "wide")}
    with hg.connect(models.url) as session:
        for name, activations in (("rounded", "q8"), ("wide", "f32")):
            path = models.folder / name / "1" / "model.gguf"
            expected = hg.llm.load(session, path, activations=activations).embed(TEXTS)
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
    assert abs(found["rounded"] - found["wide"]).max() > 1e-5


def test_texts_of_several_clients_share_runs(models: ServedModels) -> None:
    async def run() -> list[Any]:
        async with by_grpc_aio.InferenceServerClient(models.grpc_url) as client:
            return await asyncio.gather(*(client.infer("encoder", [texts([one])]) for one in TEXTS * 8))

    (before,) = models.grpc.get_inference_statistics("encoder").model_stats
    found = [one.as_numpy("embedding")[0] for one in asyncio.run(run())]
    (after,) = models.grpc.get_inference_statistics("encoder").model_stats
    np.testing.assert_allclose(found[0], found[3], rtol=1e-5, atol=1e-6)
    assert after.inference_count - before.inference_count == len(found)
    assert after.execution_count - before.execution_count < len(found)


def test_metadata_and_config_say_what_a_language_model_takes(models: ServedModels) -> None:
    about = models.http.get_model_metadata("writer")
    assert about["platform"] == "gguf"
    assert about["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    config = models.grpc.get_model_config("writer").config
    assert config.model_transaction_policy.decoupled
    assert [one.optional for one in config.input] == [False, True, True, True]
    assert config.input[0].data_type == 13
    assert not models.grpc.get_model_config("encoder").config.model_transaction_policy.decoupled
    assert "generate" in models.http.get_server_metadata()["extensions"]


def test_a_model_in_several_files_answers_as_the_same_in_one(models: ServedModels, expected: str) -> None:
    files = [one.name for one in (models.folder / "parts" / "1").iterdir()]
    assert len(files) > 1
    assert "model.gguf" not in files
    assert text_of(models.grpc.infer("parts", [texts([PROMPT], "text_input")], parameters=GREEDY)) == expected


def test_a_prompt_is_continued_as_by_our_own_client(models: ServedModels, expected: str) -> None:
    found = models.grpc.infer("writer", [texts([PROMPT], "text_input")], parameters=GREEDY)
    assert text_of(found) == expected
    assert found.as_numpy("finish_reason")[0] in (b"length", b"stop")
    # As the clients of other servers send it: options as a JSON text, numbers as texts.
    sampling = texts([json.dumps({"temperature": "0", "max_tokens": str(TOKENS)})], "sampling_parameters")
    given = [texts([PROMPT], "text_input"), truth("stream", value=False), sampling]
    given.append(truth("exclude_input_in_output", value=False))
    assert text_of(models.grpc.infer("writer", given)) == PROMPT + expected


def test_a_stream_has_the_pieces_of_several_answers(models: ServedModels, expected: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with by_grpc.InferenceServerClient(models.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number in range(3):
            given = [texts([PROMPT], "text_input"), truth("stream", value=True)]
            client.async_stream_infer("writer", given, request_id=str(number), parameters=GREEDY)
        pieces: dict[str, list[str]] = {}
        ended = 0
        while ended < 3:
            found = answers.get(timeout=60)
            assert not isinstance(found, InferenceServerException), found
            response = found.get_response()
            pieces.setdefault(response.id, []).append(text_of(found))
            ended += response.parameters["triton_final_response"].bool_param
    assert {number: "".join(one) for number, one in pieces.items()} == dict.fromkeys("012", expected)
    assert all(len(one) > 2 for one in pieces.values())


def post(models: ServedModels, path: str, table: Any) -> Any:
    data = table if isinstance(table, bytes) else json.dumps(table).encode()
    return urllib.request.urlopen(f"http://{models.http_url}/v2/models/{path}", data, timeout=60)


def test_generate_answers_a_plain_post(models: ServedModels, expected: str) -> None:
    with post(models, "writer/generate", {"text_input": PROMPT, "parameters": GREEDY, "id": "7"}) as reply:
        found = json.load(reply)
    reason = found.pop("finish_reason")
    assert found == {"model_name": "writer", "model_version": "1", "id": "7", "text_output": expected}
    assert reason in ("length", "stop")
    with post(models, "writer/versions/1/generate", {"text_input": PROMPT, **GREEDY}) as reply:
        assert json.load(reply)["text_output"] == expected


def test_generate_stream_sends_events(models: ServedModels, expected: str) -> None:
    with post(models, "writer/generate_stream", {"text_input": PROMPT, "parameters": GREEDY}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.read().decode().splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(one["text_output"] for one in events) == expected
    assert len(events) > 2
    assert [one["finish_reason"] for one in events[:-1]] == [""] * (len(events) - 1)


def test_many_prompts_are_continued_at_a_time(models: ServedModels, expected: str) -> None:
    def ask(_: int) -> str:
        with by_grpc.InferenceServerClient(models.grpc_url) as client:
            return text_of(client.infer("writer", [texts([PROMPT], "text_input")], parameters=GREEDY))

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(12))) == [expected] * 12


BAD: dict[str, tuple[Any, int, str]] = {
    "no text": ({}, 400, "'text_input' is missing"),
    "a text that is none": ({"text_input": [1]}, 400, "no single value"),
    "a number as text": ({"text_input": 7}, 400, "not of BYTES"),
    "an unknown parameter": ({"text_input": "a", "beams": 4}, 400, "'beams' is not taken"),
    "a number that is none": ({"text_input": "a", "max_tokens": "many"}, 400, "no number"),
    "a negative length": ({"text_input": "a", "max_tokens": -1}, 400, "max_tokens is -1"),
    "options that are no object": ({"text_input": "a", "sampling_parameters": "[1]"}, 400, "no JSON object"),
    "a long prompt": ({"text_input": "cat " * 4000}, 413, "context"),
    "a longer text": ({"text_input": "a" * (2**20 + 1)}, 413, "of at most 1,048,576"),
    "many stop texts": ({"text_input": "a", "stop": ["b"] * 17}, 400, "17 texts, of at most 16"),
    "half a surrogate pair": (b'{"text_input": "\\ud800"}', 400, "not of BYTES"),
    "no object": (b"[]", 400, "no JSON object"),
    "half a body": (b'{"text_input"', 400, "not JSON"),
    "a sequence": ({"text_input": "a", "parameters": {"sequence_id": 1}}, 501, "no state for sequences"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_a_bad_request_for_text_is_refused(models: ServedModels, expected: str, call: str, case: str) -> None:
    table, status, why = BAD[case]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(models, f"writer/{call}", table)
    with refused.value as reply:
        assert reply.code == status
        assert why in json.load(reply)["error"]
    assert (
        text_of(models.grpc.infer("writer", [texts([PROMPT], "text_input")], parameters=GREEDY)) == expected
    )


def test_bad_texts_are_refused_by_grpc(models: ServedModels) -> None:
    given = by_grpc.InferInput("text", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"\xff\xfe"], np.object_))
    with pytest.raises(InferenceServerException, match="not UTF-8"):
        models.grpc.infer("encoder", [given])
    # A size beyond the bytes, and bytes that no text has.
    for raw in (b"\x09\0\0\0cat", b"\x03\0\0\0cat\0", b"\x03\0", b""):
        request = by_grpc.service_pb2.ModelInferRequest(model_name="encoder", raw_input_contents=[raw])
        request.inputs.add(name="text", datatype="BYTES", shape=[1])
        with pytest.raises(Exception, match="has 1 texts"):
            models.grpc._client_stub.ModelInfer(request)
    assert "writes no text" in error_of(models, "encoder/generate", {"text_input": "a"})


def test_texts_beyond_any_run_are_refused_before_they_are_read(models: ServedModels) -> None:
    many = by_grpc.service_pb2.ModelInferRequest(model_name="encoder")
    many.inputs.add(name="text", datatype="BYTES", shape=[2**20])
    raw, typed = (by_grpc.service_pb2.ModelInferRequest() for _ in range(2))
    raw.CopyFrom(many)
    raw.raw_input_contents.append(bytes(4 * 2**20))
    typed.CopyFrom(many)
    typed.inputs[0].contents.bytes_contents.extend([b""] * 1025)
    for request in (raw, typed):
        with pytest.raises(Exception, match="has more than 1,024 elements"):
            models.grpc._client_stub.ModelInfer(request)


def error_of(models: ServedModels, path: str, table: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(models, path, table)
    with refused.value as reply:
        return str(json.load(reply)["error"])


def test_the_answer_of_a_client_that_leaves_ends(models: ServedModels, expected: str) -> None:
    """Its row is free: as many as there are leave, and others are answered."""

    async def leave() -> None:
        async with by_grpc_aio.InferenceServerClient(models.grpc_url) as client:
            endless = {"temperature": 0, "max_tokens": 100}

            async def requests() -> Any:
                yield {
                    "model_name": "writer",
                    "inputs": [texts([PROMPT], "text_input"), truth("stream", value=True)],
                    "parameters": endless,
                }
                await asyncio.Event().wait()

            stream = client.stream_infer(requests())
            await anext(aiter(stream))
            stream.cancel()

    for _ in range(6):
        asyncio.run(leave())
    assert continued(models) == expected


def test_a_language_model_is_unloaded_and_loaded_again(models: ServedModels, expected: str) -> None:
    models.grpc.unload_model("writer")
    assert states(models.grpc)["writer", "1"] == "UNAVAILABLE"
    with pytest.raises(InferenceServerException, match="unavailable"):
        continued(models)
    models.grpc.load_model("writer")
    assert (
        text_of(models.grpc.infer("writer", [texts([PROMPT], "text_input")], parameters=GREEDY)) == expected
    )


def test_a_broken_file_or_setting_is_reported_and_hurts_no_other(tmp_path: Path) -> None:
    add(tmp_path, "noise").write_bytes(b"no model")
    write_encoder(add(tmp_path, "wrong_task", 'task = "generate"'), "bert")
    write_model(add(tmp_path, "sequences", "sequences = 2"), "llama", "f32")
    place = tmp_path / "graph" / "1"
    place.mkdir(parents=True)
    hg.save(doubling(), place / "model.hgraph")
    (tmp_path / "graph" / "model.toml").write_text("context = 64")
    write_encoder(add(tmp_path, "good"), "bert")
    write_model(add(tmp_path, "precision", 'activations = "q4"'), "llama", "f32")
    with served(tmp_path) as models:
        until(lambda: len(states(models.grpc)) == 6, "all are seen")
        index = models.grpc.get_model_repository_index().models
        reasons = {one.name: one.reason for one in index}
        assert states(models.grpc)["good", "1"] == "READY"
    assert "writes no text" in reasons["wrong_task"]
    assert "no sequences" in reasons["sequences"]
    assert "activations is 'q4'" in reasons["precision"]
    assert "settings of language models" in reasons["graph"]
    assert reasons["noise"]
