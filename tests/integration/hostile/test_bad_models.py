"""Broken and hostile GGUF files in a server's folders of models: each is refused by its name, soon
and in little memory, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as by_grpc
from forked_daemons import newest_daemon, running_daemon
from gguf_files import write_model
from hostile_gguf import HOSTILE
from kserve_folders import served
from waiting import until

import heliograph as hg
from heliograph.llm import read_chat_template

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ESCAPING = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
#: Entries of a model that make it none, and a part of what is said of them.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "architecture-number": ({"general.architecture": 7}, "'general.architecture' is int 7"),
    "architecture-unknown": ({"general.architecture": "x" * 999}, "architecture 'xxx"),
    "type-list": ({"general.type": ["a"]}, "'general.type' is a list"),
    "context-missing": ({"llama.context_length": None}, "lack llama.context_length"),
    "layers-text": ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
    "layers-many": ({"llama.block_count": 1024}, "no tensor 'blk.2."),
    "layers-too-many": ({"llama.block_count": 2**32 - 1}, "llama.block_count is 4294967295"),
    "layers-differ": ({"llama.feed_forward_length": [128, 64]}, "layers differ in llama.feed_forward"),
    "width-0": ({"llama.embedding_length": 0}, "llama.embedding_length is 0"),
    "width-small": ({"llama.embedding_length": 3}, "do not fit its metadata"),
    "heads-7": ({"llama.attention.head_count": 7}, "7 heads cannot share 2 of keys"),
    "heads-kv": ({"llama.attention.head_count_kv": 1}, "do not fit its metadata"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
    "epsilon-below-0": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "eps is -1.0"),
    "rope-odd": ({"llama.rope.dimension_count": 7}, "n_dims is 7"),
    "rope-base": ({"llama.rope.freq_base": 0.0}, "freq_base is 0.0"),
    "rope-unknown": ({"llama.rope.scaling.type": "bent"}, "positions are scaled by 'bent'"),
    "tokenizer-number": ({"tokenizer.ggml.model": 1}, "'tokenizer.ggml.model' is int 1"),
    "tokenizer-unknown": ({"tokenizer.ggml.model": "runes"}, "a tokenizer of kind 'runes'"),
    "words-text": ({"tokenizer.ggml.tokens": "abc"}, "not a list of texts"),
    "words-numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "not a list of texts"),
    "words-few": ({"tokenizer.ggml.tokens": ["a", "b", "c"]}, "for 3 words"),
    "words-long": ({"tokenizer.ggml.tokens": ["a" * 5000]}, "a word of 5000 characters"),
    "scores-texts": ({"tokenizer.ggml.scores": ["a"]}, "not a list of numbers"),
    "kinds-few": ({"tokenizer.ggml.token_type": [1]}, "has 1 numbers for"),
    "end-beyond": ({"tokenizer.ggml.eos_token_id": 10**6}, "the eos token is 1000000"),
}  # fmt: skip
#: The most time of one refusal, and of the bytes by which all of them make a daemon grow.
SECONDS, GROWTH = 20.0, 200e6


def headers() -> dict[str, tuple[str, str]]:
    """The refusals of files with bad headers, by the names of the files."""
    return {f"header-{number:02}": (reason, "is not a valid model") for number, reason in enumerate(HOSTILE)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for number, data in enumerate(HOSTILE.values()):
        (made / f"header-{number:02}.gguf").write_bytes(data)
    for name, (entries, _) in BROKEN.items():
        write_model(made / f"{name}.gguf", entries=entries)
    for name, template in (("endless", ENDLESS), ("escaping", ESCAPING)):
        write_model(made / f"{name}.gguf", chat_template=template)
    whole = write_model(made / "good.gguf", stored="q4_0").read_bytes()
    (made / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    return made


@pytest.fixture(scope="module")
def served_folder(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    with running_daemon("--models", str(folder), "--device", "cpu:threads=1,memory=1GiB") as url:
        yield url, newest_daemon()


def test_a_listing_has_the_models_that_can_be_read(
    served_folder: tuple[str, psutil.Process], folder: Path
) -> None:
    with hg.connect(served_folder[0], progress=None) as session:
        names = {one.name.removesuffix(".gguf") for one in session.models()}
    assert names == {*BROKEN, "endless", "escaping", "good"}


def test_each_is_refused_by_its_name_and_the_others_go_on(
    served_folder: tuple[str, psutil.Process],
) -> None:
    url, daemon = served_folder
    with hg.connect(url, progress=None) as session:
        good = hg.llm.load(session, session.server_weights("good.gguf"))
        expected = good.generate([300], max_tokens=5, temperature=0).result().tokens
        before = daemon.memory_info().rss
        bad = {**{name: reason for name, (reason, _) in headers().items()}, "cut": "are outside of the file"}
        bad |= {name: reason for name, (_, reason) in BROKEN.items()}
        for name, reason in bad.items():
            began = time.monotonic()
            with pytest.raises((hg.InvalidModelError, hg.UnsupportedError)) as caught:
                hg.llm.load(session, session.server_weights(f"{name}.gguf"))
            assert f"{name}.gguf" in caught.value.message, caught.value
            assert reason in caught.value.message, caught.value
            assert time.monotonic() - began < SECONDS, name
        assert daemon.memory_info().rss - before < GROWTH
        assert good.generate([300], max_tokens=5, temperature=0).result().tokens == expected


@pytest.mark.parametrize(
    ("name", "seconds", "said"),
    [("endless", 0.5, "more than 0.5 seconds"), ("escaping", 30.0, "forbidden to it")],
)
def test_a_template_that_loops_or_escapes_ends_its_own_chat_alone(
    served_folder: tuple[str, psutil.Process], name: str, seconds: float, said: str
) -> None:
    with hg.connect(served_folder[0], progress=None) as session:
        file = session.server_weights(f"{name}.gguf")
        template = read_chat_template(hg.llm.read_header(file), seconds=seconds)
        llm = hg.llm.load(session, file)
        with pytest.raises((hg.InvalidModelError, hg.LimitExceededError), match=said) as caught:
            template.tokens(llm.tokenizer, [{"role": "user", "content": "Hello!"}])
        template.close()
        assert f"{name}.gguf" in caught.value.message
        assert llm.generate("Hello!", max_tokens=3).result().tokens


def test_a_repository_says_what_is_wrong_with_each_and_serves_the_others(
    folder: Path, tmp_path: Path
) -> None:
    for file in folder.glob("*.gguf"):
        place = tmp_path / file.stem / "1"
        place.mkdir(parents=True)
        (place / "model.gguf").hardlink_to(file)
    with served(tmp_path) as models:
        index = {one.name: one for one in models.grpc.get_model_repository_index().models}
        reasons = {name: reason for name, (_, reason) in BROKEN.items()}
        reasons |= {name: reason for name, (reason, _) in headers().items()}
        for name, reason in reasons.items():
            assert index[name].state == "UNAVAILABLE" and reason in index[name].reason, index[name]
        assert {index[name].state for name in ("good", "endless", "escaping")} == {"READY"}
        text = by_grpc.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"Hello!"], np.object_))
        assert models.grpc.infer("good", [text], parameters={"max_tokens": 3}).as_numpy("text_output").size
        until(models.grpc.is_server_live, "it goes on")
