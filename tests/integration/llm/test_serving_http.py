"""OpenAI's HTTP interface in front of a model."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_model
from llm_models import write_encoder
from llm_servers import SECONDS, HttpModel, events, served

import heliograph as hg
from heliograph.llm.serving import Bounds
from heliograph.testing import running_daemon

PROMPT = "The daemon serves graphs"
CHAT = [{"role": "user", "content": "Hello there!"}]


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "small.gguf", "llama", "q8_0", context=700)


@pytest.fixture(scope="module")
def http(url: str, model: Path) -> Iterator[HttpModel]:
    with served(url, model, Bounds(4, 8)) as http:
        yield http


def refusal(http: HttpModel, path: str, body: Any = None, **given: Any) -> tuple[int, Any, Any]:
    """The status, the parameter and the code of a refusal."""
    status, found, _ = http.call("POST", path, body, **given)
    error = found["error"]
    assert error["message"] and error["type"]
    return status, error["param"], error["code"]


def text_of(response: HTTPResponse) -> str:
    """The text of the rest of a stream."""
    return "".join(one["choices"][0]["text"] for one in events(response) if one != "[DONE]")


def test_a_completion_is_the_text_of_the_model_with_the_same_seed(
    http: HttpModel, url: str, model: Path
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "seed": 5, "temperature": 0.9, "top_p": 0.8}
    with hg.connect(url, progress=None) as session:
        expected = hg.llm.load(session, model).generate(PROMPT, min_p=0.0, **options).result()
    found = http.post("/v1/completions", model="small", prompt=PROMPT, **options)
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert found["object"] == "text_completion" and found["model"] == "small"
    assert found["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert (found["usage"]["completion_tokens"], found["usage"]["total_tokens"]) == (
        12,
        12 + expected.prompt_tokens,
    )


def test_the_pieces_of_a_stream_make_up_the_text(http: HttpModel) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "seed": 5}
    whole = http.post("/v1/completions", prompt=PROMPT, **options)["choices"][0]
    pieces = http.stream("/v1/completions", prompt=PROMPT, **options)
    assert len(pieces) > 3
    assert "".join(one["choices"][0]["text"] for one in pieces) == whole["text"]
    assert [one["choices"][0]["finish_reason"] for one in pieces if one["choices"][0]["finish_reason"]] == [
        "length"
    ]


def test_a_chat_streams_a_role_then_pieces_then_its_usage(http: HttpModel) -> None:
    long = [{"role": "user", "content": "Hello there! " * 20}]
    options: dict[str, Any] = {"max_completion_tokens": 10, "seed": 5, "messages": long}
    found = http.post("/v1/chat/completions", **options)
    message = found["choices"][0]["message"]
    assert message["role"] == "assistant" and found["object"] == "chat.completion"
    *pieces, last = http.stream("/v1/chat/completions", stream_options={"include_usage": True}, **options)
    deltas = [one["choices"][0]["delta"] for one in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(one.get("content", "") for one in deltas) == message["content"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_several_answers_and_prompts_come_in_their_order(http: HttpModel) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "seed": 9}
    found = http.post("/v1/completions", prompt=[PROMPT, "Another one"], n=2, **options)["choices"]
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    alone = [
        http.post("/v1/completions", prompt=prompt, **{**options, "seed": seed})["choices"][0]["text"]
        for prompt in (PROMPT, "Another one")
        for seed in (9, 10)
    ]
    assert [one["text"] for one in found] == alone
    pieces = http.stream("/v1/completions", prompt=[PROMPT, "Another one"], n=2, **options)
    texts = ["", "", "", ""]
    for piece in pieces:
        texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert texts == alone


def test_log_probabilities_come_with_each_token(http: HttpModel) -> None:
    options: dict[str, Any] = {"max_tokens": 5, "seed": 5, "temperature": 0}
    found = http.post("/v1/completions", prompt=PROMPT, logprobs=2, **options)["choices"][0]
    shown = found["logprobs"]
    assert "".join(shown["tokens"]) == found["text"] and len(shown["top_logprobs"]) == 5
    assert shown["token_logprobs"] == [max(one.values()) for one in shown["top_logprobs"]]
    chat = http.post("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=3, **options)
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 5 and all(len(one["top_logprobs"]) == 3 for one in content)
    assert all(one["top_logprobs"][0]["token"] == one["token"] for one in content)
    streamed = http.stream("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=3, **options)
    shown = [one["choices"][0]["logprobs"] for one in streamed]
    assert [entry for one in shown if one for entry in one["content"]] == content


def test_the_bytes_of_tokens_are_those_of_the_text_also_of_parts_of_characters(http: HttpModel) -> None:
    # The token of the byte F0, with which characters of four bytes begin.
    form: dict[str, Any] = {"logit_bias": {str(3 + 0xF0): 100}, "max_tokens": 4, "seed": 5}
    chat = http.post("/v1/chat/completions", messages=CHAT, logprobs=True, **form)["choices"][0]
    entries = chat["logprobs"]["content"]
    assert [bytes(one["bytes"]) for one in entries] == [b"\xf0"] * 4
    assert entries[0]["token"] == "bytes:\\xf0" and chat["message"]["content"] == "\ufffd" * 4
    whole = http.post("/v1/completions", prompt=PROMPT, logprobs=20, **form)["choices"][0]["logprobs"]
    assert whole["text_offset"] == [0, 0, 1, 2] and whole["tokens"] == ["bytes:\\xf0"] * 4
    streamed = http.stream("/v1/completions", prompt=PROMPT, logprobs=20, **form)
    shown = [one["choices"][0]["logprobs"] for one in streamed]
    assert sum((one["text_offset"] for one in shown if one), []) == whole["text_offset"]


def test_penalties_biases_and_stops_are_those_of_the_model(http: HttpModel) -> None:
    forced = http.post("/v1/completions", prompt=PROMPT, logit_bias={"400": 100}, max_tokens=3)
    token = http.post("/detokenize", tokens=[400, 400, 400])["content"]
    assert forced["choices"][0]["text"] == token
    whole = http.post("/v1/completions", prompt=PROMPT, seed=7, max_tokens=24)["choices"][0]["text"]
    stopped = http.post("/v1/completions", prompt=PROMPT, seed=7, max_tokens=24, stop=[whole[6:9]])
    assert stopped["choices"][0]["text"] == whole[: whole.index(whole[6:9])]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    changed = http.post(
        "/v1/completions", prompt=PROMPT, seed=7, max_tokens=24, presence_penalty=2, frequency_penalty=2
    )
    assert changed["choices"][0]["text"] != whole


def test_two_streams_go_on_side_by_side(http: HttpModel) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "logit_bias": {"2": -100}}
    first, second = ({**body, "seed": seed} for seed in (1, 2))
    with (
        http.opened("POST", "/v1/completions", first) as one,
        http.opened("POST", "/v1/completions", second) as other,
    ):
        begun = next(events(other)), next(events(one))
        assert all(piece["choices"][0]["finish_reason"] is None for piece in begun)
        texts = [
            "".join(x["choices"][0]["text"] for x in events(got) if x != "[DONE]") for got in (one, other)
        ]
    alone = [
        http.post("/v1/completions", **{**x, "stream": False})["choices"][0]["text"] for x in (first, second)
    ]
    starts = [piece["choices"][0]["text"] for piece in reversed(begun)]
    assert [start + text for start, text in zip(starts, texts, strict=True)] == alone


def test_a_client_that_leaves_frees_its_places(url: str, model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 600, "logit_bias": {"2": -100}}
    with served(url, model, Bounds(1, 8)) as http:
        assert http.server is not None
        with http.opened("POST", "/v1/completions", {**body, "stream": True}) as response:
            next(events(response))
        # A request that waits for the one place is served, long before the 600 tokens.
        assert http.post("/v1/completions", prompt="Next", max_tokens=2)["choices"][0]["text"]
        assert http.on_loop(lambda: http.server.scheduler.jobs) == []


def test_a_full_queue_says_when_to_come_again(url: str, model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 600, "stream": True, "logit_bias": {"2": -100}}
    with served(url, model, Bounds(1, 0)) as http:
        with http.opened("POST", "/v1/completions", body) as response:
            next(events(response))
            status, found, headers = http.call("POST", "/v1/completions", {"prompt": "x"})
            assert (status, found["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
        # Two never fit.
        assert refusal(http, "/v1/completions", {"prompt": "x", "n": 2}) == (400, "n", "invalid_value")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "invalid_value"),
        ({"prompt": 5}, "prompt", "invalid_value"),
        ({"prompt": [[5, 100_000]]}, None, "invalid_value"),
        ({"prompt": "x", "temprature": 1}, "temprature", "unknown_parameter"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "invalid_value"),
        ({"prompt": "x", "temperature": -1}, "temperature", "invalid_value"),
        ({"prompt": "x", "temperature": 10**400}, "temperature", "invalid_value"),
        ({"prompt": "x", "logit_bias": {"1": 10**400}}, "logit_bias", "invalid_value"),
        ({"prompt": [[1]] * 33}, "prompt", "invalid_value"),
        ({"prompt": "x", "top_p": 7}, "top_p", "invalid_value"),
        ({"prompt": "x", "top_k": -1}, "top_k", "invalid_value"),
        ({"prompt": "x", "n": 0}, "n", "invalid_value"),
        ({"prompt": ["x"] * 20, "n": 2}, "n", "invalid_value"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "x", "stop": [""]}, "stop", "invalid_value"),
        ({"prompt": "x", "logit_bias": [1]}, "logit_bias", "invalid_value"),
        ({"prompt": "x", "logit_bias": {"100000": 1}}, "logit_bias", "invalid_value"),
        ({"prompt": "x", "seed": 1.5}, "seed", "invalid_value"),
        ({"prompt": "x", "stream": 1}, "stream", "invalid_value"),
        ({"prompt": "x", "stream_options": {"x": 1}}, "stream_options", "invalid_value"),
        ({"prompt": "x", "echo": True}, "echo", "invalid_value"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"prompt": "word " * 2000}, None, "context_length_exceeded"),
    ],
)
def test_bad_parameters_are_named(http: HttpModel, body: dict[str, Any], param: str, code: str) -> None:
    assert refusal(http, "/v1/completions", body) == (400, param, code)


def test_bad_chats_are_refused(http: HttpModel) -> None:
    for body, param in (
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": CHAT, "tools": {}}, "tools"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "prompt": "x"}, "prompt"),
    ):
        assert refusal(http, "/v1/chat/completions", body)[:2] == (400, param)


def test_bodies_that_are_no_json_too_long_or_for_another_model_are_refused(http: HttpModel) -> None:
    path = "/v1/completions"
    assert refusal(http, path, raw=b'{"prompt": ') == (400, None, "invalid_json")
    assert refusal(http, path, raw=b"[" * 100_000) == (400, None, "invalid_json")
    assert refusal(http, path, [1]) == (400, None, "invalid_json")
    assert refusal(http, path, raw=b" " * (2**22 + 1)) == (413, None, "too_large")
    assert refusal(http, path, {"prompt": "x", "model": "other"}) == (404, "model", "model_not_found")
    assert refusal(http, path, raw=b'{"\\ud800": 1}') == (400, "\ud800", "unknown_parameter")
    assert refusal(http, "/v1/nothing", {}) == (404, None, "not_found")
    assert "paths: /v1/models" in http.call("POST", "/v1/nothing", {})[1]["error"]["message"]
    status, found, headers = http.call("GET", path)
    assert (status, found["error"]["code"], headers["allow"]) == (405, "method_not_allowed", "POST")


def test_a_large_body_leaves_turns_to_others(http: HttpModel) -> None:
    """The interpreter's own reader would take 0.2 s of it in one piece."""
    body = b'{"prompt": [' + b"[1]," * (2**20 - 8) + b"[1]]}"
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(refusal, http, "/v1/completions", raw=body)
        seconds = []
        while not asking.done():
            began = time.monotonic()
            assert http.call("GET", "/health")[0] == 200
            seconds.append(time.monotonic() - began)
    assert asking.result() == (400, "prompt", "invalid_value")
    assert len(seconds) > 3, seconds


