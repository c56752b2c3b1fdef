"""The vocabulary in a GGUF file, checked: its words, their kinds, and the tokens with a role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from heliograph.errors import InvalidModelError, UnsupportedError
from heliograph.llm.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from heliograph_proto.gguf import GgufHeader

#: The most words of a vocabulary, and the longest one, in characters.
MAX_WORDS = 1_000_000
MAX_WORD = 4096
#: How the kinds of vocabularies are called in files, and elsewhere.
KINDS = {"llama": "SentencePiece", "gpt2": "byte-level BPE", "bert": "WordPiece"}

_KEY = "tokenizer.ggml."
#: Tokens that end a turn, by their text: files seldom name them all, and some have them as words
#: that any text becomes.
_TURN_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<EOT>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|call|>",
)  # fmt: skip
_HARMONY = {"<|return|>", "<|call|>", "<|end|>"}
#: Tokens that begin one.
_TURN_STARTS = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>")
#: Ids by role where a file names none, for each kind.
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {}, "bert": {}}
_NEEDED = ("bos", "eos")
_BROKEN = "convert the model to GGUF again, with a newer converter"


class WordKind(IntEnum):
    """GGUF's numbers of the kinds of words."""

    NORMAL = 1
    UNKNOWN = 2
    #: It steers the model, and text does not become it unless asked for.
    CONTROL = 3
    #: Added by the model's maker: text always becomes it.
    USER = 4
    UNUSED = 5
    #: One byte, written as "<0x0A>".
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The words of a model and what the file says of their use. Made by `read_vocabulary`."""

    #: The name of the file in errors.
    file: str
    #: A key of KINDS.
    kind: str
    #: A key of PRE_TOKENIZERS, for byte-level BPE; empty for others.
    pre: str
    words: Sequence[str]
    kinds: Sequence[int]
    #: For SentencePiece: a pair with a higher score is merged first.
    scores: Sequence[float]
    #: For byte-level BPE: pairs in the order in which they are merged.
    merges: Sequence[tuple[str, str]]
    #: Token ids by role: bos, eos, eot, eom, unknown, padding, and others that the file names.
    roles: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    #: Whether white space behind added tokens belongs to them.
    strips_right: bool

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids by word. Of equal words the last one counts."""
        return {word: number for number, word in enumerate(self.words)}

    def of_kind(self, *kinds: WordKind) -> list[int]:
        """The ids of all words of these kinds."""
        found: list[int] = np.flatnonzero(np.isin(self._kinds, kinds)).tolist()
        return found

    @cached_property
    def _kinds(self) -> np.ndarray[Any, Any]:
        return np.asarray(self.kinds)

    @cached_property
    def stops(self) -> frozenset[int]:
        """The tokens at which an answer ends."""
        named = [self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles]
        words = {word for word in _TURN_ENDS if word in self.ids}
        if words >= _HARMONY:
            # A message of gpt-oss ends with it, and the next one of the answer follows.
            words.discard("<|end|>")
        return frozenset((*named, *(self.ids[word] for word in words)))


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """Check and return the vocabulary of a file.

    Raises UnsupportedError for a kind, or a way to cut text, that is unknown here, and
    InvalidModelError for a file that has none, or a broken one.
    """
    kind = header.value(_KEY + "model", str)
    if kind not in KINDS:
        raise UnsupportedError(
            f"{header.name} has a tokenizer of kind {kind!r:.40}",
            advice="supported are " + ", ".join(f"{one!r} ({known})" for one, known in KINDS.items()),
        )
    pre = header.value(_KEY + "pre", str, "default") if kind == "gpt2" else ""
    if pre and pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{header.name} cuts text into words by {pre!r:.40}, which is unknown here",
            advice="known are " + ", ".join(sorted(PRE_TOKENIZERS)),
        )
    words = _words(header)
    roles = _roles(header, kind, len(words))
    name = header.value("general.name", str, "").lower()
    has_bos = kind != "gpt2" or PRE_TOKENIZERS[pre].add_bos
    return Vocabulary(
        header.name,
        kind,
        pre,
        words,
        _kinds(header, words),
        _per_word(header, "scores", len(words), kind != "llama"),
        _merges(header) if kind == "gpt2" else (),
        roles,
        "bos" in roles and header.value(_KEY + "add_bos_token", bool, has_bos),
        "eos" in roles and header.value(_KEY + "add_eos_token", bool, kind == "bert"),
        kind == "llama" and header.value(_KEY + "add_space_prefix", bool, True),
        "phi-3" in name or "phi3" in name,
    )


def _words(header: GgufHeader) -> tuple[str, ...]:
    found = header.words(_KEY + "tokens")
    if not 0 < len(found) <= MAX_WORDS:
        raise InvalidModelError(
            f"{header.name} has a vocabulary of {len(found)} words; 1 to {MAX_WORDS} are supported"
        )
    words = found[:]
    if (longest := max(map(len, words))) > MAX_WORD:
        raise InvalidModelError(
            f"{header.name} has a word of {longest} characters; at most {MAX_WORD} are supported"
        )
    return words


def _kinds(header: GgufHeader, words: tuple[str, ...]) -> list[int]:
    found = _per_word(header, "token_type", len(words), True) or [WordKind.NORMAL] * len(words)
    turns = {*_TURN_ENDS, *_TURN_STARTS}
    return [WordKind.CONTROL if word in turns else kind for word, kind in zip(words, found, strict=True)]


def _per_word(header: GgufHeader, key: str, count: int, is_optional: bool) -> list[int]:
    """The numbers of a list with one for each word; empty if it may be and is missing."""
    if is_optional and _KEY + key not in header.metadata:
        return []
    found: list[int] = header.numbers(_KEY + key).tolist()
    if len(found) != count:
        raise InvalidModelError(
            f"{header.name}: {_KEY}{key} has {len(found)} numbers for {count} words", advice=_BROKEN
        )
    return found


def _merges(header: GgufHeader) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for number, one in enumerate(header.words(_KEY + "merges")):
        left, space, right = one.partition(" ")
        if not (left and space and right):
            raise InvalidModelError(
                f"{header.name}: merge {number}, {one!r:.40}, is no pair of words", advice=_BROKEN
            )
        found.append((left, right))
    return found


def _roles(header: GgufHeader, kind: str, count: int) -> dict[str, int]:
    """The ids of tokens with a role. One outside of the vocabulary means that there is none."""
    found = dict(_DEFAULTS[kind])
    end = "_token_id"
    for key, value in header.metadata.items():
        if key.startswith(_KEY) and key.endswith(end) and type(value) is int:
            found[key.removeprefix(_KEY).removesuffix(end)] = value
    for role in _NEEDED:
        if role in found and not 0 <= found[role] < count:
            raise InvalidModelError(
                f"{header.name}: the {role} token is {found[role]}, of {count} words", advice=_BROKEN
            )
    return {role: number for role, number in found.items() if 0 <= number < count}
