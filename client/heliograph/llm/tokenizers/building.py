"""Encoders of the package `tokenizers`, made of a file's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from heliograph.errors import ConfigurationError, InvalidModelError
from heliograph.llm.tokenizers.cuts import likely_cuts
from heliograph.llm.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from heliograph.llm.tokenizers.vocabulary import Vocabulary, WordKind

#: The most places at which the words of SentencePiece's kind are cut in two to find their merges.
MAX_CUTS = 30_000_000
SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Encoders:
    """Two encoders over one model: text becomes control tokens in one of them alone."""

    plain: Any
    with_control: Any


def build(vocabulary: Vocabulary) -> Encoders:
    """Build the encoders of a vocabulary.

    Raises InvalidModelError for one that contradicts itself, ConfigurationError without the package
    `tokenizers`.
    """
    library = _library()
    make = {"llama": _sentence_piece, "gpt2": _byte_level, "bert": _word_piece}[vocabulary.kind]
    try:
        model, steps = make(library, vocabulary)
        made = []
        for kinds in ((WordKind.USER,), (WordKind.USER, WordKind.CONTROL, WordKind.UNKNOWN)):
            encoder = library.Tokenizer(model)
            for step, value in steps.items():
                setattr(encoder, step, value)
            _add(library, encoder, vocabulary, kinds)
            made.append(encoder)
    except InvalidModelError:
        raise
    except Exception as error:  # the package has no error types of its own
        raise InvalidModelError(
            f"{vocabulary.file} has a vocabulary of which no tokenizer can be made: {error}"[:300],
            advice="convert the model to GGUF again, with a newer converter",
        ) from None
    return Encoders(*made)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigurationError(
            "the package 'tokenizers' is not installed", advice="pip install 'heliograph[llm]'"
        ) from None
    return tokenizers


def _add(library: Any, encoder: Any, vocabulary: Vocabulary, kinds: tuple[WordKind, ...]) -> None:
    """Let text become the words of these kinds before anything else looks at it."""
    for kind in kinds:
        found = [
            library.AddedToken(
                vocabulary.words[number],
                normalized=False,
                special=kind is not WordKind.USER,
                rstrip=vocabulary.strips_right and vocabulary.words[number] not in _NOT_STRIPPED,
            )
            for number in vocabulary.of_kind(kind)
            if vocabulary.words[number]
        ]
        encoder.add_tokens(found)


#: Words behind which white space stays, also where it goes behind the others.
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def _sentence_piece(library: Any, vocabulary: Vocabulary) -> tuple[Any, dict[str, Any]]:
    """Merges of letters by the score of the word that they make; what has no letter goes as bytes."""
    unknown = vocabulary.roles.get("unknown")
    model = library.models.BPE(
        vocabulary.ids,
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else vocabulary.words[unknown],
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_kind(WordKind.BYTE)),
    )
    replace = [library.normalizers.Replace(" ", SPACE)]
    if vocabulary.add_space_prefix:
        replace.insert(0, library.normalizers.Prepend(SPACE))
    return model, {"normalizer": library.normalizers.Sequence(replace)}


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of words that makes a word, of the highest score first."""
    ids = vocabulary.ids
    words, numbers = list(ids), np.fromiter(ids.values(), np.int64, len(ids))
    if (cuts := sum(map(len, words))) > MAX_CUTS:
        raise InvalidModelError(
            f"{vocabulary.file} has words of {cuts:,} characters; at most {MAX_CUTS:,} are supported"
        )
    owners, places = likely_cuts(words)
    numbers = numbers[owners]
    order = np.lexsort((places, numbers, -np.asarray(vocabulary.scores)[numbers]))
    order = order[np.asarray(vocabulary.kinds)[numbers[order]] == WordKind.NORMAL]
    found = zip(map(words.__getitem__, owners[order].tolist()), places[order].tolist(), strict=True)
    return [(left, right) for word, at in found if (left := word[:at]) in ids and (right := word[at:]) in ids]


def _byte_level(library: Any, vocabulary: Vocabulary) -> tuple[Any, dict[str, Any]]:
    """Merges of bytes in the words that regular expressions cut."""
    way = PRE_TOKENIZERS[vocabulary.pre]
    model = library.models.BPE(vocabulary.ids, vocabulary.merges, ignore_merges=way.ignore_merges)
    cuts = [
        library.pre_tokenizers.Split(library.Regex(pattern), behavior="isolated") for pattern in way.patterns
    ]
    letters = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return model, {"pre_tokenizer": library.pre_tokenizers.Sequence([*cuts, letters])}


def _word_piece(library: Any, vocabulary: Vocabulary) -> tuple[Any, dict[str, Any]]:
    """The longest words that a word begins with, one after the other.

    In a file a word begins with "▁", and its parts with nothing; here parts begin with "##". A
    vocabulary without capitals takes text without them.
    """
    control = set(vocabulary.of_kind(WordKind.CONTROL, WordKind.UNKNOWN, WordKind.USER))
    names = [
        word.removeprefix(SPACE) if number in control or word.startswith(SPACE) else f"##{word}"
        for number, word in enumerate(vocabulary.words)
    ]
    ids = {name: number for number, name in enumerate(names)}
    has_capitals = any(
        not word.islower() and word.lower() != word
        for number, word in enumerate(vocabulary.words)
        if number not in control
    )
    unknown = names[vocabulary.roles["unknown"]] if "unknown" in vocabulary.roles else "[UNK]"
    if unknown not in ids:
        raise InvalidModelError(f"{vocabulary.file} has no token for a word that is unknown")
    model = library.models.WordPiece(ids, unk_token=unknown, continuing_subword_prefix="##")
    return model, {
        "normalizer": library.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=not has_capitals,
            lowercase=not has_capitals,
        ),
        "pre_tokenizer": library.pre_tokenizers.BertPreTokenizer(),
    }
