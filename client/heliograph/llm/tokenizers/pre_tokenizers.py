"""The ways in which vocabularies of GPT-2's kind cut a text into words before they merge bytes.

A file names its way in `tokenizer.ggml.pre`. Each is a few regular expressions: the first cuts the
text at its matches, the next one cuts what is left, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

#: Short forms of English, in any case.
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#: Runs of white space; one is left for the word behind them.
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
#: Letters and marks from a capital on, and those after it.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN = r"[一-龥\u0800-一가-\ud7ff]+"


def _words(digits: str, letters: str = r"\p{L}", others: str = r"\p{L}\p{N}", first: str = _SHORT) -> str:
    """Return the expression of GPT-4's kind, which its successors vary."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{_of(letters)}+"
    return rf"{first}|{word}|{digits}| ?[^\s{others}]+[\r\n]*|{_LINES}|{_SPACES}"


def _of(letters: str) -> str:
    return f"[{letters}]" if letters.count(r"\p") > 1 else letters


def _cased(digits: str, short: str = "") -> str:
    """Return the expression that also cuts before capitals."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{head}{_UPPER}*{_LOWER}+{short}|{head}{_UPPER}+{_LOWER}*{short}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A way to cut a text, and what comes with it."""

    patterns: tuple[str, ...]
    #: Whether a word that is a token is taken as it is, before any merge.
    ignore_merges: bool = False
    #: Whether a file that does not say so wants the begin token.
    add_bos: bool = False


_ONE_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = _words(r"\p{N}{1,3}")
_POINTS = r" ?[^(\s|.,!?…。，、।۔،)]+"

_BY_NAMES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de jina-v2-es jina-v2-de gigachat "
    "mellum modern-bert a.x-4.0": PreTokenizer((_GPT2,)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenizer((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan": PreTokenizer((_words(r"\p{N}"),)),
    "qwen35": PreTokenizer((_words(r"\p{N}", r"\p{L}\p{M}", r"\p{L}\p{M}\p{N}"),)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": _ONE_DIGIT,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}",
        )
    ),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4": PreTokenizer((_cased(r"\p{N}{1,3}", rf"{_SHORT}?"),)),
    "bloom gpt3-finnish poro-chat": PreTokenizer((_POINTS,)),
    "viking": PreTokenizer((_POINTS, r"\p{N}")),
}
#: Every way by the name that files have for it.
PRE_TOKENIZERS: dict[str, PreTokenizer] = dict(
    chain.from_iterable(((name, one) for name in names.split()) for names, one in _BY_NAMES.items())
)
