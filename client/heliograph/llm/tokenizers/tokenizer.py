"""`Tokenizer`: text to the tokens of a GGUF model, and tokens to text, also one after the other."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from heliograph.errors import InvalidArgumentError, InvalidModelError
from heliograph.llm.tokenizers.building import SPACE, Encoders, build
from heliograph.llm.tokenizers.vocabulary import Vocabulary, WordKind, read_vocabulary
from heliograph_proto.gguf import GgufHeader

#: Joins parts of a text where the tokenizer must see all of it: a noncharacter of Unicode.
_MARK = "\ufdd0"
#: Words that text never shows, unless asked for.
_SILENT = (WordKind.CONTROL, WordKind.UNKNOWN, WordKind.UNUSED)


#: The characters of a text for which other threads do not wait.
_LONG = 4096


def _byte_letters() -> dict[str, int]:
    """The byte that each letter stands for in the vocabularies of GPT-2's kind.

    Visible bytes of Latin-1 are themselves; the others follow from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTE_LETTERS = _byte_letters()


def _encoded(encoder: Any, text: str) -> list[int]:
    """Return the tokens of a text. Of a long one other threads go on meanwhile, which the package
    allows for lists of texts alone."""
    if len(text) < _LONG:
        found = encoder.encode(text, add_special_tokens=False)
    else:
        [found] = encoder.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = found.ids
    return ids


def read_tokenizer(header: GgufHeader) -> Tokenizer:
    """Make the tokenizer of a GGUF file.

    Raises UnsupportedError for a kind that is unknown here, InvalidModelError for a file without a
    vocabulary or with a broken one, and ConfigurationError without the package `tokenizers`.
    """
    vocabulary = read_vocabulary(header)
    return Tokenizer(vocabulary, build(vocabulary))


