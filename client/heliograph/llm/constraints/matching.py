"""The processes that follow grammars: a program of its own, which knows nothing of Heliograph.

The first process reads a vocabulary. For each socket that comes on its standard input it forks a
process, which follows one grammar on that socket and ends with it. The grammar may exhaust the
memory, the stack or the time of its own process alone.

Frames have four bytes of length before them. A request is JSON with a grammar, or four bytes of a
token. A reply is `REPLY`, the tokens that must come next, then the mask of the tokens that may come
after them, a bit each, or the text of an error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

#: The state, and the number of tokens that must come next.
REPLY = struct.Struct("<ci")
MASK, OVER, BAD, LIMIT = b"m", b"o", b"b", b"l"
#: Texts of the library's errors that tell of one of its bounds.
_BOUNDS = (
    "too large",
    "too big",
    "too many",
    "Too many",
    "fuel",
    "max is",
    "limit",
    "too complex",
    "TooComplex",
)


class Words:
    """A vocabulary as the library takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self.tokens = [bytes.fromhex(word) for word in settings["words"]]
        self.eos_token_id = settings["end"]
        self.special_token_ids = settings["special"]
        self._encoder: Any = None
        if settings["encoder"]:
            import tokenizers

            self._encoder = tokenizers.Tokenizer.from_str(settings["encoder"])
        # A text in the middle of an answer has no space put before it.
        self._mark = settings["mark"]
        self._begin = self._encode(self._mark)
        self._single = {word: number for number, word in enumerate(self.tokens) if len(word) == 1}

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False).ids if self._encoder else []

    def __call__(self, text: str) -> list[int]:
        found = self._encode(self._mark + text)
        begin, tokens = found[: len(self._begin)], found[len(self._begin) :]
        is_whole = b"".join(self.tokens[one] for one in tokens) == text.encode()
        if begin == self._begin and is_whole:
            return tokens
        single = [self._single.get(bytes((byte,))) for byte in text.encode()]
        # A vocabulary without the bytes has nothing forced, and its masks say the rest.
        return [one for one in single if one is not None] if None not in single else []


def grammar_of(library: Any, request: dict[str, Any]) -> str:
    """Return a grammar in the library's own form. Raises ValueError."""
    notation, text = request["notation"], request["text"]
    if notation == "gbnf":
        from llguidance.gbnf_to_lark import gbnf_to_lark

        notation, text = "lark", gbnf_to_lark(text)
    if notation == "regex":
        notation, text = "lark", f"start: /{library.regex_to_lark(text)}/"
    one = {"json_schema": json.loads(text)} if notation == "json" else {"lark_grammar": text}
    if not request["around"]:
        return json.dumps({"grammars": [one]})
    return json.dumps({"grammars": [{"lark_grammar": request["around"]}, {"name": "answer", **one}]})


class Follower:
    """An answer that follows a grammar."""

    def __init__(self, library: Any, words: Any, request: dict[str, Any]) -> None:
        limits = library.LLParserLimits(verbose_errors=False)
        grammar = grammar_of(library, request)
        self._matcher = library.LLMatcher(words, grammar, log_level=0, limits=limits)

    def take(self, token: int) -> None:
        """Add a token to the answer."""
        self._matcher.consume_token(token)

    def reply(self) -> bytes:
        """Return what may come next."""
        matcher = self._matcher
        forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
        if forced:
            matcher.consume_tokens(forced)
        mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
        if matcher.is_error() or (mask and not mask.strip(b"\0")):
            return failure(matcher.get_error() or "no token can come next")
        if matcher.is_stopped() and matcher.stop_reason() not in ("NoExtension", "EndOfSentence"):
            return failure(f"it ends with {matcher.stop_reason()}")
        state = OVER if matcher.is_stopped() else MASK
        return REPLY.pack(state, len(forced)) + struct.pack(f"<{len(forced)}i", *forced) + mask


def failure(why: str) -> bytes:
    """Return the reply of an error."""
    kind = LIMIT if any(one in why for one in _BOUNDS) else BAD
    if "NoExtensionBias" in why:
        why = "no text follows it"
    return REPLY.pack(kind, 0) + " ".join(why.replace("<non-verbose/>", "").split())[:300].encode()


def read(connection: socket.socket) -> bytes:
    """Return a frame; empty at the end."""
    size = struct.unpack("<i", head)[0] if len(head := _exactly(connection, 4)) == 4 else 0
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left and (part := connection.recv(min(left, 2**20))):
        parts.append(part)
        left -= len(part)
    return b"" if left else b"".join(parts)


def write(connection: socket.socket, frame: bytes) -> None:
    """Send a frame."""
    connection.sendall(struct.pack("<i", len(frame)) + frame)


def bound(seconds: float) -> None:
    """End this process after so much more time of its processor."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def follow(library: Any, words: Any, connection: socket.socket, settings: dict[str, Any]) -> None:
    """Follow one grammar until its socket ends."""
    limit(settings["memory_bytes"])
    bound(settings["seconds"])
    try:
        follower = Follower(library, words, json.loads(read(connection)))
    except (MemoryError, RecursionError):
        write(connection, failure("too large for its process"))
        return
    except Exception as error:  # the library's errors, and whatever a notation's reader raises
        write(connection, failure(str(error)))
        return
    write(connection, follower.reply())
    while frame := read(connection):
        bound(settings["step_seconds"])
        follower.take(struct.unpack("<i", frame)[0])
        write(connection, follower.reply())


def limit(memory_bytes: int) -> None:
    """Bound this process's memory and files."""
    import resource

    used = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as status:
            used = int(status.read().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, used + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        # Systems without one of them refuse it; the bound of time remains.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def main() -> None:
    """Fork a process for each socket that comes, until the input ends."""
    # Ctrl-C at a terminal is meant for the other side, which may go on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=0)
    settings = json.loads(read(control))
    sys.path[:] = settings["path"]
    import llguidance

    vocabulary: Any = Words(settings)
    words = llguidance.LLTokenizer(vocabulary)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            with socket.socket(fileno=descriptors[0]) as connection:
                follow(llguidance, words, connection, settings)
            os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
