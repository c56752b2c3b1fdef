"""`heliograph generate` and `heliograph chat`: texts of a small model."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_daemons import running_daemon
from gguf_files import write_model
from lora_files import write_adapter

import heliograph as hg
from heliograph.cli import main

PROMPT = "The daemon serves"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small.gguf", "llama", context=2000)


def expected(model: Path, prompt: str = PROMPT, **options: object) -> str:
    with hg.connect("local:") as session:
        return hg.llm.load(session, model).generate(prompt, **options).text  # type: ignore[arg-type]


def test_generate_prints_the_text_and_its_figures(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-p", PROMPT, "-n", "20", "--seed", "3", "--top-k", "7", "--server", "local:"]
    assert main(["generate", str(model), *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected(model, max_tokens=20, seed=3, top_k=7) + "\n"
    assert "[20 tokens, " in printed.err and "tokens/s; prompt of 4 tokens" in printed.err
    assert "seed 3]" in printed.err


def test_generate_takes_its_prompt_from_standard_input_and_prints_json(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["generate", str(model), "-n", "5", "--seed", "3", "--json", "--server", "local:"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == expected(model, max_tokens=5, seed=3)
    assert (len(found["tokens"]), found["finish_reason"], found["seed"]) == (5, "length", 3)


def test_generate_without_a_prompt_says_how_one_is_given(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", str(model), "--server", "local:"]) == 1
    assert "give --prompt TEXT, or standard input" in capsys.readouterr().err


def test_adapters_have_a_scale_behind_their_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        write_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("a.gguf", "b:2.gguf"))
    ]
    arguments = ["-p", PROMPT, "-n", "9", "--seed", "3", "--server", "local:"]
    assert (
        main(["generate", str(model), *arguments, "--lora", f"{files[0]}:0.5", "--lora", str(files[1])]) == 0
    )
    with hg.connect("local:") as session:
        adapters = [hg.llm.Adapter(files[0], 0.5), files[1]]
        text = hg.llm.load(session, model, adapters=adapters).generate(PROMPT, max_tokens=9, seed=3).text
    assert capsys.readouterr().out == text + "\n" != expected(model, max_tokens=9, seed=3) + "\n"
    assert main(["generate", str(model), *arguments, "--lora", "absent.gguf:2"]) == 1
    assert "cannot read absent.gguf" in capsys.readouterr().err


def test_answers_follow_a_schema_a_grammar_or_a_pattern(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"enum": ["über", 12, null]}', encoding="utf-8")
    grammar.write_text('root ::= "yes" | "no"', encoding="utf-8")
    arguments = ["generate", str(model), "-p", PROMPT, "--seed", "3", "--server", "local:"]
    assert main([*arguments, "--json-schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out) in ("über", 12, None)
    assert main([*arguments, "--grammar", str(grammar)]) == 0
    assert capsys.readouterr().out in ("yes\n", "no\n")
    assert main([*arguments, "--regex", "[0-9]{3}"]) == 0
    assert capsys.readouterr().out.strip().isdecimal()
    schema.write_text("{", encoding="utf-8")
    for given, match in (
        (["--json-schema", str(schema)], "is not JSON"),
        (["--json-schema", str(tmp_path / "none")], f"error: cannot read {tmp_path / 'none'}"),
        (["--grammar", str(tmp_path / "none")], "cannot read"),
        (["--regex", "("], "regex cannot be followed"),
    ):
        assert main([*arguments, *given]) != 0
        assert match in capsys.readouterr().err


def test_a_draft_changes_no_text_and_is_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--seed", "3", "--server", "local:", "-n", "21"]
    drafting = ["--draft", str(model), "--draft-tokens", "4"]
    assert main(["generate", str(model), "-p", PROMPT, *arguments, *drafting]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected(model, max_tokens=21, seed=3) + "\n"
    assert "16 of 16 proposed tokens accepted" in printed.err
    assert main(["generate", str(model), "-p", PROMPT, *arguments, *drafting, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speculation"] == {"proposed": 16, "accepted": 16, "runs": 4}
    assert main(["generate", str(model), "-p", PROMPT, *arguments, *drafting[2:]]) == 1
    assert "--draft-tokens is given without --draft" in capsys.readouterr().err
    texts = []
    for given in ([], ["--draft", "prompt"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nAnd now?\n")))
        assert main(["chat", str(model), *arguments, *given]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_chat_answers_each_line_with_all_before_it(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"Hello\n\nAnd now?\n"), errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", lines)
    arguments = ["--temperature", "0", "-n", "6", "--server", "local:", "--system", "Be kind."]
    assert main(["chat", str(model), *arguments]) == 0
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    with hg.connect("local:") as session:
        llm = hg.llm.load(session, model)
        first = llm.chat(messages, temperature=0, max_tokens=6).text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
        second = llm.chat(messages, temperature=0, max_tokens=6).text
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_a_model_without_a_template_is_an_error_before_the_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "plain.gguf", "llama", chat_template=None)
    assert main(["chat", str(model), "--server", "local:"]) == 1
    assert "has no chat template" in capsys.readouterr().err


def test_a_model_of_the_server_is_named_as_the_server_lists_it(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon("--models", str(model.parent), "--device", "cpu:threads=2,memory=1GiB") as url:
        arguments = ["-p", PROMPT, "-n", "5", "--seed", "3", "--server", url]
        assert main(["generate", model.name, *arguments]) == 0
        printed = capsys.readouterr().out
        assert main(["generate", "other.gguf", *arguments]) == 1
    assert printed == expected(model, max_tokens=5, seed=3) + "\n"
    err = capsys.readouterr().err
    assert "cannot read other.gguf: there is no such file here, and no such model of the server" in err
    assert f"the server has {model.name}" in err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_input_that_is_closed_or_no_utf8_is_an_error_that_says_so(
    model: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    latin = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), errors="surrogateescape")
    for stream, match in ((latin, "standard input is not UTF-8"), (None, "standard input is closed")):
        monkeypatch.setattr(sys, "stdin", stream)
        assert main([command, str(model), "-n", "3", "--server", "local:"]) == 1
        assert match in capsys.readouterr().err


def test_text_that_the_output_has_no_letters_for_is_escaped(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    arguments = ["-p", PROMPT, "-n", "30", "--seed", "1", "--server", "local:"]
    assert main(["generate", str(model), *arguments]) == 0
    wanted = expected(model, max_tokens=30, seed=1) + "\n"
    assert not wanted.isascii() and printed.getvalue() == wanted.encode("ascii", "backslashreplace")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_without_a_traceback(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["generate", str(model), "-p", PROMPT, "-n", "9", "--server", "local:"]) == 1
    assert capsys.readouterr().err.startswith("error: [Errno 28]")


def test_ctrl_c_ends_the_answer_and_not_the_talk(model: Path) -> None:
    """In a terminal of its own, as the prompt is one's."""
    control, terminal = pty.openpty()
    command = [sys.executable, "-m", "heliograph", "chat", str(model), "--server", "local:", "--seed", "1"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True)
    os.close(terminal)
    try:
        read_until(control, b"> ")
        os.write(control, b"Hello\n")
        # The echo of the line, then text.
        read_until(control, b"Hello\r\n")
        seen = os.read(control, 1)
        process.send_signal(signal.SIGINT)
        seen += read_until(control, b"seed 1]\r\n> ")
        assert b"[interrupted]" in seen
        os.write(control, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(control)


def read_until(control: int, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        ready, _, _ = select.select([control], [], [], 60)
        assert ready, found
        found += os.read(control, 4096)
    return found


def test_a_model_of_the_server_is_found_by_its_name_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models"
    (folder / "other").mkdir(parents=True)
    first = write_model(folder / "split.gguf", "llama", part_tensors=8)
    for path in (folder / "twice.gguf", folder / "other" / "twice.gguf"):
        write_model(path, "llama")
    wanted = expected(first, max_tokens=5, temperature=0) + "\n"
    with running_daemon("--models", str(folder)) as url:
        arguments = ["-p", PROMPT, "-n", "5", "--temperature", "0", "--server", url]
        for name in ("split", first.name, first.name.replace("-00001-", "-00002-")):
            assert main(["generate", name, *arguments]) == 0
            assert capsys.readouterr().out == wanted
        assert main(["generate", "twice", *arguments]) == 1
        assert "'twice' is the name of 2 models of the server" in capsys.readouterr().err