def test_a_body_that_does_not_come_is_given_up(http: HttpModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph.llm.serving.http.endpoints.BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", http.port), timeout=SECONDS) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        reply = HTTPResponse(connection)
        reply.begin()
        assert reply.status == 408
        assert json.loads(reply.read())["error"]["code"] == "request_timeout"
        # The rest of the body is no request.
        assert connection.recv(1) == b""


def test_messages_in_parts_and_tools_reach_the_template(http: HttpModel) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "seed": 5}
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there!"}]}
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    found = http.post("/v1/chat/completions", messages=parts, tools=tools, tool_choice="none", **options)
    expected = http.post("/v1/chat/completions", messages=CHAT, **options)
    assert found["choices"] == expected["choices"]
    # A template that knows no tools has them in the first message.
    described = http.post("/v1/chat/completions", messages=CHAT, tools=tools, **options)
    assert described["usage"]["prompt_tokens"] > found["usage"]["prompt_tokens"] + 50


def test_embeddings_are_unit_vectors_as_numbers_and_as_bytes(http: HttpModel) -> None:
    found = http.post("/v1/embeddings", input=["Hello", "there"])
    vectors = np.array([one["embedding"] for one in found["data"]])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    encoded = http.post("/v1/embeddings", input="Hello", encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(encoded), "<f4"), vectors[0].astype(np.float32)
    )
    assert found["usage"]["prompt_tokens"] > 0
    assert refusal(http, "/v1/embeddings", {"input": []})[:2] == (400, "input")
    assert refusal(http, "/v1/embeddings", {"input": "x", "dimensions": 3})[:2] == (400, "dimensions")


