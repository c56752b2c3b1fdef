"""Yield points of long computations in Python, such as the compile of a large graph. Pure.

Loops over `in_turns` call the `pause` of the context that they run in, if it has one, every few
items. The pause may let other threads have the interpreter, and may raise to end the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

#: The items of a loop between two pauses, less one: a power of two, less one.
ITEMS = 15

_pause: ContextVar[Callable[[], None] | None] = ContextVar("pause", default=None)


@contextmanager
def pausing(pause: Callable[[], None]) -> Iterator[None]:
    """Call `pause` at the yield points within this context."""
    before = _pause.set(pause)
    try:
        yield
    finally:
        _pause.reset(before)


def in_turns(items: Iterable[T]) -> Iterable[T]:
    """Return the items; within `pausing`, with a pause between some of them."""
    pause = _pause.get()
    return items if pause is None else _with_pauses(items, pause)


def _with_pauses(items: Iterable[T], pause: Callable[[], None]) -> Iterator[T]:
    for number, item in enumerate(items):
        if not number & ITEMS:
            pause()
        yield item
