"""What errors say of work that was broken off: the same words, whoever notices it and on every road."""

from __future__ import annotations

from collections.abc import Callable

from heliograph_proto.errors import CancelledError, DeadlineExceededError

#: What somebody waits for, in words; or what says it, where the words cost time.
What = str | Callable[[], str]
#: Why no memory is shared with `local:`.
ALONE = "the server is this process"
ANSWER = "the answer"


def words_of(what: What) -> str:
    """The words."""
    return what if isinstance(what, str) else what()


def late(what: What, seconds: float) -> DeadlineExceededError:
    """The error of something that took too long."""
    return DeadlineExceededError(
        f"{words_of(what)} was not done within {seconds:g} s",
        advice="allow more time with timeout=, or None for as long as it takes",
    )


def cancelled(what: What) -> CancelledError:
    """The error of something that was cancelled."""
    return CancelledError(f"{words_of(what)} was cancelled")


def lost(what: What, cause: BaseException) -> CancelledError:
    """What later uses of a tensor meet, after a write to it was broken off."""
    ended = cause if isinstance(cause, DeadlineExceededError) else cancelled(what)
    return CancelledError(
        f"{ended.message}; the tensor's contents were lost by that",
        advice="write it whole to use it again: tensor.set(array), or tensor.memset(0)",
    )