def test_a_model_that_only_embeds_refuses_to_write(url: str, folder: Path) -> None:
    with served(url, write_encoder(folder / "encoder.gguf", "bert")) as http:
        assert len(http.post("/v1/embeddings", input="hello")["data"]) == 1
        status, found, _ = http.call("POST", "/v1/completions", {"prompt": "hello"})
        assert status == 400 and "writes no text" in found["error"]["message"]


def test_tokens_and_their_text(http: HttpModel) -> None:
    tokens = http.post("/tokenize", content=PROMPT)["tokens"]
    assert http.post("/detokenize", tokens=tokens)["content"] == PROMPT
    assert len(http.post("/tokenize", content=PROMPT, add_special=True)["tokens"]) == len(tokens) + 1
    assert refusal(http, "/detokenize", {"tokens": [100_000]})[0] == 400
    assert http.post("/v1/completions", prompt=[tokens, tokens], max_tokens=1)["choices"][1]["text"]


def test_health_models_and_metrics(http: HttpModel) -> None:
    http.post("/v1/completions", prompt=PROMPT, max_tokens=3, logit_bias={"2": -100})
    assert http.call("GET", "/health")[:2] == (200, {"status": "ok", "model": "small"})
    [only] = http.call("GET", "/v1/models")[1]["data"]
    assert only["id"] == "small" and http.call("GET", "/v1/models/small")[:2] == (200, only)
    status, found, _ = http.call("GET", "/v1/models/other/one")
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    text = http.call("GET", "/metrics")[1]
    assert 'heliograph_llm_requests_total{path="/v1/completions",status="200"}' in text
    for name in ("waiting 0.0", "answers_limit 4.0", "first_token_seconds_count", "next_token_seconds_count"):
        assert f"heliograph_llm_{name}" in text


