"""Checks of arguments, with advice for the usual mistakes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from numbers import Real
from operator import index
from typing import Any

from heliograph_proto.errors import InvalidArgumentError

#: Longer timeouts count as none. Python's own waits cannot take much more.
_FOR_EVER_SECONDS = 1e8
#: Advice for a shape with an open size, None or -1.
FIXED_SHAPES = "shapes are fixed: build a graph for each shape that you need, and compile each once"


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return "1 step" or "2 steps"; `plural` is for words that take no s."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def sizes_of(shape: Sequence[int] | int) -> tuple[int, ...]:
    """Return a shape as ints; an int is a shape of one dimension. Raises InvalidArgumentError."""
    given: Any = shape
    try:
        return (index(given),) if hasattr(given, "__index__") and not _is_long(given) else _sizes(given)
    except TypeError:
        unknown = isinstance(given, tuple | list) and any(size is None for size in given)
        message = f"{given!r:.80} is no shape"
        if unknown:
            raise InvalidArgumentError(f"{message}: a size is not known", advice=FIXED_SHAPES) from None
        raise InvalidArgumentError(
            message, advice="a shape is ints: (4, 3), or 4 for one dimension"
        ) from None


def _is_long(given: Any) -> bool:
    # NumPy's arrays have __index__, whatever their shape.
    return getattr(given, "ndim", 0) > 0


def _sizes(given: Any) -> tuple[int, ...]:
    if isinstance(given, str | bytes):
        raise TypeError
    return tuple(map(index, given))


def checked_timeout(timeout: float | None) -> float | None:
    """Return the seconds, or None for no limit. Raises InvalidArgumentError."""
    if timeout is None:
        return None
    if not isinstance(timeout, Real) or isinstance(timeout, bool) or not timeout >= 0:
        raise InvalidArgumentError(f"timeout is {timeout!r:.80}", advice="seconds, 0 or more, or None")
    return None if timeout > _FOR_EVER_SECONDS else float(timeout)


def connect_seconds(timeout: float | None) -> float:
    """Return the seconds to wait for a server, of which None is years. Raises
    InvalidArgumentError."""
    seconds = checked_timeout(timeout)
    return _FOR_EVER_SECONDS if seconds is None else seconds


def timeout_ms(timeout: float | None) -> int:
    """Return seconds as the contract's milliseconds, where 0 is no limit. Raises
    InvalidArgumentError."""
    seconds = checked_timeout(timeout)
    return 0 if seconds is None else min(max(1, math.ceil(seconds * 1000)), 2**32 - 1)


def refuse_pickle(what: str, advice: str) -> TypeError:
    """Return the error for pickling or copying an object of a session."""
    return TypeError(f"a {what} cannot be pickled or copied: it is of one session in this process; {advice}")


#: How many near names an error lists.
_NEAR = 3


def pattern_words(pattern: object) -> str:
    """Describe a pattern, or a function of a node."""
    return (
        f"{pattern!r:.80}" if isinstance(pattern, str) else getattr(pattern, "__name__", f"{pattern!r:.80}")
    )


def near_names(pattern: str, names: Collection[str]) -> str:
    """Advise on a pattern that no name matches."""
    near = get_close_matches(pattern, names, _NEAR, cutoff=0.3)
    return f"near names: {', '.join(map(repr, near))}" if near else f"names are such as {list(names)[:_NEAR]}"