class Tokenizer:
    """The tokenizer of a GGUF model. Made by `read_tokenizer`. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, encoders: Encoders) -> None:
        #: The vocabulary of the file: the roles of tokens and what the model wants around a text.
        self.vocabulary = vocabulary
        self._encoders = encoders
        self._texts: dict[int, bytes] = {}
        self._to_bytes = {"llama": _of_piece, "gpt2": _of_letters, "bert": _of_part}[vocabulary.kind]

    def __repr__(self) -> str:
        known = self.vocabulary
        return f"<Tokenizer of {known.file}: {known.kind}{known.pre and ', ' + known.pre}, {len(self)} words>"

    def __len__(self) -> int:
        return len(self.vocabulary.words)

    @property
    def bos(self) -> int | None:
        """The token at the begin of a text."""
        return self.vocabulary.roles.get("bos")

    @property
    def eos(self) -> int | None:
        """The token at the end of a text."""
        return self.vocabulary.roles.get("eos")

    @property
    def eot(self) -> int | None:
        """The token at the end of a turn, where the file names one."""
        return self.vocabulary.roles.get("eot")

    @property
    def pad(self) -> int | None:
        """The token that fills up a batch."""
        return self.vocabulary.roles.get("padding")

    @property
    def stops(self) -> frozenset[int]:
        """The tokens at which an answer ends: of a text, of a turn, of a message."""
        return self.vocabulary.stops

    def word(self, token: int | None) -> str:
        """The word of a token as the file has it; empty for None."""
        return "" if token is None else self.vocabulary.words[self._checked(token)]

    def token(self, word: str) -> int | None:
        """The token of a word as the file has it."""
        return self.vocabulary.ids.get(word)

    def encode(self, text: str, *, special: bool = False, ends: bool = True) -> list[int]:
        """Return the tokens of a text.

        With `special`, the words of control tokens, such as "</s>", become these tokens, as a chat
        template needs it; without, they are text like any other. With `ends`, the tokens that the
        model wants at the begin and the end of a text are added, unless they are there already.

        Raises InvalidArgumentError for a text with half of a surrogate pair, and InvalidModelError
        where the vocabulary lacks what the text needs.
        """
        encoder = self._encoders.with_control if special else self._encoders.plain
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"the text has half of a surrogate pair at character {error.start}",
                advice="text.encode('utf-16', 'surrogatepass').decode('utf-16') joins pairs",
            ) from None
        try:
            found = _encoded(encoder, text) if text else []
        except Exception as error:  # the package has no error types of its own
            raise InvalidModelError(f"{self.vocabulary.file}: its tokenizer fails: {error}"[:300]) from None
        return self._with_ends(found) if ends else found

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Return the tokens of a text in parts, as a chat template makes it: with control tokens,
        none of which goes from one part into the next, and the one at the begin.

        Raises the errors of `encode`.
        """
        mark = self._bytes_of(_MARK)
        if self.vocabulary.kind == "llama" and mark:
            # One text, since a space is put before each; what is between parts has tokens of its own.
            found = self.encode(_MARK.join(parts), special=True, ends=False)
            tokens: list[int] = []
            for token in found:
                tokens.append(token)
                if tokens[-len(mark) :] == mark:
                    del tokens[-len(mark) :]
        else:
            tokens = [token for part in parts for token in self.encode(part, special=True, ends=False)]
        return self._with_bos(tokens)

    def _bytes_of(self, text: str) -> list[int]:
        """The tokens of the bytes of a text; empty where the vocabulary lacks one."""
        found = [self.token(f"<0x{byte:02X}>") for byte in text.encode()]
        return [one for one in found if one is not None] if None not in found else []

    @cached_property
    def control_words(self) -> tuple[str, ...]:
        """The words that `encode` takes as control tokens with `special` alone."""
        known = self.vocabulary
        found = (known.words[number] for number in known.of_kind(WordKind.CONTROL, WordKind.UNKNOWN))
        return tuple(word for word in found if word)

    def control_token(self, word: str) -> int | None:
        """The control token of a word; None for a word that is text, or none."""
        token = self.token(word)
        return token if token is not None and self.vocabulary.kinds[token] == WordKind.CONTROL else None

    def _with_bos(self, tokens: list[int]) -> list[int]:
        known = self.vocabulary
        if known.add_bos and tokens[:1] != [known.roles["bos"]]:
            return [known.roles["bos"], *tokens]
        return tokens

    def _with_ends(self, tokens: list[int]) -> list[int]:
        known = self.vocabulary
        tokens = self._with_bos(tokens)
        if known.add_eos and tokens[-1:] != [known.roles["eos"]]:
            tokens = [*tokens, known.roles["eos"]]
        return tokens

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens; what is no UTF-8 becomes "�".

        Control tokens show with `special` alone. The space that some models put before a text is
        taken away again. Raises InvalidArgumentError for a number that is no token.
        """
        found = b"".join(self._text(one, special) for one in tokens)
        if self.vocabulary.add_space_prefix or self.vocabulary.kind == "bert":
            found = found.removeprefix(b" ")
        return found.decode(errors="replace")

    def decode_stream(self, *, special: bool = False, shown: frozenset[int] = frozenset()) -> DecodeStream:
        """Return a decoder that takes one token after the other, for an answer that is shown as it
        comes. Control tokens in `shown` show too."""
        return DecodeStream(self, special, shown)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character; of a control token its
        word. Raises InvalidArgumentError for a number that is no token."""
        return self._text(token, True)

    def bytes_of_words(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of each word, and the tokens that text never becomes."""
        kinds = (WordKind.CONTROL, WordKind.UNKNOWN, WordKind.UNUSED)
        return [self._text(one, True) for one in range(len(self))], self.vocabulary.of_kind(*kinds)

    def plain_encoder(self) -> str:
        """Return what encodes plain text, in the form of the package `tokenizers`."""
        found: str = self._encoders.plain.to_str()
        return found

    def _text(self, token: int, special: bool) -> bytes:
        found = self._texts.get(token)
        if found is None:
            word = self.vocabulary.words[self._checked(token)]
            kind = self.vocabulary.kinds[token]
            found = self._texts[token] = word.encode() if kind in _SHOWN_AS_IS else self._to_bytes(word, kind)
        return b"" if not special and self.vocabulary.kinds[token] in _SILENT else found

    def _checked(self, token: int) -> int:
        if not 0 <= token < len(self):
            raise InvalidArgumentError(f"{token} is no token: {self.vocabulary.file} has {len(self)}")
        return token


#: Words that stand for themselves, whatever the kind of the vocabulary.
_SHOWN_AS_IS = (WordKind.CONTROL, WordKind.UNKNOWN, WordKind.USER)


def _of_piece(word: str, kind: int) -> bytes:
    if kind == WordKind.BYTE and len(word) == 6:
        try:
            return bytes([int(word[3:5], 16)])
        except ValueError:
            pass
    return word.replace(SPACE, " ").encode()


def _of_letters(word: str, _: int) -> bytes:
    """The bytes of a word of letters; a word with others than these is itself."""
    try:
        return bytes([_BYTE_LETTERS[letter] for letter in word])
    except KeyError:
        return word.encode()


def _of_part(word: str, _: int) -> bytes:
    return word.replace(SPACE, " ", 1).encode() if word.startswith(SPACE) else word.encode()


class DecodeStream:
    """Text as its tokens come. A character of several tokens comes with the last one."""

    def __init__(self, tokenizer: Tokenizer, special: bool, shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, *tokens: int) -> str:
        """Return the text that is complete with these tokens; often "" for one of several bytes.

        Raises InvalidArgumentError for a number that is no token.
        """
        is_shown = self._special
        return self._decoder.decode(
            b"".join(self._tokenizer._text(one, is_shown or one in self._shown) for one in tokens)
        )

    def end(self) -> str:
        """Return the rest: "�" for a character that has not ended, else "". The stream begins
        anew."""
        return self._decoder.decode(b"", True)
