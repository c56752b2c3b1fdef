"""`heliograph llm-serve`: a language model behind HTTP, from its start to SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from gguf_files import write_model
from lora_files import write_adapter

import heliograph as hg
from heliograph.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small.gguf", "llama", context=2000)


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the URL that it prints once its model is loaded."""
    given = ["llm-serve", str(model), "--server", "local:", "--listen", "127.0.0.1:0", *arguments]
    command = [sys.executable, "-m", "heliograph.cli", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stderr
            line = process.stdout.readline()
            assert line.startswith("serving "), process.stderr.read()
            yield process, line.split()[-1]
        finally:
            process.kill()


def ask(url: str, body: object, token: str = "") -> dict[str, object]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as response:
        found: dict[str, object] = json.load(response)
        return found


def test_sigterm_waits_for_the_answers_in_progress(model: Path) -> None:
    with serving(model, "--name", "mine", "--answers", "2", "--cache-tokens", "1024") as (process, url):
        body = {"model": "mine", "prompt": "x", "max_tokens": 300, "logit_bias": {"2": -100}, "stream": True}
        with urlopen(Request(f"{url}/completions", json.dumps(body).encode()), timeout=30) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)
            lines = [line for line in response if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n" and b'"finish_reason":"length"' in lines[-2]
        assert process.wait(30) == 0


def test_small_answers_on_a_kept_connection_do_not_wait_for_the_clients_acknowledgement(
    model: Path,
) -> None:
    with serving(model) as (_, url), closing(HTTPConnection(urlsplit(url).netloc, timeout=30)) as connection:
        seconds = []
        for _ in range(12):
            began = time.monotonic()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            seconds.append(time.monotonic() - began)
    # Linux acknowledges the first packets at once, and later ones after 40 ms.
    assert min(seconds[3:]) < 0.03, seconds


def test_answers_that_exceed_the_drain_end_with_an_error(model: Path) -> None:
    body = {"prompt": "x", "max_tokens": 1900, "logit_bias": {"2": -100}, "seed": 1}
    with serving(model, "--drain", "0") as (process, url), ThreadPoolExecutor(1) as pool:
        whole = pool.submit(ask, f"{url}/completions", body)
        with urlopen(Request(f"{url}/completions", json.dumps(body | {"stream": True}).encode())) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)
            lines = [line for line in response if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n" and b"the server shuts down" in lines[-2]
        with pytest.raises(HTTPError) as error:
            whole.result(30)
        with error.value as refusal:
            assert refusal.code == 503 and json.load(refusal)["error"]["code"] == "unavailable"
        assert process.wait(30) == 0
        assert process.stderr and "Traceback" not in process.stderr.read()


def test_an_adapter_is_a_model_of_its_own(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "polite.gguf", model)
    body = {"prompt": "Hello there", "max_tokens": 9, "seed": 3, "temperature": 1.0}
    texts = []
    with serving(model, "--answers", "2", "--lora", f"{adapter}:0.5") as (_, url):
        with urlopen(f"{url}/models", timeout=30) as response:
            assert [one["id"] for one in json.load(response)["data"]] == ["small", "polite"]
        for name in ("small", "polite"):
            found: Any = ask(f"{url}/completions", {**body, "model": name})
            assert found["model"] == name
            texts.append(found["choices"][0]["text"])
        with pytest.raises(HTTPError, match="404"):
            ask(f"{url}/completions", {**body, "model": "rude"})
    with hg.connect("local:") as session:
        options: Any = {"max_tokens": 9, "seed": 3, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
        llm = hg.llm.load(session, model, adapters=[hg.llm.Adapter(adapter, 0.0)])
        plain = llm.generate("Hello there", **options).text
        llm.set_adapter_scale("polite", 0.5)
        assert texts == [plain, llm.generate("Hello there", **options).text]


def test_an_adapter_with_the_name_of_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "polite.gguf", model)
    given = ["llm-serve", str(model), "--server", "local:", "--listen", "127.0.0.1:0"]
    assert main([*given, "--name", "polite", "--lora", str(adapter)]) == 1


def test_tokens_of_a_file_are_asked_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "tokens")
    assert main(["token", "new", "--file", file, "--name", "alice", "--tenant", "research"]) == 0
    token = capsys.readouterr().out.split()[-1]
    assert main(["token", "new", "--file", file, "--name", "operator", "--right", "admin"]) == 0
    admin = capsys.readouterr().out.split()[-1]
    with serving(model, "--token-file", file) as (_, url):
        assert ask(f"{url}/completions", {"prompt": "x", "max_tokens": 2}, token)["choices"]
        for given, status in (("", 401), ("hgt_wrong", 401), (admin, 403)):
            with pytest.raises(HTTPError) as error:
                ask(f"{url}/completions", {"prompt": "x"}, given)
            with error.value as refusal:
                assert refusal.code == status


def test_addresses_beyond_loopback_need_tls_and_tokens(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, match in (
        (["--listen", "0.0.0.0:0"], "plain text"),
        (["--listen", "0.0.0.0:0", "--tls-certificate", "a", "--tls-key", "b"], "every host that reaches"),
        (["--tls-key", "b"], "go together"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--token-file", str(tmp_path / "none")], "cannot read the tokens"),
    ):
        assert main(["llm-serve", str(model), "--server", "local:", *arguments]) == 1
        assert match in capsys.readouterr().err


def test_files_and_numbers_that_are_wrong_are_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    for arguments, match in (
        (["--queue", "-1"], "--queue is -1"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--drain", "-9"], "--drain is -9"),
        (["--chat-template", str(tmp_path / "none")], "No such file"),
        (["--chat-template", str(tmp_path / "binary")], "is not UTF-8"),
    ):
        given = [str(model), "--server", "local:", "--listen", "127.0.0.1:0", *arguments]
        assert main(["llm-serve", *given]) == 1
        assert match in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "none.gguf"), "--server", "local:", "--listen", "127.0.0.1:0"]
    assert main(["llm-serve", *arguments]) == 1
    assert "cannot read" in capsys.readouterr().err
