"""The processes that follow grammars, from this side."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from heliograph.errors import (
    ConfigurationError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    UnsupportedError,
)
from heliograph.llm.constraints.forms import Constraint
from heliograph.llm.constraints.matching import BAD, LIMIT, OVER, REPLY, read, write

if TYPE_CHECKING:
    from heliograph.llm.tokenizers import Tokenizer

Array: TypeAlias = "np.ndarray[Any, Any]"

#: The memory of the process of one answer, beside the vocabulary's, in bytes of address space.
MEMORY_BYTES = 512 * 2**20
#: The CPU time of a grammar's compilation, and of each token.
CPU_SECONDS = 2.0
STEP_SECONDS = 0.3
#: The wait for a token, and for a grammar with the start of the first process.
WAIT_SECONDS = 30.0
START_SECONDS = 120.0
_PROGRAM = Path(__file__).with_name("matching.py")
_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH")
#: A noncharacter of Unicode: no word of a vocabulary has a part of it and more.
_MARK = "\ufdd0"


class Matching:
    """The constraints of one vocabulary. Thread-safe. Its process starts with the first one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0
        self._end: weakref.finalize[Any, Any] | None = None
        words = len(tokenizer)
        stops = sorted(tokenizer.stops)
        #: The token that stands for the end; one behind the others where the vocabulary has none.
        self._end_token = stops[0] if stops else words
        self._ends = np.zeros(-(-(words + 1) // 32), np.int32)
        for stop in stops:
            self._ends[stop // 32] |= _bit(stop)

    def follow(self, constraint: Constraint) -> Matcher:
        """Return what an answer may begin with. Blocks, some milliseconds once the process runs.

        Raises InvalidArgumentError for a grammar that is wrong, impossible or beyond the library,
        LimitExceededError for one that takes more time or memory than it may, and
        ConfigurationError without the package `llguidance`.
        """
        made = Matcher(constraint.name, self._connection(), self._ends, self._end_token)
        request = {"notation": constraint.notation, "text": constraint.text, "around": constraint.around}
        try:
            made.begin(json.dumps(request).encode())
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """End the process. Answers in progress end with an error; the next one starts another."""
        with self._lock:
            self._stop()

    def _connection(self) -> socket.socket:
        """Return a connection to a new process."""
        for is_last in (False, True):
            ours, theirs = socket.socketpair()
            try:
                with self._lock, theirs:
                    socket.send_fds(self._running(), [b"."], [theirs.fileno()])
                return ours
            except OSError as error:
                ours.close()
                self.close()
                if is_last:
                    raise ConfigurationError(f"the process of grammars has ended: {error}") from None
            except BaseException:
                ours.close()
                raise
        raise AssertionError

    def _running(self) -> socket.socket:
        """Return the socket of the first process, which is started if none runs."""
        is_ours = self._owner == os.getpid()
        if is_ours and self._process is not None and self._process.poll() is None:
            assert self._control
            return self._control
        self._stop()
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise UnsupportedError("grammars need a system that forks, as Linux and macOS do")
        if find_spec("llguidance") is None:
            raise ConfigurationError(
                "the package 'llguidance' is not installed", advice="pip install 'heliograph[llm]'"
            )
        settings = json.dumps(self._settings()).encode()
        control, theirs = socket.socketpair()
        with theirs:
            try:
                # Isolated: nothing of the folder it starts in, or of the user's own packages, comes in.
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_PROGRAM)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={key: os.environ[key] for key in _KEPT if key in os.environ},
                )
            except OSError as error:
                control.close()
                raise ConfigurationError(f"cannot start a process for grammars: {error}") from None
        self._process, self._control, self._owner = process, control, os.getpid()
        self._end = weakref.finalize(self, _end, process, control, self._owner)
        control.settimeout(START_SECONDS)
        write(control, settings)
        return control

    def _settings(self) -> dict[str, Any]:
        words, special = self._tokenizer.bytes_of_words()
        if self._end_token == len(words):
            special.append(len(words))
            words.append(b"<end>")
        return {
            "path": sys.path,
            "words": [word.hex() for word in words],
            "special": special,
            "end": self._end_token,
            "encoder": self._tokenizer.plain_encoder(),
            "mark": _MARK,
            "memory_bytes": MEMORY_BYTES,
            "seconds": CPU_SECONDS,
            "step_seconds": STEP_SECONDS,
        }

    def _stop(self) -> None:
        self._process = self._control = None
        if self._end is not None:
            self._end()
            self._end = None


class Matcher:
    """The tokens that may come next in one answer."""

    def __init__(self, name: str, connection: socket.socket, ends: Array, end: int) -> None:
        self._name = name
        self._connection = connection
        self._ends = ends
        self._end = end
        self._mask: Array = ends
        self._is_last = False
        self._is_asked = False
        self._turn = threading.Lock()
        self._is_closed = False
        #: The tokens that must come next, in their order. They are not asked for.
        self.forced: deque[int] = deque()

    @property
    def mask(self) -> Array:
        """The tokens that may come next: a bit each, the least first, in words of i32."""
        if not self.forced:
            return self._mask
        found = np.zeros_like(self._ends)
        found[self.forced[0] // 32] = _bit(self.forced[0])
        return found

    @property
    def is_over(self) -> bool:
        """True if no token can come next: the answer is complete."""
        return self._is_last and not self.forced

    def begin(self, request: bytes) -> None:
        """Send the grammar, and wait for the first tokens. Raises as `Matching.follow`."""
        self._connection.settimeout(START_SECONDS)
        self._send(request)
        self.receive()
        self._connection.settimeout(WAIT_SECONDS)
        if self.is_over:
            raise InvalidArgumentError(f"{self._name} allows no answer but the empty one")

    def send(self, token: int) -> None:
        """Note the next token of the answer; `receive` must follow.

        Raises InvalidArgumentError for a token that may not come, as a bias can make it.
        """
        if not self.forced:
            self._send(struct.pack("<i", token))
        elif token != self.forced.popleft():
            raise InvalidArgumentError(
                f"{self._name}: no token that it allows can be chosen", advice="change logit_bias"
            )

    def receive(self) -> None:
        """Wait for what may come after the token that was sent.

        Blocks, some microseconds for most tokens. Raises InvalidArgumentError for a token that may
        not come, and LimitExceededError where the grammar takes more time or memory than it may.
        """
        if not self._is_asked:
            return
        self._is_asked = False
        with self._using():
            if not (reply := read(self._connection)):
                raise EOFError
        state, count = REPLY.unpack_from(reply)
        if state in (BAD, LIMIT):
            raise self._failure(state, reply[REPLY.size :].decode(errors="replace"))
        self._is_last = state == OVER
        self.forced.extend(struct.unpack_from(f"<{count}i", reply, REPLY.size))
        if not self._is_last:
            mask = np.zeros_like(self._ends)
            found = np.frombuffer(reply, np.int32, offset=REPLY.size + 4 * count)
            mask[: len(found)] = found
            if mask[self._end // 32] & _bit(self._end):
                mask |= self._ends
            self._mask = mask

    def take_forced(self, most: int) -> list[int]:
        """Return the tokens that must come next, `most` of them at most, and note them."""
        return [self.forced.popleft() for _ in range(min(most, len(self.forced)))]

    def take(self, token: int) -> None:
        """Note the next token, and wait. Raises as `send` and `receive`."""
        self.send(token)
        self.receive()

    def close(self) -> None:
        """End its process, after what another thread waits for. Idempotent."""
        self._is_closed = True
        if self._turn.acquire(blocking=False):
            self._connection.close()
            self._turn.release()

    def __del__(self) -> None:
        self.close()

    def _send(self, frame: bytes) -> None:
        with self._using():
            write(self._connection, frame)
        self._is_asked = True

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Use the connection, which another thread may want to close."""
        try:
            with self._turn:
                yield
        except (OSError, EOFError):
            raise self._lost() from None
        finally:
            if self._is_closed:
                self.close()

    def _lost(self) -> HeliographError:
        """Return the error of a process that is out of time, of memory or of stack, or was closed."""
        self.close()
        return LimitExceededError(
            f"{self._name} takes more than {CPU_SECONDS:g} seconds, {STEP_SECONDS:g} for a token, "
            f"{MEMORY_BYTES >> 20} MiB, or the stack of its process",
            advice="make it simpler: fewer alternatives, and smaller numbers of repetitions",
        )

    def _failure(self, state: bytes, why: str) -> HeliographError:
        if state == LIMIT:
            return LimitExceededError(f"{self._name} is beyond a bound: {why}", advice="make it simpler")
        return InvalidArgumentError(f"{self._name} cannot be followed: {why}")


def _bit(token: int) -> np.int32:
    """The bit of a token in its word, which is negative for the last one."""
    value = 1 << token % 32
    return np.int32(value - 2**32 if value == 2**31 else value)


def _end(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    """End a process of ours, and in a fork of ours close our end of its socket alone."""
    control.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0