def test_the_figures_of_a_cache_tell_what_answers_share_and_what_was_evicted(url: str, model: Path) -> None:
    with served(url, model, Bounds(4, 8, 256)) as http:
        shared = list(range(300, 380))
        for last in (400, 401):
            found = http.post("/v1/completions", prompt=[*shared, last], max_tokens=2, seed=1)
        assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
        figures = http.figures()
        assert figures['heliograph_llm_tokens_total{kind="reused"}'] == 64
        pages = {
            state: figures[f'heliograph_llm_pages{{state="{state}"}}'] for state in ("used", "kept", "free")
        }
        assert pages == {"used": 0, "kept": 2, "free": 6}
        assert figures["heliograph_llm_page_evictions_total"] == 0
        body = {"n": 3, "max_tokens": 100, "seed": 1, "logit_bias": {"2": -100}}
        http.post("/v1/completions", prompt=[*shared, 402], **body)
        figures = http.figures()
        assert figures["heliograph_llm_page_evictions_total"] > 0
        assert figures["heliograph_llm_put_back_total"] > 0
        assert figures["heliograph_llm_pages_shared"] == 0


def test_callers_are_told_while_the_model_loads(
    url: str, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    with served(url, model, gate=gate) as http:
        status, found, headers = http.call("POST", "/v1/completions", {"prompt": "x"})
        assert (status, found["error"]["message"]) == (503, "the model is loading")
        assert headers["retry-after"] == "1" and http.call("GET", "/health")[0] == 503
        assert not [one for one in caplog.records if one.name.startswith("uvicorn")]
        gate.set()
        assert http.ready.wait(SECONDS)
        assert http.post("/v1/completions", prompt="x")["choices"]


def test_a_model_is_loaded_again_where_its_daemon_comes_back(model: Path) -> None:
    urls: list[str] = []
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 3, "temperature": 1.0}
    with ExitStack() as first, running_daemon("--device", "cpu:threads=1,memory=1GiB") as second:
        urls.append(first.enter_context(running_daemon("--device", "cpu:threads=1,memory=1GiB")))
        with served(lambda: urls[-1], model, Bounds(2), reconnect=0.5) as http:
            before = http.post("/v1/completions", **body)["choices"]
            urls.append(second)
            first.close()
            status, found, _ = http.call("POST", "/v1/completions", body)
            assert (status, found["error"]["code"]) == (503, "unavailable")
            deadline = time.monotonic() + SECONDS
            while http.call("GET", "/health")[0] != 200:
                assert time.monotonic() < deadline
            assert http.post("/v1/completions", **body)["choices"] == before


def test_tokens_name_tenants_and_others_are_refused(url: str, model: Path) -> None:
    def authenticate(token: str) -> str:
        if token != "secret":
            raise hg.UnauthenticatedError("the server does not know this token", advice="ask for one")
        return "alice"

    with served(url, model, authenticate=authenticate) as http:
        for given in ("", "wrong"):
            status, found, headers = http.call("POST", "/v1/completions", {"prompt": "x"}, given)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
            assert http.call("GET", "/metrics", token=given)[0] == 401
        assert http.call("POST", "/v1/completions", {"prompt": "x"}, "secret")[0] == 200
        assert http.call("GET", "/health")[0] == 200


def test_an_answer_out_of_time_is_a_timeout(url: str, model: Path) -> None:
    with served(url, model, seconds=0.0) as http:
        status, found, _ = http.call("POST", "/v1/completions", {"prompt": "x"})
        assert (status, found["error"]["code"]) == (504, "timeout")
        with http.opened("POST", "/v1/completions", {"prompt": "x", "stream": True}) as response:
            error, done = events(response)
        assert error["error"]["code"] == "timeout" and done == "[DONE]"
